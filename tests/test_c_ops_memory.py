"""The doors of `c_ops` that copy raw bytes, and those that take and give back host memory by address."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmcache_ref import c_ops
from lmcache_ref.c_ops import D2H, H2D, copies, host_memory
from lmcache_ref.errors import ArgumentError, BackendError, DoubleFreeError, ObjectError, StrideError

GUARD = 5
NAME = f"lmcache-test-{os.getpid()}"  # of shared memory


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


# Host memory

KINDS = {
    "pinned": (c_ops.alloc_pinned_ptr, c_ops.free_pinned_ptr),
    "pinned numa": (c_ops.alloc_pinned_numa_ptr, c_ops.free_pinned_numa_ptr),
    "numa": (c_ops.alloc_numa_ptr, c_ops.free_numa_ptr),
    "shm": (c_ops.alloc_shm_pinned_ptr, c_ops.free_shm_pinned_ptr),
}


def memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def address_range(line: str) -> range:
    """The addresses of one line of /proc/self/maps."""
    return range(*(int(end, 16) for end in line.split()[0].split("-")))


@pytest.fixture(autouse=True)
def books_are_closed():
    """No test leaves an allocation behind."""
    before = set(host_memory._allocations)
    yield
    assert set(host_memory._allocations) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 4096, 4097, 3 << 20])
def test_host_memory_is_page_aligned_zeroed_and_writable(kind, size):
    alloc, free = KINDS[kind]
    first, second = alloc(size), alloc(size)
    assert first % mmap.PAGESIZE == second % mmap.PAGESIZE == 0 and abs(first - second) >= size
    for address in (first, second):
        memory = memory_at(address, size)
        assert not any(memory[:: max(1, size // 5000)]) and memory[-1] == 0
        memory[0] = memory[-1] = 7
        del memory
    free(first)
    memory_at(second, size)[size // 2] = 9
    free(second)


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_is_given_back_once_and_as_what_it_was_taken(kind):
    alloc, free = KINDS[kind]
    address = alloc(100)
    for other, (_, wrong) in KINDS.items():
        if other != kind:
            with pytest.raises(ObjectError, match=f"{address:#x} was allocated as {kind} memory, not as {other}"):
                wrong(address)
    with pytest.raises(DoubleFreeError, match="held by nobody"):
        free(address + 8)
    memory_at(address, 100)[99] = 1  # still there
    free(address)
    with pytest.raises(DoubleFreeError, match="held by nobody: freed before, or never allocated here"):
        free(address)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pinned"])
def test_a_size_that_contradicts_is_an_error(kind):
    alloc, free = KINDS[kind]
    address = alloc(100)
    with pytest.raises(ObjectError, match=f"size: 101, but {address:#x} was allocated with 100 bytes"):
        free(address, 101)
    free(address, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, -1, 1.5, 1 << 62, 1 << 80])
def test_sizes_that_cannot_be_had(kind, size, monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", tmp_path)
    with pytest.raises(BackendError if size > 10 else ArgumentError, match=r"size: |size must be an int"):
        KINDS[kind][0](size)
    assert list(tmp_path.iterdir()) == []


def test_freed_memory_is_unmapped():
    def mapped(address: int) -> bool:
        with open("/proc/self/maps", encoding="ascii") as maps:
            return any(address in address_range(line) for line in maps)

    size = 64 << 20  # its own mapping, not to be taken again by something small
    for alloc, free in KINDS.values():
        address = alloc(size)
        assert mapped(address)
        free(address)
        assert not mapped(address)


@pytest.mark.parametrize("kind", KINDS)
def test_only_shared_memory_is_shared_with_forks(kind):
    alloc, free = KINDS[kind]
    address = alloc(8)
    with open("/proc/self/maps", encoding="ascii") as maps:
        (access,) = [line.split()[1] for line in maps if address in address_range(line)]
    free(address)
    assert access == ("rw-s" if kind == "shm" else "rw-p")


def test_threads_share_the_books():
    taken: list[int] = []

    def take():
        for _ in range(50):
            taken.append(c_ops.alloc_numa_ptr(5000))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 200
    for address in taken:
        c_ops.free_numa_ptr(address)


# NUMA


def test_a_node_that_is_not_there():
    with pytest.raises(ArgumentError, match=r"numa_id: 999; this machine has the nodes \[0"):
        c_ops.alloc_pinned_numa_ptr(100, 999)


@pytest.mark.parametrize(("text", "nodes"), [("0\n", {0}), ("0-1", {0, 1}), ("0,2-4,7\n", {0, 2, 3, 4, 7})])
def test_which_nodes_there_are(text, nodes, monkeypatch, tmp_path):
    (tmp_path / "online").write_text(text)
    monkeypatch.setattr(host_memory, "ONLINE_NODES", tmp_path / "online")
    assert host_memory._online_nodes() == nodes
    monkeypatch.setattr(host_memory, "ONLINE_NODES", tmp_path / "missing")
    assert host_memory._online_nodes() == {0}


def test_memory_is_bound_where_there_are_several_nodes(monkeypatch, tmp_path):
    """The system call itself: the kernel takes a binding to node 0 and refuses one to a node that is not there."""
    real = host_memory._online_nodes()
    (tmp_path / "online").write_text(f"0-{max(real) + 1}")
    monkeypatch.setattr(host_memory, "ONLINE_NODES", tmp_path / "online")
    address = c_ops.alloc_numa_ptr(8192, 0)
    memory_at(address, 8192)[0] = 1
    with open("/proc/self/numa_maps", encoding="ascii") as maps:
        (line,) = [line for line in maps if line.startswith(f"{address:x} ")]
    assert "bind:0" in line and "N0=1" in line
    c_ops.free_numa_ptr(address, 8192)
    with pytest.raises(BackendError, match=f"numa_id: {max(real) + 1}; memory cannot be bound: Invalid argument"):
        c_ops.alloc_numa_ptr(8192, max(real) + 1)


# Shared memory


def test_shared_memory_is_seen_by_other_processes_under_its_name():
    address = c_ops.alloc_shm_pinned_ptr(5000, f"/{NAME}")
    memory_at(address, 5000)[4999] = 77
    code = (
        "import sys\n"
        "from multiprocessing import resource_tracker, shared_memory as s\n"
        "resource_tracker.register = lambda *a: None\n"
        "m = s.SharedMemory(name=sys.argv[1]); print(m.size, m.buf[4999]); m.buf[0] = 5; m.close()"
    )
    seen = subprocess.run([sys.executable, "-c", code, NAME], check=True, capture_output=True, text=True).stdout
    assert seen.split() == ["5000", "77"] and memory_at(address, 5000)[0] == 5
    with pytest.raises(ObjectError, match=f"shm_name: 'another', but 0x.* is '{NAME}'"):
        c_ops.free_shm_pinned_ptr(address, 5000, "/another")
    c_ops.free_shm_pinned_ptr(address, 5000, f"/{NAME}")
    assert not (host_memory.SHARED_MEMORY / NAME).exists()


def test_a_stale_segment_is_replaced_and_a_held_name_refused():
    path = host_memory.SHARED_MEMORY / NAME
    path.write_bytes(b"left behind")
    address = c_ops.alloc_shm_pinned_ptr(100, NAME)
    assert not any(memory_at(address, 100)) and path.stat().st_size == 100
    with pytest.raises(ArgumentError, match=f"'{NAME}' is held by an allocation of this process"):
        c_ops.alloc_shm_pinned_ptr(100, NAME)
    c_ops.free_shm_pinned_ptr(address)
    assert not path.exists()


def test_a_name_that_somebody_took_over_is_left_to_them():
    path = host_memory.SHARED_MEMORY / NAME
    address = c_ops.alloc_shm_pinned_ptr(100, NAME)
    path.unlink()
    path.write_bytes(b"somebody else's")
    c_ops.free_shm_pinned_ptr(address)
    assert path.read_bytes() == b"somebody else's"
    path.unlink()


@pytest.mark.parametrize("name", ["a/b", "/a/b", "..", "/."])
def test_names_that_cannot_be(name):
    with pytest.raises(ArgumentError, match="is no name of shared memory"):
        c_ops.alloc_shm_pinned_ptr(100, name)


def test_a_system_without_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", tmp_path / "missing")
    with pytest.raises(BackendError, match="shm_name: 'x' cannot be created"):
        c_ops.alloc_shm_pinned_ptr(100, "x")


# CUDA


class FakeRuntime:
    """Registers host memory as CUDA does, in a list; or refuses."""

    def __init__(self, code: int = 0):
        self.code, self.registered = code, {}

    def cudaHostRegister(self, address, size, flags):
        if not self.code:
            self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        memory_at(address, 1)[0]  # still mapped
        del self.registered[address]
        return 0


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_memory_is_registered_while_it_is_held(kind, monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    alloc, free = KINDS[kind]
    address = alloc(5000)
    assert runtime.registered == ({} if kind == "numa" else {address: 5000})
    free(address)
    assert runtime.registered == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "numa"])
def test_memory_that_cuda_will_not_pin_is_given_back(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(712))
    with pytest.raises(BackendError, match="size: 5000 bytes of host memory cannot be pinned, CUDA error 712"):
        KINDS[kind][0](5000)
    assert list(tmp_path.iterdir()) == []


def test_no_gpu_has_no_pci_address(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert c_ops.get_gpu_pci_bus_id() is None and c_ops.get_gpu_pci_bus_id(3) is None


@pytest.mark.gpu
def test_pci_address_on_a_gpu():
    address = c_ops.get_gpu_pci_bus_id(0)
    assert address == address.upper() and torch.zeros(1, device="cuda:0").is_cuda
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    properties = torch.cuda.get_device_properties(0)
    numbers = [int(part, 16) for part in (domain, bus, device, function)]
    assert numbers == [properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id, 0]
    assert c_ops.get_gpu_pci_bus_id(torch.cuda.device_count()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_pinned_memory_on_a_gpu(kind):
    alloc, free = KINDS[kind]
    address = alloc(5000)
    memory = torch.frombuffer((ctypes.c_uint8 * 5000).from_address(address), dtype=torch.uint8)
    assert memory.is_pinned() == (kind != "numa")
    free(address)


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
