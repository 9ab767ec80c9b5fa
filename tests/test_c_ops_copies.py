"""The doors of `c_ops` that copy raw bytes: in pieces, in batches."""

from __future__ import annotations

import ctypes
import threading

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmcache_ref import c_ops
from lmcache_ref.c_ops import D2H, H2D, copies
from lmcache_ref.errors import ArgumentError, StrideError

GUARD = 5


class Copies(TorchDispatchMode):
    """Every copy that torch makes: (address of the target, address of the source, bytes)."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.made.append((args[0].data_ptr(), args[1].data_ptr(), args[0].nbytes))
        return function(*args, **(kwargs or {}))


def numbered(length: int, first: int = 1) -> torch.Tensor:
    return ((torch.arange(length) * 7 + first) % 251).to(torch.uint8)


# Copies


@hypothesis.given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 9))
def test_pieces_tile_the_range_and_cross_no_boundary(offset, length, exponent):
    alignment = 1 << exponent
    cut = list(copies.pieces(offset, length, alignment))
    assert [start for start, _ in cut] + [length] * bool(cut) == [0] * bool(cut) + [end for _, end in cut]
    assert bool(cut) == bool(length)
    for start, end in cut:
        assert start < end and (offset + start) // alignment == (offset + end - 1) // alignment


@pytest.mark.parametrize("as_tensors", [True, False])
@pytest.mark.parametrize("direction", [H2D, D2H])
@pytest.mark.parametrize("alignment", [1, 4, 32, 1 << 40])
@pytest.mark.parametrize("offset", [0, 3, 31, 32])
@pytest.mark.parametrize("nbytes", [0, 1, 61, 64])
def test_memcpy(nbytes, offset, alignment, direction, as_tensors):
    source, target = numbered(64), torch.full((64 + GUARD,), 0xEE, dtype=torch.uint8)
    expected = target.clone()
    expected[:nbytes] = source[:nbytes]
    ends = (target, source) if as_tensors else (target.data_ptr(), source.data_ptr())
    with Copies() as seen:
        c_ops.lmcache_memcpy_async(*ends, nbytes, direction, offset, alignment)
    assert torch.equal(target, expected)
    assert sum(size for _, _, size in seen.made) == nbytes
    for number, (to, of, size) in enumerate(seen.made):
        done = sum(size for _, _, size in seen.made[:number])
        assert (to, of) == (target.data_ptr() + done, source.data_ptr() + done)
        assert (offset + done) // alignment == (offset + done + size - 1) // alignment


def test_memcpy_of_tensors_of_any_dtype_and_shape():
    source, target = torch.randn(3, 4, dtype=torch.float64), torch.zeros(2, 24, dtype=torch.int16)
    c_ops.lmcache_memcpy_async(target, source, 96, D2H, 0, 64)
    assert torch.equal(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(host_buffer_alignments=0), ArgumentError, "host_buffer_alignments: 0; allowed: a power of two"),
        (dict(host_buffer_alignments=48), ArgumentError, "host_buffer_alignments: 48"),
        (dict(host_buffer_alignments=-4), ArgumentError, "host_buffer_alignments must be an int >= 0, got -4"),
        (dict(host_buffer_offset=-1), ArgumentError, "host_buffer_offset must be"),
        (dict(nbytes=-1), ArgumentError, "nbytes must be"),
        (dict(nbytes=17), ArgumentError, "nbytes: 17, but dest has 16 bytes"),
        (dict(direction="H2D"), ArgumentError, "direction: 'H2D'; allowed: H2D, D2H"),
        (dict(src=12345), ArgumentError, "dest and src are Tensor and int"),
        (dict(dest=0, src=12345), ArgumentError, "dest: 0 is no address"),
        (dict(dest="x", src=12345), ArgumentError, "dest: 'x' is no address"),
        (dict(src=torch.zeros(32, dtype=torch.uint8)[::2]), StrideError, r"src: shape \(16,\), strides \(2,\)"),
    ],
)
def test_memcpy_wrong_input(change, error, message):
    target = torch.zeros(16, dtype=torch.uint8)
    arguments = dict(dest=target, src=numbered(16), nbytes=16, direction=H2D, host_buffer_offset=0)
    with pytest.raises(error, match=message) as raised:
        c_ops.lmcache_memcpy_async(**{**arguments, "host_buffer_alignments": 64, **change})
    assert isinstance(raised.value, ValueError) and not target.any()


def test_batched_memcpy():
    sources = [numbered(size, size) for size in (1, 0, 4097, 30)]
    targets = [torch.full((len(source) + GUARD,), 0xEE, dtype=torch.uint8) for source in sources]
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (sources, targets)]
    c_ops.batched_memcpy(*addresses, [len(source) for source in sources])
    for source, target in zip(sources, targets, strict=True):
        assert target.tolist() == source.tolist() + [0xEE] * GUARD


@pytest.mark.parametrize("sizes", [[4], [4, 4, 4], [4, -4]])
def test_batched_memcpy_copies_nothing_on_wrong_input(sizes):
    source, target = numbered(8), torch.zeros(8, dtype=torch.uint8)
    pointers = [[tensor.data_ptr(), tensor.data_ptr() + 4] for tensor in (source, target)]
    with pytest.raises(ArgumentError, match=r"lengths differ|sizes\[1\] must be"):
        c_ops.batched_memcpy(*pointers, sizes)
    with pytest.raises(ArgumentError, match=r"dst_ptrs\[1\]: 0 is no address"):
        c_ops.batched_memcpy(pointers[0], [pointers[1][0], 0], [4, 4])
    assert not target.any()


@pytest.mark.gpu
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("alignment", [4096, 1 << 40])
def test_memcpy_by_address_on_a_gpu(alignment, in_thread):
    size = 3 * 4096 + 100
    address = c_ops.alloc_pinned_ptr(size)
    host = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    host.copy_(numbered(size))
    device = torch.full((size + GUARD,), 0xEE, dtype=torch.uint8, device="cuda:0")

    def there_and_back():
        c_ops.lmcache_memcpy_async(device.data_ptr(), address, size, H2D, 100, alignment)
        torch.cuda.synchronize()
        host.zero_()
        c_ops.lmcache_memcpy_async(address, device.data_ptr(), size, D2H, 100, alignment)
        torch.cuda.synchronize()

    thread = threading.Thread(target=there_and_back)
    thread.run() if not in_thread else (thread.start(), thread.join())
    assert torch.equal(device.cpu()[:size], numbered(size)) and device[size:].tolist() == [0xEE] * GUARD
    assert torch.equal(host, numbered(size))
    other = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
    c_ops.batched_memcpy([address, device.data_ptr()], [other.data_ptr(), other.data_ptr() + 100], [100, 50])
    torch.cuda.synchronize()
    assert other[:100].tolist() == numbered(100).tolist() and other[100:150].tolist() == numbered(50).tolist()
    assert not other[150:].any()
    c_ops.free_pinned_ptr(address)
