"""`CreateGPUConnector`: which connector an engine and a configuration need, as one table; nothing is moved here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ArgumentError
from ..layouts import LAYOUTS
from ..metadata import EngineType, LMCacheMetadata
from ..rope import RotarySpec
from .interface import GPUConnectorInterface
from .mock import MockGPUConnector
from .sglang import SGLangGPUConnector, SGLangLayerwiseGPUConnector
from .trtllm import TRTLLMGPUConnector
from .vllm_blend import VLLMBufferLayerwiseGPUConnector
from .vllm_layerwise import VLLMPagedMemLayerwiseGPUConnector
from .vllm_paged import VLLMPagedMemGPUConnectorV2, VLLMPagedMemGPUConnectorV3

FLAGS = ("use_layerwise", "enable_blending", "use_gpu_connector_v3", "enable_pd")

#: (engine, which of layerwise, blending and V3 are on) -> connector
CONNECTORS: dict[tuple[EngineType, frozenset[str]], Any] = {
    (EngineType.VLLM, frozenset()): VLLMPagedMemGPUConnectorV2,
    (EngineType.VLLM, frozenset({"use_gpu_connector_v3"})): VLLMPagedMemGPUConnectorV3,
    (EngineType.VLLM, frozenset({"use_layerwise"})): VLLMPagedMemLayerwiseGPUConnector,
    (EngineType.VLLM, frozenset({"use_layerwise", "enable_blending"})): VLLMBufferLayerwiseGPUConnector,
    (EngineType.SGLANG, frozenset()): SGLangGPUConnector,
    (EngineType.SGLANG, frozenset({"use_layerwise"})): SGLangLayerwiseGPUConnector,
    (EngineType.TRTLLM, frozenset()): TRTLLMGPUConnector,
    (EngineType.MOCK, frozenset()): MockGPUConnector,
}


def need_gpu_interm_buffer(config: Any) -> bool:
    """Whether transfers go through a device staging buffer: not with `enable_pd`, which sends straight from pages."""
    return not bool(getattr(config, "enable_pd", False))


def CreateGPUConnector(
    config: Any,
    metadata: LMCacheMetadata,
    engine: EngineType | str,
    layout_hints: Mapping[str, Any] | None = None,
    rope: RotarySpec | None = None,
) -> GPUConnectorInterface:
    """The connector for an engine (`EngineType` or its string), from the flags in `FLAGS`, which default to off.

    rope: how the engine rotates its keys, for blending. The device is `cuda:{local_worker_id}` where CUDA is, else
    xpu or hpu where one is, else the CPU; the current device is not changed. Raises ArgumentError naming a combination
    that cannot work and what to change.
    """
    engine = EngineType(engine)
    on = frozenset(flag for flag in FLAGS if getattr(config, flag, False))
    refuse_combination(engine, on, metadata)
    connector = CONNECTORS[engine, on - {"enable_pd"}]
    options: dict[str, Any] = {"use_gpu": need_gpu_interm_buffer(config)}
    if "enable_blending" in on:
        options["rope"] = rope
    return connector.from_metadata(
        metadata, device=worker_device(metadata.local_worker_id), layout_hints=layout_hints, **options
    )


def refuse_combination(engine: EngineType, on: frozenset[str], metadata: LMCacheMetadata) -> None:
    """ArgumentError for a combination that no connector serves: everything that is wrong, and what to change."""
    served = frozenset[str]().union(*(flags for known, flags in CONNECTORS if known is engine), {"enable_pd"})
    blending, v3 = "enable_blending" in (on & served), "use_gpu_connector_v3" in (on & served)
    rows = [row for row in LAYOUTS.values() if CONNECTORS[engine, frozenset()].engine in row.engines]
    reasons = [
        *(
            (True, f"no connector of {engine.value} has {flag}", f"turn {flag} off")
            for flag in FLAGS
            if flag in on - served
        ),
        (blending and "use_layerwise" not in on, "enable_blending needs use_layerwise", "turn use_layerwise on"),
        (
            blending and "enable_pd" in on,
            "enable_pd has no buffer to blend in",
            "turn enable_blending or enable_pd off",
        ),
        (blending and metadata.use_mla, "MLA rows hold no keys to re-rotate", "turn enable_blending off"),
        (v3 and (blending or "use_layerwise" in on), "V3 moves all layers at once", "turn use_gpu_connector_v3 off"),
        (
            metadata.use_mla and not any(row.is_mla for row in rows),
            f"no layout of {engine.value} with MLA is known",
            "use a model without MLA, or add the layout's row with register_layout()",
        ),
    ]
    wrong = [f"{why}: {change}" for applies, why, change in reasons if applies]
    if wrong:
        model = " and an MLA model" if metadata.use_mla else ""
        raise ArgumentError(f"{engine.value} with {_names(on)}{model}: {'; '.join(wrong)}")


def _names(flags: frozenset[str]) -> str:
    return " + ".join(flag for flag in FLAGS if flag in flags) or "no flag"


def worker_device(local_worker_id: int) -> torch.device:
    """The accelerator of a worker by its local number, or the CPU. The current device is not changed."""
    for kind in ("cuda", "xpu", "hpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, local_worker_id)
    return torch.device("cpu")
