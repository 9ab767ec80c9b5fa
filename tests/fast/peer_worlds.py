"""Tight paged memory and chunks in one fresh state, for LMCache's compiled functions and ours, called alike.

Memory is built by the conformance suite's own idea of a layout (einops), behind guards, aligned as engines align it. What
is compared with what is `test_against_peer_cuda.py`; no test lives here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from helpers import WORDS, assert_same, words
from lmcache_ref.backends import use_backend
from lmcache_ref.conformance.cases import SIZES
from lmcache_ref.conformance.engine import GUARD_ELEMENTS, EngineMemory, Geometry, addresses, sentinel
from lmcache_ref.layouts import LAYOUTS

TIGHT = Geometry("tight", 0, 0, 0, False)
NL, NB, BS = SIZES["tiny"].nl, SIZES["tiny"].nb, SIZES["tiny"].bs

PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pinned": lambda memory: memory.pin_memory(),
    "device": lambda memory: memory.cuda(),
    "host": lambda memory: memory,
}


@dataclass(frozen=True)
class Setting:
    """A row of the layout table, which way its bytes go, of which dtype, and where chunks and paged memory are."""

    name: str
    direction: str
    dtype: torch.dtype
    chunks: str = "pinned"
    paged: str = "device"

    @property
    def sizes(self) -> dict[str, int]:
        return SIZES["tiny"].of(LAYOUTS[self.name])

    @property
    def planes(self) -> int:
        return self.sizes["two"]

    @property
    def hidden(self) -> int:
        return self.sizes["nh"] * self.sizes["hs"]


class World:
    """The memory of one call. The side that is read holds addresses, the other one sentinels only."""

    def __init__(self, setting: Setting, chunk_shapes: Sequence[tuple[int, ...]]):
        self.setting = setting
        gathers, width = setting.direction == "D2H", setting.dtype.itemsize
        nobody = sentinel(width)
        engine = EngineMemory(LAYOUTS[setting.name], setting.sizes, TIGHT)
        memory = engine.filled(addresses(engine.shape, width, 1), nobody)
        self.memory = PLACES[setting.paged](
            (memory if gathers else torch.full_like(memory, nobody)).view(setting.dtype)
        )
        self.tensors = _leaves(engine.tensors(self.memory))
        self.flats, self.chunks = [], []
        for number, shape in enumerate(chunk_shapes):
            flat = torch.full((math.prod(shape) + 2 * GUARD_ELEMENTS,), nobody, dtype=WORDS[width])
            if not gathers:
                flat[GUARD_ELEMENTS:-GUARD_ELEMENTS] = addresses((math.prod(shape),), width, 2 + number)
            flat = PLACES[setting.chunks](flat.view(setting.dtype))
            self.flats.append(flat)
            self.chunks.append(flat[GUARD_ELEMENTS:-GUARD_ELEMENTS].view(shape))

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def pointers(self) -> torch.Tensor:
        """In the order of the row's lists, as upstream's callers hand them over."""
        return self.on_device([tensor.data_ptr() for tensor in self.tensors])

    def of(self, module: ModuleType) -> tuple[Any, Any]:
        """Direction and format as a module's own enums have them."""
        return getattr(module.TransferDirection, self.setting.direction), getattr(module.GPUKVFormat, self.setting.name)

    def bits(self) -> list[torch.Tensor]:
        """Every buffer, whole, on the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return [words(flat).clone() for flat in (self.memory, *self.flats)]


#: what is called: a module and a world
Call = Callable[[ModuleType, World], None]


def agree(
    peer: ModuleType, ours: ModuleType, backends: Sequence[str], build: Callable[[], World], call: Call, what: str
) -> None:
    """`call` by the peer and by ours under each backend leaves the same bits in every buffer, and not those it found."""
    __tracebackhide__ = True
    theirs = build()
    before = theirs.bits()
    call(peer, theirs)
    expected = theirs.bits()
    assert any(not torch.equal(was, now) for was, now in zip(before, expected, strict=True)), f"{what}: nothing moved"
    for backend in backends:
        world = build()
        with use_backend(backend):
            call(ours, world)
        for number, (got, wanted) in enumerate(zip(world.bits(), expected, strict=True)):
            buffer = f"chunk {number - 1}" if number else "the paged memory"
            assert_same(got, wanted, f"{what}: {buffer} by backend {backend}, against the peer's")


def outcome(peer: ModuleType, build: Callable[[], World], call: Call) -> str:
    """What the peer does with a call that it has no kernel for."""
    world = build()
    before = world.bits()
    try:
        call(peer, world)
    except Exception as error:  # its own, torch's: whatever it says
        said = f"refuses: {str(error).splitlines()[0]}"
    else:
        said = "returns"
    same = all(torch.equal(was, now) for was, now in zip(before, world.bits(), strict=True))
    return said if same else f"{said}, having written"


def _leaves(nested: Any) -> list[torch.Tensor]:
    return [nested] if isinstance(nested, torch.Tensor) else [leaf for part in nested for leaf in _leaves(part)]
