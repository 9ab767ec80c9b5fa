"""The CUDA kernels run on the host, block after block (`cuda_on_host.cpp`); the test chooses every launch setting."""

from __future__ import annotations

import ctypes
import functools
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lmcache_fast.cpu.backend import TYPE_NUMBERS
from lmcache_fast.cpu.compile import load_library
from lmcache_fast.descriptors import (
    WORDS_PER_CHUNK,
    Batch,
    chunk_table,
    describe_move,
    describe_rotation,
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
    include = ["-I", str(csrc), "-I", str(HERE)]
    loaded = load_library("cuda_on_host", [HERE / "cuda_on_host.cpp"], content, include)
    loaded.launch_move.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4, ctypes.c_void_p]
    loaded.launch_rotate.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4]
    loaded.launch_keep.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p]
    loaded.launch_move.restype = loaded.launch_rotate.restype = loaded.launch_keep.restype = None
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
        planes = plane_table(plan.planes)
        chunks = chunk_table(plan, self.tile_tokens)
        ids = plan.slots if self.block_ids is None else self.block_ids
        move = describe_move(plan, ids, planes, 0, chunks, self.tile_tokens)
        if self.block_ids is not None:
            move.num_ids, move.tokens_per_id = plan.cache.num_blocks, plan.cache.block_size
        bad_token = array("Q", [NO_BAD_TOKEN])
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
        width_bytes = vector_bytes(planes, chunks) if self.width_bytes is None else self.width_bytes
        arguments = int(direction == "scatter"), width_bytes.bit_length() - 1, self.blocks, self.threads
        counts = array("q", [0, 0, 0])
        library().launch_move(ctypes.byref(batch), *arguments, counts.buffer_info()[0])
        return Outcome(*counts, bad_token[0])


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
