"""SGLang's KV pools: recorded shapes and strides, the real classes where `sglang` can be imported, and a check of both.

Run as a script it builds the real pools on the CPU, checks them and prints one JSON line for each; it stands apart because it
puts placeholders where SGLang imports compiled packages. No test lives here, see `test_sglang_pools.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from lmcache_ref.connectors import SGLangGPUConnector, SGLangLayerwiseGPUConnector
from lmcache_ref.memory import HostMemoryAllocator, MemoryFormat
from lmcache_ref.metadata import LMCacheMetadata

NL, HS, SIZE, RANK, ROPE = 3, 64, 64, 48, 16
SPANS, SLOTS = [(0, 5), (5, 7), (9, 12)], [33, 17, 64, 2, 50, 21, 9, 40, 41, 63, 16, 18]


@dataclass
class Pools:
    """What a pool holds: `k` and `v` lists of `[slots, NH, HS]`, or with MLA `k` a list of `[slots, 1, width]`."""

    name: str
    k: list[torch.Tensor]
    v: list[torch.Tensor] | None
    dtype: torch.dtype

    @property
    def lists(self) -> dict[str, Any]:
        """The forms in which SGLang's adapter, or a caller, passes them."""
        if self.v is None:
            return {"list": self.k, "nested": [self.k]}
        return {"k + v": self.k + self.v, "nested": [self.k, self.v], "tuple": (tuple(self.k), tuple(self.v))}


def recorded() -> Iterator[Pools]:
    """Shapes, strides and storages as SGLang 0.4.6.post5 (K and V apart) and 0.5.23 (halves of one allocation) make them."""
    for page in (1, 16):
        slots = SIZE + page
        for heads in (1, 2):
            shape = (slots, heads, HS)
            both = [torch.zeros(2, *shape, dtype=torch.float16) for _ in range(2 * NL)]
            apart = [one[0].clone() for one in both]
            halves = f"0.5.23 MHA, page {page}, {heads} heads"
            yield Pools(f"0.4.6 MHA, page {page}, {heads} heads", apart[:NL], apart[NL:], torch.float16)
            yield Pools(halves, [one[0] for one in both[:NL]], [one[1] for one in both[:NL]], torch.float16)
        fp8 = [torch.zeros(2, slots, 2, HS, dtype=torch.uint8) for _ in range(NL)]
        yield Pools(
            f"0.5.23 MHA, page {page}, fp8", [one[0] for one in fp8], [one[1] for one in fp8], torch.float8_e5m2
        )
        latent = [torch.zeros(slots, 1, RANK + ROPE, dtype=torch.bfloat16) for _ in range(NL)]
        yield Pools(f"0.5.23 MLA, page {page}", latent, None, torch.bfloat16)


def check(pools: Pools) -> Iterator[tuple[str, str | None]]:
    """Through both connectors and every form of the lists: (what, None or what went wrong)."""
    for form, lists in pools.lists.items():
        for make in (SGLangGPUConnector, SGLangLayerwiseGPUConnector):
            for use_gpu in (False, True):
                what = f"{pools.name}, {form}, {make.__name__}, {'staged' if use_gpu else 'direct'}"
                yield what, _round_trip(pools, lists, make, use_gpu)


