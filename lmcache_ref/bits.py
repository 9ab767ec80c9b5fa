"""Bytes, not numbers: which dtypes are the same bytes, and how to see a tensor as machine words.

The move never converts a value, so the specification moves integers of the widest word that fits; NaN payloads,
-0.0 and every fp8 code survive, and no dtype needs an indexing kernel of its own.
"""

from __future__ import annotations

import math

import torch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is a floating type of one byte."""
    return dtype.is_floating_point and dtype.itemsize == 1


def same_bytes(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether a value of `one` may be moved into `other`: equal dtypes, or an fp8 and its uint8 storage."""
    if one == other:
        return True
    return any(a == torch.uint8 and is_fp8(b) for a, b in ((one, other), (other, one)))


def word_views(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory as integers of the widest word all of them allow; the last axis shrinks accordingly.

    tensors: last axes of equal length in bytes and of stride 1. The word divides that length, every stride and every
    storage offset. Views: writing to one writes to its tensor.
    """
    width = 8
    for tensor in tensors:
        bytes_each = tensor.element_size()
        terms = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        width = math.gcd(width, *(term * bytes_each for term in terms))
    return [tensor.view(_WORDS[width]) for tensor in tensors]
