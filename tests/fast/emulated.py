"""The CUDA kernels run on the host, block after block (`cuda_on_host.cpp`); the test chooses every launch setting."""

from __future__ import annotations

import ctypes
import functools
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmcache_fast.cpu.backend import TYPE_NUMBERS
from lmcache_fast.cpu.compile import load_library
from lmcache_fast.descriptors import (
    SLOTS_IN_BATCH,
    WORDS_PER_CHUNK,
    Batch,
    chunk_table,
    describe_move,
    describe_rotation,
    describe_rotation_on_the_way,
    plane_table,
    vector_bytes,
)
from lmcache_fast.environment import source_folder
from lmcache_ref.plan import TransferPlan
from lmcache_ref.rope import RotarySpec

HERE = Path(__file__).parent
NO_BAD_TOKEN = (1 << 64) - 1


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    csrc = source_folder()
    content = [HERE / "cuda_on_host.h", *sorted(csrc.glob("*.h")), *sorted(csrc.glob("*.cu"))]
    flags = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-I", str(csrc), "-I", str(HERE)]  # as some compilers have it
    loaded = load_library("cuda_on_host", [HERE / "cuda_on_host.cpp"], content, flags)
    loaded.launch_move.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_void_p]
    loaded.launch_rotate.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4]
    loaded.launch_keep.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p]
    loaded.launch_scatter_rotated.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_void_p]
    for name in ("launch_move", "launch_rotate", "launch_keep", "launch_scatter_rotated"):
        getattr(loaded, name).restype = None
    return loaded


class Outcome(NamedTuple):
    """misaligned_vectors: not aligned to their size. stored_bytes: written, twice if twice. split_barriers: reached by some
    threads of a block and missed by others. bad_token: the first one."""

    misaligned_vectors: int
    stored_bytes: int
    split_barriers: int
    bad_token: int


@dataclass
class Launch:
    """How a move is launched. width_bytes: None is the widest the batch allows. block_ids: None are the plan's slots.
    inline: chunks travel in the batch, relative to a base address. planes: [first, end) of those that are moved."""

    width_bytes: int | None = None
    tile_tokens: int = 4
    blocks: int = 3
    threads: int = 64
    block_ids: torch.Tensor | None = None
    inline: bool = True
    planes: tuple[int, int] | None = None
    planes_per_unit: int = 2

    def move(self, plan: TransferPlan, direction: str) -> Outcome:
        """Run the kernel."""
        bad_token = array("Q", [NO_BAD_TOKEN])
        batch, widest_bytes, _kept = self._described(plan, bad_token)
        if self.inline and self.block_ids is None and len(plan.slots) <= SLOTS_IN_BATCH:
            batch.move.ids, batch.slots[: len(plan.slots)] = 0, plan.slots.tolist()
        width_bytes = widest_bytes if self.width_bytes is None else self.width_bytes
        arguments = int(direction == "scatter"), width_bytes.bit_length() - 1, self.blocks, self.threads
        counts = array("q", [0, 0, 0])
        library().launch_move(ctypes.byref(batch), *arguments, counts.buffer_info()[0])
        return Outcome(*counts, bad_token[0])

    def scatter_rotated(self, plan: TransferPlan, bad_rotation: array[int] | None = None) -> Outcome:
        """Run the kernel that moves keys and re-rotates them as the plan asks; without `planes`, all of the keys.
        bad_rotation: receives the word for the first token that cannot be rotated."""
        bad_token = array("Q", [NO_BAD_TOKEN])
        rotated, table = plan.rotation, plan.rotation.rope.cos_sin_cache
        planes = (0, len(plan.planes)) if self.planes is None else self.planes
        batch, _, _kept = replace(self, planes=planes)._described(plan, bad_token)
        positions = rotated.old_positions.data_ptr(), rotated.new_positions.data_ptr()
        rotation = describe_rotation_on_the_way(plan.cache, *positions, table, rotated.rope.is_neox)
        bad_rotation = array("Q", [NO_BAD_TOKEN]) if bad_rotation is None else bad_rotation
        rotation.bad_token = bad_rotation.buffer_info()[0]
        types = TYPE_NUMBERS[plan.cache.dtype], TYPE_NUMBERS[table.dtype]
        counts = array("q", [0, 0, 0])
        library().launch_scatter_rotated(
            ctypes.byref(batch), ctypes.byref(rotation), *types, self.blocks, self.threads, counts.buffer_info()[0]
        )
        return Outcome(*counts, bad_token[0])

    def _described(self, plan: TransferPlan, bad_token: array[int]) -> tuple[Batch, int, Any]:
        """The batch, the widest vector that it allows, and what it points to."""
        planes = plane_table(plan.planes)
        chunks = chunk_table(plan, self.tile_tokens)
        ids = plan.slots if self.block_ids is None else self.block_ids
        move = describe_move(plan, ids, planes, 0, chunks, self.tile_tokens)
        if self.block_ids is not None:
            move.num_ids, move.tokens_per_id = plan.cache.num_blocks, plan.cache.block_size
        move.bad_token = bad_token.buffer_info()[0]
        if self.planes is not None:
            move.first_plane, move.num_planes = self.planes[0], self.planes[1] - self.planes[0]
        move.planes_per_unit = self.planes_per_unit
        batch = Batch(move)
        if self.inline:
            batch.move.chunks = 0
            batch.move.base_address = 1 << 20
            words = chunks.words.tolist()
            words[::WORDS_PER_CHUNK] = [address - (1 << 20) for address in words[::WORDS_PER_CHUNK]]
            batch.chunks[: len(words)] = words
        return batch, vector_bytes(planes, chunks), (planes, chunks, ids)


def rotate(
    keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rope: RotarySpec, bad: list[int] | None = None
) -> None:
    """Run the rotation kernel; `bad` receives the word for the first bad token."""
    table = rope.cos_sin_cache
    rotation = describe_rotation(keys, old, new, table, rope.is_neox)
    bad_token = array("Q", [NO_BAD_TOKEN])
    rotation.bad_token = bad_token.buffer_info()[0]
    library().launch_rotate(ctypes.byref(rotation), TYPE_NUMBERS[keys.dtype], TYPE_NUMBERS[table.dtype], 2, 96)
    if bad is not None:
        bad.append(bad_token[0])
