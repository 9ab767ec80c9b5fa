"""A chunk in a file: the safetensors format, written and read straight from the chunk's memory, without copies.

A header of JSON, then for each object the bytes of its tensors and its cached positions. The header is a function of
key, layout and checksum, so a reader builds it anew and compares; the checksum covers layout and bytes. No changed byte
goes unseen.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from ..memory import MemoryFormat
from .chunk import Chunk, ChunkLayout
from .tokens import CacheKey

FORMAT = "lmcache_ref chunk 1"
LONGEST_HEADER_BYTES = 16 << 20
TEMPORARY = ".tmp"

#: dtype names of the safetensors format; others are written as bytes, their own name being in the metadata anyway
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class DamagedFileError(Exception):
    """The file is not what was written under this name; the message says what is wrong with it."""


def file_bytes(key: CacheKey, chunk: Chunk) -> int:
    """How long the file of a chunk is."""
    layout, positions = chunk.layout, _positions_of(chunk)
    return len(_head(key, layout, positions, "0" * 64)) + _data_bytes(layout, positions)


def write_chunk(path: Path, key: CacheKey, chunk: Chunk) -> None:
    """Write a chunk to `path`, which appears whole or not at all: a temporary file, fsync, rename.

    OSError as the file system raises it; the temporary file is gone then. It is locked as long as it is written,
    which tells it from one that a killed process left.
    """
    positions = _positions_of(chunk)
    head = _head(key, chunk.layout, positions, _checksum(chunk))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            _try_lock(file)
            file.write(head)
            for view in _views(chunk):
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_chunk(path: Path, key: CacheKey, allocate: Callable[[ChunkLayout], Chunk | None]) -> Chunk | None:
    """The chunk in a file, in memory from `allocate`, its bytes verified there; None when there is no memory.

    Raises DamagedFileError, or OSError as the file system does; nothing is left allocated then.
    """
    with open(path, "rb") as file:
        file_size_bytes = os.fstat(file.fileno()).st_size
        layout, positions, checksum, head_bytes = _read_head(file, key, file_size_bytes)
        if file_size_bytes != head_bytes + _data_bytes(layout, positions):
            raise DamagedFileError(f"has {file_size_bytes} bytes, its header speaks of another length")
        chunk = allocate(layout)
        if chunk is None:
            return None
        try:
            if positions is not None:
                for obj in chunk.objects:
                    obj.metadata.cached_positions = torch.empty(positions, dtype=torch.int64)
            for view in _views(chunk):
                if file.readinto(view) != len(view):
                    raise DamagedFileError("ends too early")
            if _checksum(chunk) != checksum:
                raise DamagedFileError("its bytes do not have the checksum of its header")
        except BaseException:
            chunk.release()
            raise
        return chunk


def remove_if_abandoned(path: Path) -> None:
    """Delete a temporary file unless somebody is writing it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


# -------------------------------------------------------------------------------------------------------- the header


def _head(key: CacheKey, layout: ChunkLayout, positions: int | None, checksum: str) -> bytes:
    """Length and header, padded to 8 bytes. positions: how many each object has; None: objects have none."""
    entries, at = {}, 0
    for name, dtype, shape in _tensors(layout, positions):
        end = at + math.prod(shape) * dtype.itemsize
        known = _NAMES.get(_name(dtype))
        stated = list(shape) if known else [end - at]
        entries[name] = {"dtype": known or "U8", "shape": stated, "data_offsets": [at, end]}
        at = end
    metadata = {"format": FORMAT, "key": str(key), "chunk": _description(layout, positions), "checksum": checksum}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _description(layout: ChunkLayout, positions: int | None) -> str:
    """What a reader needs to know of a chunk before it can allocate it."""
    told = {
        "count": layout.num_objects,
        "shapes": [list(shape) for shape in layout.shapes],
        "dtypes": [_name(dtype) for dtype in layout.dtypes],
        "fmt": layout.fmt.name,
        "positions": positions,
    }
    return json.dumps(told)