def _round_trip(pools: Pools, lists: Any, make: Any, use_gpu: bool) -> str | None:
    """Store three chunks, wipe the pool, load them, and compare every slot of every tensor by plain indexing."""
    planes = [pools.k] if pools.v is None else [pools.k, pools.v]
    for k, plane in enumerate(planes):
        for layer, tensor in enumerate(plane):
            count = torch.arange(tensor.numel(), dtype=torch.int64) * 7 + 1000 * layer + 500 * k
            raw = count.to(torch.uint8 if tensor.element_size() == 1 else torch.int16)
            tensor.view(raw.dtype).copy_(raw.view(tensor.shape))
    before = [[tensor.clone() for tensor in plane] for plane in planes]
    heads, width = pools.k[0].shape[1:]
    shape = (NL, len(planes), 4, heads, width)
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, pools.dtype, shape, use_mla=pools.v is None)
    connector = make.from_metadata(metadata, use_gpu=use_gpu, device="cpu")
    allocator = HostMemoryAllocator(1 << 20)
    slots, starts, ends = torch.tensor(SLOTS), [start for start, _ in SPANS], [end for _, end in SPANS]
    layers = NL if make is SGLangLayerwiseGPUConnector else 1
    objects = [
        [
            allocator.allocate(connector.get_shape(end - start), pools.dtype, MemoryFormat.UNDEFINED)
            for start, end in SPANS
        ]
        for _ in range(layers)
    ]
    if layers == 1:
        connector.batched_from_gpu(objects[0], starts, ends, kvcaches=lists, slot_mapping=slots)
    else:
        list(connector.batched_from_gpu(objects, starts, ends, kvcaches=lists, slot_mapping=slots, sync=True))
    for plane in planes:
        for tensor in plane:
            tensor.view(torch.uint8).fill_(0xEE)
    wanted = [[tensor.clone() for tensor in plane] for plane in planes]
    moved = [SLOTS[token] for start, end in SPANS for token in range(start, end)]
    for k, plane in enumerate(wanted):
        for layer, tensor in enumerate(plane):
            tensor[moved] = before[k][layer][moved]
    if layers == 1:
        connector.batched_to_gpu(objects[0], starts, ends, kvcaches=lists, slot_mapping=slots)
    else:
        load = connector.batched_to_gpu(starts, ends, kvcaches=lists, slot_mapping=slots, sync=True)
        next(load)
        for row in objects:
            load.send(row)
        next(load)
    for k, plane in enumerate(planes):
        for layer, tensor in enumerate(plane):
            if not torch.equal(tensor.view(torch.uint8), wanted[k][layer].view(torch.uint8)):
                return f"{'KV'[k]} of layer {layer} differs"
    return None


# ------------------------------------------------------------------------------------------ the real classes

COMPILED = ("torchvision", "torchaudio", "sgl_kernel", "flashinfer", "decord", "deep_gemm", "sgl_deep_gemm")


class AnyName(type):
    """Metaclass of classes that have every attribute, each a number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return len(name)


class Placeholder(types.ModuleType):
    """A module that has every name, each a class that can be called with anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {"__init__": lambda self, *args, **kwargs: None})


class Finder:
    """Finds a placeholder for packages that are compiled for a GPU."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in COMPILED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Placeholder:
        module = Placeholder(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def real() -> Iterator[Pools]:
    """Pools of the `sglang` that can be imported, on the CPU."""
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    version = importlib.metadata.version
    names = {"torchvision": "0.28.0", "sgl-kernel": "9.9", "sglang-kernel": "9.9", "flashinfer-python": "9.9"}
    names["flashinfer_python"] = "9.9"
    importlib.metadata.version = lambda name: names.get(name) or version(name)
    import triton.runtime.cache as triton_cache

    for name in ("default_cache_dir", "default_dump_dir", "default_override_dir"):  # gone from later versions of triton
        if not hasattr(triton_cache, name):
            setattr(triton_cache, name, tempfile.gettempdir)
    import sglang.srt.layers.quantization  # noqa: F401  (first: the pools' module imports it in a circle)
    from sglang.srt.mem_cache import memory_pool

    def common(page, dtype):
        return {
            "size": SIZE,
            "page_size": page,
            "dtype": dtype,
            "layer_num": NL,
            "device": "cpu",
            "enable_memory_saver": False,
        }

    for page in (1, 16):
        for heads in (1, 2):
            pool = memory_pool.MHATokenToKVPool(**common(page, torch.float16), head_num=heads, head_dim=HS)
            yield Pools(f"real MHA, page {page}, {heads} heads", pool.k_buffer, pool.v_buffer, torch.float16)
        pool = memory_pool.MHATokenToKVPool(**common(page, torch.float8_e5m2), head_num=2, head_dim=HS)
        yield Pools(f"real MHA, page {page}, fp8", pool.k_buffer, pool.v_buffer, torch.float8_e5m2)
        pool = memory_pool.MLATokenToKVPool(**common(page, torch.bfloat16), kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        yield Pools(f"real MLA, page {page}", pool.kv_buffer, None, torch.bfloat16)


def description(pools: Pools) -> list[Any]:
    """Name without its version, shapes and strides of the first layer, and whether K and V lie in one allocation."""
    k, v = pools.k[0], pools.v[0] if pools.v else None
    one = v is not None and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    return [pools.name.partition(" ")[2], list(k.shape), list(k.stride()), v is not None and list(v.stride()), one]


if __name__ == "__main__":
    for pools in real():
        wrong = {what: error for what, error in check(pools) if error}
        print(json.dumps({"pool": description(pools), "checks": len(list(check(pools))), "wrong": wrong}))
