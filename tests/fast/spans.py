"""Stretches of memory by their addresses, as the simulated device notes them. No test lives here."""

from __future__ import annotations

import torch

Spans = list[tuple[int, int]]  # [begin, end) addresses


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def merged(spans: Spans) -> Spans:
    """The same bytes in order, neighbours joined."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def overlap(a: Spans, b: Spans) -> bool:
    """Whether two lists of spans share a byte."""
    if len(a) > len(b):
        a, b = b, a
    a, b = merged(a), merged(b)
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] <= b[j][0]:
            i += 1
        elif b[j][1] <= a[i][0]:
            j += 1
        else:
            return True
    return False
