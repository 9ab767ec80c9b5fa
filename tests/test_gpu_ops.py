"""Plain copies between memory objects and device buffers; on the CPU a buffer is host memory, and the rules are the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmcache_ref.connectors.gpu_ops import lmcache_memcpy_async_d2h, lmcache_memcpy_async_h2d
from lmcache_ref.errors import ArgumentError, StrideError, UseAfterFreeError
from lmcache_ref.memory import GPUMemoryAllocator, HostMemoryAllocator, MemoryFormat, PinMemoryAllocator

PIECE_BYTES = 8192
SHAPES = [(2, 3, 700, 2), (5, 7, 3)]  # more than a piece, and less
DTYPES = [torch.bfloat16, torch.uint8]


class PiecewiseAllocator(HostMemoryAllocator):
    """A pool that is page-locked in pieces, where there is CUDA."""

    piece_bytes = PIECE_BYTES

    def __init__(self, size: int):
        super().__init__(size)
        self.registered: list[int] = []
        for start in range(0, size, PIECE_BYTES) if torch.cuda.is_available() else ():
            address = self.require_pool().data_ptr() + start
            assert int(torch.cuda.cudart().cudaHostRegister(address, PIECE_BYTES, 0)) == 0
            self.registered.append(address)

    def close(self) -> None:
        for address in self.registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self.registered = []
        super().close()


class Copies(TorchDispatchMode):
    """Every copy that torch makes: (offset in the pool of whichever side is in it, bytes)."""

    def __init__(self, pool: torch.Tensor):
        super().__init__()
        self.pool, self.made = pool, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            offsets = [tensor.data_ptr() - self.pool.data_ptr() for tensor in args[:2]]
            (inside,) = [offset for offset in offsets if 0 <= offset < self.pool.nbytes]
            self.made.append((inside, args[0].nbytes))
        return function(*args, **(kwargs or {}))


def filled(obj, first: int) -> torch.Tensor:
    """Number the object's bytes, return a copy of them."""
    obj.raw_tensor.copy_((torch.arange(obj.get_size()) * 3 + first) % 253)
    return obj.raw_tensor.clone()


def surroundings(allocator, obj) -> torch.Tensor:
    """The pool's bytes before and after the object."""
    pool, start = allocator.require_pool(), obj.metadata.address
    return torch.cat([pool[:start], pool[start + obj.get_size() :]]).clone()


@pytest.fixture(params=[HostMemoryAllocator, PinMemoryAllocator, PiecewiseAllocator])
def allocator(request):
    allocator = request.param(16 * PIECE_BYTES)
    allocator.require_pool().fill_(0xEE)
    yield allocator
    allocator.close()


def allocated(allocator, shape=SHAPES[0], dtype=torch.bfloat16):
    """An object that begins in the middle of a piece."""
    assert allocator.allocate([100], torch.uint8) is not None
    return allocator.allocate(shape, dtype, MemoryFormat.KV_2LTD)


