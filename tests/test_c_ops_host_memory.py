"""The functions of `c_ops` that take and give back host memory by address: what it is, and the books kept of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading

import pytest
import torch

from lmcache_ref import c_ops
from lmcache_ref.c_ops import host_memory
from lmcache_ref.errors import ArgumentError, BackendError, DoubleFreeError, ObjectError

NAME = f"lmcache-test-{os.getpid()}"  # of shared memory

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
