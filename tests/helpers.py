"""Memory whose elements say where they are, memory full of sentinels, and the comparison of whole buffers.

Everything is flat and counted in elements; how axes lie in it is the business of the test. No test lives here, the
comparison's own tests are in `test_transfer_laws.py`.
"""

from __future__ import annotations

import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SENTINEL_BYTE = 0xEE

#: one dtype of each width, and those whose bits a conversion would spoil
DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def addressed(num_elements: int, dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """A flat buffer whose element i holds the bits of `first` + i, cut to the width of the dtype so that neighbours
    differ; never a sentinel. Two bytes repeat after 60000 elements, one byte looks random."""
    index = torch.arange(first, first + num_elements, dtype=torch.int64)
    width = dtype.itemsize
    if width == 1:
        index = (index * 2654435761 >> 13) % 199
    elif width == 2:
        index = index % 60000
        index = torch.where(index >= 1 << 15, index - (1 << 16), index)
    return (index + 1).to(WORDS[width]).view(dtype)


def untouched(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat buffer that nobody has written: every byte is the sentinel."""
    return torch.full((num_elements * dtype.itemsize,), SENTINEL_BYTE, dtype=torch.uint8).view(dtype)


def words(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a flat buffer as integers, in host memory; a view where it is there already."""
    return flat.detach().view(WORDS[flat.element_size()]).cpu()


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Two flat buffers hold the same bits, everywhere."""
    __tracebackhide__ = True
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), f"{what}: another shape or dtype"
    bad = (words(got) != words(expected)).nonzero().flatten()
    if bad.numel():
        mask = (1 << (8 * got.element_size())) - 1
        first = int(bad[0])
        is_, should = int(words(got)[first]) & mask, int(words(expected)[first]) & mask
        raise AssertionError(
            f"{what}: {bad.numel()} of {got.numel()} elements differ, the first at {first}: "
            f"{is_:#x}, expected {should:#x} (sentinel bytes are {SENTINEL_BYTE:#x})"
        )