def buffer_of(shape, dtype, device="cpu") -> torch.Tensor:
    return torch.full((math.prod(shape) * dtype.itemsize,), 0x5A, dtype=torch.uint8).view(dtype).view(shape).to(device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_h2d(allocator, shape, dtype):
    obj, buffer = allocated(allocator, shape, dtype), buffer_of(shape, dtype)
    expected, pool = filled(obj, 1), allocator.require_pool().clone()
    lmcache_memcpy_async_h2d(obj, buffer)
    assert torch.equal(as_bytes(buffer), expected) and torch.equal(allocator.require_pool(), pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_d2h(allocator, shape, dtype):
    obj, buffer = allocated(allocator, shape, dtype), buffer_of(shape, dtype)
    around = surroundings(allocator, obj)
    lmcache_memcpy_async_d2h(buffer, obj)
    assert torch.equal(obj.raw_tensor, as_bytes(buffer)) and torch.equal(surroundings(allocator, obj), around)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_no_copy_spans_two_pieces(allocator, direction):
    obj, buffer = allocated(allocator), buffer_of(*reversed((torch.bfloat16, SHAPES[0])))
    with Copies(allocator.require_pool()) as copies:
        if direction == "h2d":
            lmcache_memcpy_async_h2d(obj, buffer)
        else:
            lmcache_memcpy_async_d2h(buffer, obj)
    end = start = obj.metadata.address
    for offset, size in copies.made:
        assert offset == end
        end = offset + size
        if allocator.piece_bytes:
            assert offset // PIECE_BYTES == (end - 1) // PIECE_BYTES
    assert end - start == obj.get_size() > 2 * PIECE_BYTES and start % PIECE_BYTES
    assert len(copies.made) == (3 if allocator.piece_bytes else 1)


def test_objects_of_several_tensors_are_copied_as_their_bytes(allocator):
    obj = allocator.allocate([[3, 5], [7]], [torch.bfloat16, torch.float32])
    buffer = torch.zeros(obj.get_size(), dtype=torch.uint8)
    expected = filled(obj, 9)
    lmcache_memcpy_async_h2d(obj, buffer)
    assert obj.get_size() == 60 and torch.equal(buffer, expected)


def test_an_object_in_device_memory():
    allocator = GPUMemoryAllocator(1 << 16, "cpu")
    obj = allocated(allocator)
    lmcache_memcpy_async_d2h(buffer_of(SHAPES[0], torch.bfloat16), obj)
    assert obj.raw_tensor.unique().tolist() == [0x5A] and obj.parent() is allocator


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o, b: (o, b.view(-1)[1:]), ArgumentError, "gpu_buffer has 16798 bytes, memory_obj 16800"),
        (lambda o, b: (o, torch.cat([b, b])), ArgumentError, "gpu_buffer has 33600 bytes"),
        (lambda o, b: (o, b.float()[..., :1].expand(2, 3, 700, 1)), StrideError, "must be contiguous"),
        (lambda o, b: (o, None), ArgumentError, "gpu_buffer must be a tensor, got NoneType"),
        (lambda o, b: (o.tensor, b), ArgumentError, "memory_obj must be a MemoryObj, got Tensor"),
    ],
)
def test_wrong_input(allocator, direction, change, error, message):
    obj, buffer = allocated(allocator), buffer_of(SHAPES[0], torch.bfloat16)
    before = filled(obj, 4), buffer.clone()
    wrong_obj, wrong_buffer = change(obj, buffer)
    with pytest.raises(error, match=message):
        if direction == "h2d":
            lmcache_memcpy_async_h2d(wrong_obj, wrong_buffer)
        else:
            lmcache_memcpy_async_d2h(wrong_buffer, wrong_obj)
    assert torch.equal(obj.raw_tensor, before[0]) and torch.equal(as_bytes(buffer), as_bytes(before[1]))


def test_a_freed_object(allocator):
    obj = allocated(allocator)
    obj.ref_count_down()
    with pytest.raises(UseAfterFreeError):
        lmcache_memcpy_async_h2d(obj, buffer_of(SHAPES[0], torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostMemoryAllocator, PinMemoryAllocator, PiecewiseAllocator])
def test_there_and_back_on_a_gpu(kind):
    allocator = kind(16 * PIECE_BYTES)
    obj, back = allocated(allocator), allocated(allocator)
    expected = filled(obj, 1)
    device = buffer_of(SHAPES[0], torch.bfloat16, "cuda:0")
    lmcache_memcpy_async_h2d(obj, device)
    lmcache_memcpy_async_d2h(device, back)
    torch.cuda.synchronize()
    assert torch.equal(as_bytes(device.cpu()), expected) and torch.equal(back.raw_tensor, expected)
    allocator.close()


@pytest.mark.gpu
def test_the_host_does_not_wait_on_a_gpu():
    allocator = PiecewiseAllocator(16 * PIECE_BYTES)
    obj = allocated(allocator)
    filled(obj, 1)
    device = buffer_of(SHAPES[0], torch.bfloat16, "cuda:0")
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy.record()
    lmcache_memcpy_async_h2d(obj, device)
    assert not busy.query()
    torch.cuda.synchronize()
    assert torch.equal(as_bytes(device.cpu()), obj.raw_tensor)
    allocator.close()


@pytest.mark.gpu
def test_one_copy_over_two_registrations_is_what_cuda_refuses_or_serialises():
    """Why pieces matter: the same copy with the pieces unknown is an error, or makes the host wait."""
    allocator = PiecewiseAllocator(16 * PIECE_BYTES)
    allocator.piece_bytes = None
    obj = allocated(allocator)
    device = buffer_of(SHAPES[0], torch.bfloat16, "cuda:0")
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    busy.record()
    try:
        lmcache_memcpy_async_h2d(obj, device)
        refused = busy.query()
    except RuntimeError as error:
        refused = "invalid argument" in str(error)
    torch.cuda.synchronize()
    assert refused
    allocator.close()