def _tensors(layout: ChunkLayout, positions: int | None) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
    """Name, dtype and shape of everything in the file, in its order."""
    for i in range(layout.num_objects):
        for j, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
            yield f"{i}.{j}", dtype, shape
        if positions is not None:
            yield f"{i}.cached_positions", torch.int64, torch.Size([positions])


def _read_head(file: IO[bytes], key: CacheKey, file_size_bytes: int) -> tuple[ChunkLayout, int | None, str, int]:
    """(layout, positions of an object, checksum, bytes of the head). DamagedFileError when it is not ours."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(file_size_bytes - 8, LONGEST_HEADER_BYTES):
        raise DamagedFileError("is no safetensors file")
    text = file.read(length)
    try:
        metadata = json.loads(text)["__metadata__"]
        layout, positions = _told(metadata["chunk"], most_objects=length)
        rebuilt = _head(key, layout, positions, metadata["checksum"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise DamagedFileError(f"its header cannot be read ({type(error).__name__}: {error})") from None
    if rebuilt[8:] != text:
        raise DamagedFileError(f"is no chunk {key}, or its header was changed")
    return layout, positions, metadata["checksum"], len(rebuilt)


def _told(description: str, most_objects: int) -> tuple[ChunkLayout, int | None]:
    """The inverse of `_description`. ValueError, KeyError, TypeError or AttributeError for anything else."""
    told = json.loads(description)
    count, shapes, positions = told["count"], [tuple(shape) for shape in told["shapes"]], told["positions"]
    sizes = [n for shape in shapes for n in shape] + ([] if positions is None else [positions])
    if {type(n) for n in [count, *sizes]} != {int} or not 0 < count <= most_objects or min(sizes, default=0) < 0:
        raise ValueError(f"sizes {count}, {shapes}, {positions}")
    dtypes = tuple(getattr(torch, name) for name in told["dtypes"])
    if len(dtypes) != len(shapes) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f"dtypes {told['dtypes']}")
    return ChunkLayout(count, tuple(map(torch.Size, shapes)), dtypes, MemoryFormat[told["fmt"]]), positions


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------- the bytes


def _positions_of(chunk: Chunk) -> int | None:
    """How many cached positions each object has; None when not all have the same number."""
    found = {None if (p := obj.metadata.cached_positions) is None else len(p) for obj in chunk.objects}
    return found.pop() if len(found) == 1 else None


def _data_bytes(layout: ChunkLayout, positions: int | None) -> int:
    return layout.tensor_bytes + layout.num_objects * 8 * (positions or 0)


def _views(chunk: Chunk) -> Iterator[memoryview]:
    """The memory of every tensor in the order of the file; writing to a view writes to the chunk."""
    with_positions = _positions_of(chunk) is not None
    for obj in chunk.objects:
        for index in range(len(obj.metadata.shapes)):
            yield _bytes_of(obj.get_tensor(index))
        if with_positions:
            yield _bytes_of(obj.metadata.cached_positions)


def _bytes_of(tensor: torch.Tensor | None) -> memoryview:
    """A contiguous host tensor's own bytes; whoever uses them keeps the tensor."""
    assert tensor is not None and tensor.is_contiguous() and tensor.device.type == "cpu"
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(bytearray())  # an empty array cannot be cast to bytes
    return memoryview((ctypes.c_ubyte * length).from_address(tensor.data_ptr())).cast("B")


def _checksum(chunk: Chunk) -> str:
    digest = hashlib.blake2b(_description(chunk.layout, _positions_of(chunk)).encode(), digest_size=32)
    for view in _views(chunk):
        digest.update(view)
    return digest.hexdigest()


def _try_lock(file: IO[bytes]) -> None:
    """Lock a file that is being written; some network file systems cannot, and then nobody removes it either."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
