"""The checks that connectors make on what a caller hands them, before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, ChunkError
from ..memory import MemoryFormat, MemoryObj


def check_spans(starts: Any, ends: Any, num_tokens: int, first_token: int = 0) -> None:
    """Every `[starts[i], ends[i])` is a range inside the slot mapping, which covers `num_tokens` tokens from
    `first_token` on; else ChunkError naming the chunk."""
    for name, value in (("starts", starts), ("ends", ends)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ArgumentError(f"{name} must be a list, got {type(value).__name__}")
    if len(starts) != len(ends):
        raise ChunkError(f"{len(starts)} starts, {len(ends)} ends: lengths differ")
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not isinstance(start, int) or not isinstance(end, int) or end < start or start < 0:
            raise ChunkError(f"chunk {index}: [{start}, {end}) is no token range")
        if start < first_token or end > first_token + num_tokens:
            covered = f"[{first_token}, {first_token + num_tokens})"
            raise ChunkError(f"chunk {index}: [{start}, {end}) is outside slot_mapping, which covers tokens {covered}")


def check_ascending(starts: Sequence[int], ends: Sequence[int]) -> None:
    """Chunks follow one another without overlap; else ChunkError naming the pair."""
    for index in range(1, len(starts)):
        if starts[index] < ends[index - 1]:
            raise ChunkError(
                f"chunks {index - 1} and {index}: [{starts[index - 1]}, {ends[index - 1]}) and "
                f"[{starts[index]}, {ends[index]}) must ascend without overlap"
            )


def check_objects(
    objects: Any, starts: Sequence[int], ends: Sequence[int], fmt: MemoryFormat, shape_of: Any, *, loading: bool
) -> list[torch.Tensor]:
    """The tensors of the objects: one object for each chunk, with a tensor of `shape_of(tokens)`; when loading also in
    format `fmt`.

    Raises ArgumentError or ChunkError naming the object.
    """
    if not isinstance(objects, Sequence):
        raise ArgumentError(f"memory_objs must be a list, got {type(objects).__name__}")
    if len(objects) != len(starts):
        raise ChunkError(f"{len(objects)} memory objects, {len(starts)} starts: lengths differ")
    tensors: list[torch.Tensor] = []
    shapes: dict[int, Any] = {}
    for index, (obj, start, end) in enumerate(zip(objects, starts, ends, strict=True)):
        name = f"memory_objs[{index}]"
        tensor = check_object(obj, name, fmt, loading=loading)
        shape = shapes.get(end - start)
        if shape is None:
            shape = shapes[end - start] = shape_of(end - start)
        if tensor.shape != shape:
            raise ChunkError(
                f"{name} has shape {tuple(tensor.shape)}; {end - start} tokens of {fmt.name} are {tuple(shape)}"
            )
        tensors.append(tensor)
    return tensors


def check_object(obj: Any, name: str, fmt: MemoryFormat, *, loading: bool) -> torch.Tensor:
    """The object's tensor; ChunkError naming the object when it has none or, when loading, another format."""
    tensor = obj.tensor if isinstance(obj, MemoryObj) else None
    if tensor is None:
        raise ChunkError(f"{name} has no tensor ({type(obj).__name__})")
    if loading and obj.metadata.fmt != fmt:
        raise ChunkError(f"{name} is {obj.metadata.fmt.name}, this connector loads {fmt.name}")
    return tensor


def positive_int(name: str, value: Any) -> int:
    """`value`, or ArgumentError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} must be a positive int, got {value!r}")
    return value


def required_bool(kwargs: Mapping[str, Any], name: str) -> bool:
    """`kwargs[name]`, or ArgumentError when it is missing or no bool."""
    value = kwargs.get(name)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is missing" if value is None else f"{name} must be True or False, got {value!r}")
    return value
