"""Chunks in files: what they hold, that no changed byte is served, limits, restarts, a disk that is full, the writer.

The engine above is used only where a restart is to be seen.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import threading

import pytest
import torch
from engine_worlds import KINDS, World
from safetensors import safe_open

from helpers import addressed
from lmcache_ref.engine.chunk import Chunk, ChunkLayout
from lmcache_ref.engine.chunk_file import DamagedFileError, file_bytes, read_chunk, write_chunk
from lmcache_ref.engine.disk import DiskTier
from lmcache_ref.engine.tiers import HostTier, Tier
from lmcache_ref.engine.tokens import CacheKey
from lmcache_ref.engine.writer import BackgroundWriter
from lmcache_ref.errors import ArgumentError
from lmcache_ref.memory import MemoryFormat

SCOPE = "model@1@0@bfloat16"
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
DTYPES += [torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
#: one object, two tensors of different widths; and three objects with positions, as blending has
GROUPS = ChunkLayout(
    1, (torch.Size([1, 1, 3, 5]), torch.Size([2, 2, 3, 4])), (torch.uint8, torch.bfloat16), MemoryFormat.KV_2LTD
)
BLENDED = ChunkLayout(3, (torch.Size([2, 3, 4]),), (torch.bfloat16,), MemoryFormat.KV_2TD)


def key(number: int = 0) -> CacheKey:
    return CacheKey("model", 1, 0, "bfloat16", f"{number:064x}")


def filled(host: HostTier, layout: ChunkLayout, first: int = 0, positions: torch.Tensor | None = None) -> Chunk:
    """A chunk whose bytes are their own address, and are not those of another `first`."""
    chunk = host.allocate(layout)
    assert chunk is not None
    for index, obj in enumerate(chunk.objects):
        length = obj.raw_tensor.numel()
        obj.raw_tensor.copy_(addressed(length, torch.uint8, 1000 * first + 97 * index))
        obj.metadata.cached_positions = positions
    return chunk


def contents(chunk: Chunk) -> list:
    """Everything that has to survive."""
    return [chunk.layout] + [
        (
            [
                obj.get_tensor(i).contiguous().view(-1).view(torch.uint8).tolist()
                for i in range(len(obj.metadata.shapes))
            ],
            None if obj.metadata.cached_positions is None else obj.metadata.cached_positions.tolist(),
        )
        for obj in chunk.objects
    ]


@pytest.fixture
def host():
    tier = HostTier(1 << 20)
    yield tier
    assert tier.allocator.memcheck()
    tier.close()


@pytest.fixture
def disk(host, tmp_path):
    return DiskTier(str(tmp_path), SCOPE, 1 << 20, host.allocate)


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (0,), (1,), (5, 0, 2)], ids=str)
@pytest.mark.parametrize("positions", [None, 0, 3])
def test_every_dtype_and_shape_comes_back(host, tmp_path, dtype, shape, positions):
    for num_objects, fmt in ((1, MemoryFormat.KV_2LTD), (2, MemoryFormat.KV_MLA_FMT)):
        layout = ChunkLayout(num_objects, (torch.Size(shape),), (dtype,), fmt)
        chunk = filled(host, layout, positions=None if positions is None else torch.arange(7, 7 + positions))
        path = tmp_path / "file"
        write_chunk(path, key(), chunk)
        assert path.stat().st_size == file_bytes(key(), chunk)
        back = read_chunk(path, key(), host.allocate)
        assert contents(back) == contents(chunk)
        back.release()
        chunk.release()
    assert os.listdir(tmp_path) == ["file"]
    assert host.allocator.used_bytes == 0


def test_all_cases_are_there():
    assert len(DTYPES) == 18


def test_the_file_is_a_safetensors_file(host, tmp_path):
    layout = ChunkLayout(2, GROUPS.shapes, (torch.float8_e5m2, torch.bfloat16), MemoryFormat.KV_2TD)
    chunk = filled(host, layout, positions=torch.arange(4, 7))
    write_chunk(tmp_path / "file", key(), chunk)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata()["key"] == str(key())
        assert len(file.keys()) == 6
        for i, j in itertools.product(range(2), range(2)):
            tensor, expected = file.get_tensor(f"{i}.{j}"), chunk.objects[i].get_tensor(j)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
        assert file.get_tensor("1.cached_positions").tolist() == [4, 5, 6]
    chunk.release()


@pytest.mark.parametrize(
    ("layout", "positions"), [(GROUPS, None), (BLENDED, torch.arange(3))], ids=["groups", "blended"]
)
def test_no_changed_byte_is_served(host, tmp_path, layout, positions):
    """Every byte of the file, changed in two ways; every length but the right one."""
    chunk = filled(host, layout, positions=positions)
    path = tmp_path / "file"
    write_chunk(path, key(), chunk)
    good, used = path.read_bytes(), host.allocator.used_bytes
    assert len(good) < 1500

    def refused(what: str) -> None:
        with pytest.raises(DamagedFileError):
            pytest.fail(f"{what} of {len(good)}: served {read_chunk(path, key(), host.allocate)}")
        assert host.allocator.used_bytes == used, what

    with open(path, "r+b", buffering=0) as file:
        for at, bit in itertools.product(range(len(good)), (1, 128)):
            os.pwrite(file.fileno(), bytes([good[at] ^ bit]), at)
            refused(f"byte {at}")
            os.pwrite(file.fileno(), good[at : at + 1], at)
        read_chunk(path, key(), host.allocate).release()
        for length in (len(good) + 4096, len(good) + 1, *reversed(range(len(good)))):
            os.ftruncate(file.fileno(), length)
            refused(f"{length} bytes")
    chunk.release()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"__metadata__": 3}',
        b'{"__metadata__": {"chunk": 3}}',
        b'{"__metadata__": {"chunk": "{}"}}',
        b"[" * 100000,
        b"\xff\xfe",
    ],
    ids=lambda text: text[:30].decode("latin1"),
)
def test_what_is_no_chunk_is_refused(host, tmp_path, text):
    for length in (len(text), len(text) + 1, 1 << 62):
        (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + text)
        with pytest.raises(DamagedFileError):
            read_chunk(tmp_path / "file", key(), host.allocate)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"count": 3', '"count": 0'),
        ('"count": 3', '"count": -3'),
        ('"count": 3', '"count": 3000000000'),
        ('"count": 3', '"count": true'),
        ("[[2, 3, 4]]", "[[2, -3, 4]]"),
        ("[[2, 3, 4]]", "[[2, 3, 4], [1]]"),
        ("[[2, 3, 4]]", "[[2, 3, 4.5]]"),
        ('"bfloat16"', '"float16"'),
        ('"bfloat16"', '"nn"'),
        ('"bfloat16"', "3"),
        ("KV_2TD", "KV_T2D"),
        ("KV_2TD", "KV"),
        ('"positions": 3', '"positions": -1'),
        ('"positions": 3', '"positions": null'),
    ],
)
def test_a_description_that_was_edited_is_refused(host, tmp_path, old, new):
    """Written consistently, header and all, as somebody else's program might."""
    chunk = filled(host, BLENDED, positions=torch.arange(3))
    path = tmp_path / "file"
    write_chunk(path, key(), chunk)
    good = path.read_bytes()
    head = 8 + int.from_bytes(good[:8], "little")
    text = good[8:head].decode()
    escaped_old, escaped_new = (part.replace('"', '\\"') for part in (old, new))
    assert text.count(escaped_old) == 1
    text = text.replace(escaped_old, escaped_new)
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + good[head:])
    with pytest.raises(DamagedFileError):
        read_chunk(path, key(), host.allocate)
    chunk.release()


# ------------------------------------------------------------------------------------------------------------ the tier


def test_tiers_have_one_interface(host, disk):
    for tier in (host, disk):
        assert isinstance(tier, Tier)
        chunk = filled(host, BLENDED, 5, torch.arange(3))
        assert not tier.contains(key(5)) and tier.get(key(5)) is None
        assert tier.put(key(5), chunk) and tier.contains(key(5)) and not tier.contains(key(6))
        back = tier.get(key(5))
        assert contents(back) == contents(chunk)
        back.release()
        tier.remove(key(5))
        tier.remove(key(5))
        assert not tier.contains(key(5)) and tier.get(key(5)) is None
        chunk.release()
        assert host.allocator.used_bytes == 0


def restarted(disk: DiskTier, limit_bytes: int | None = None) -> DiskTier:
    folder, scope = disk.folder.parent, disk.folder.name
    return DiskTier(str(folder), scope, limit_bytes or disk.limit_bytes, disk._allocate)


def put(disk: DiskTier, host: HostTier, number: int) -> bool:
    chunk = filled(host, BLENDED, number)
    try:
        return disk.put(key(number), chunk)
    finally:
        chunk.release()


def on_disk(disk: DiskTier) -> list[int]:
    return sorted(int(name.split(".")[0], 16) for name in os.listdir(disk.folder) if name.endswith(".safetensors"))


def test_the_byte_limit_holds_at_every_moment(host, tmp_path, monkeypatch):
    one = filled(host, BLENDED)
    size_bytes = file_bytes(key(), one)
    one.release()
    disk = DiskTier(str(tmp_path), SCOPE, 3 * size_bytes + size_bytes // 2, host.allocate)
    replace, most = os.replace, []

    def seen(source, target):
        most.append(sum(entry.stat().st_size for entry in os.scandir(disk.folder)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    for number in range(3):
        assert put(disk, host, number)
    disk.get(key(0)).release()
    disk.touch([key(0)])
    for number in (3, 4):
        assert put(disk, host, number)
    assert on_disk(disk) == [0, 3, 4], "the least recently used were given up"
    assert disk.evictions == 2 and disk.used_bytes == 3 * size_bytes == most[-1] and max(most) <= disk.limit_bytes
    assert not put(disk, host, 4) and on_disk(disk) == [0, 3, 4], "what is there is not written again"

    for number in (0, 3):
        disk.get(key(number)).release()
    disk.touch([key(0), key(3)])
    again = restarted(disk, limit_bytes=2 * size_bytes)
    assert on_disk(again) == [0, 3], "the order of use survives, a lower limit counts at once"
    again = restarted(disk, limit_bytes=size_bytes)
    assert on_disk(again) == [0], "of one request, the end is given up first"
    tiny = restarted(disk, limit_bytes=size_bytes - 1)
    assert not put(tiny, host, 9) and tiny.skipped == {"disk_limit": 1} and on_disk(tiny) == []


def test_a_restart_finds_what_was_written_and_nothing_else(host, disk, caplog):
    for number in range(3):
        put(disk, host, number)
    strange = ["model.safetensors", f"{171:064X}.safetensors", f"{1:063x}.safetensors", "notes.txt"]
    for name in strange:
        (disk.folder / name).write_text("somebody else's")
    (disk.folder / f"{7:064x}.safetensors").mkdir()
    with caplog.at_level(logging.WARNING):
        again = restarted(disk)
    assert len(again) == 3 and again.used_bytes == disk.used_bytes
    assert "not of this cache, left alone" in caplog.text and "model.safetensors" in caplog.text
    for name in strange[:3]:
        assert (disk.folder / name).read_text() == "somebody else's"
    for number in range(3):
        expected, back = filled(host, BLENDED, number), again.get(key(number))
        assert contents(back) == contents(expected)
        back.release()
        expected.release()


def test_what_a_killed_writer_left_is_removed_what_a_living_one_writes_is_not(host, disk):
    dead, alive = (disk.folder / f"{n:064x}.safetensors.{'ab' * 8}.tmp" for n in (1, 2))
    dead.write_text("half of it")
    with open(alive, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        restarted(disk)
        assert not dead.exists() and alive.exists()
    restarted(disk)
    assert not alive.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "renamed", "gone", "folder"])
def test_a_damaged_file_is_dropped_with_a_warning(host, disk, caplog, damage):
    for number in range(2):
        put(disk, host, number)
    path = disk.folder / f"{0:064x}.safetensors"
    good = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage in ("cut", "empty"):
        path.write_bytes(good[: len(good) // 2] if damage == "cut" else b"")
    elif damage == "renamed":
        (disk.folder / f"{1:064x}.safetensors").rename(path)
        (disk.folder / f"{1:064x}.safetensors").write_bytes(good)
    elif damage == "folder":
        path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert disk.contains(key(0)) and disk.get(key(0)) is None
    assert f"{path} is dropped: " in caplog.text
    assert disk.drops == 1 and not disk.contains(key(0)) and disk.get(key(0)) is None
    assert damage == "folder" or not path.exists()
    assert host.allocator.used_bytes == 0
    if damage != "folder":
        assert put(disk, host, 0)
        disk.get(key(0)).release()


def test_no_host_memory_is_no_damage(tmp_path):
    host = HostTier(3 * 4096)
    disk = DiskTier(str(tmp_path), SCOPE, 1 << 20, host.allocate)
    put(disk, host, 0)
    blocker = host.allocate(BLENDED)
    assert disk.get(key(0)) is None and disk.contains(key(0)) and disk.drops == 0
    blocker.release()
    disk.get(key(0)).release()
    host.close()


def test_a_file_given_up_while_it_is_asked_for_is_no_damage(host, disk, monkeypatch, caplog):
    """The writer makes room between the question and the answer."""
    put(disk, host, 0)

    def too_late(path, *args):
        disk.remove(key(0))
        return read_chunk(path, *args)

    monkeypatch.setattr("lmcache_ref.engine.disk.read_chunk", too_late)
    assert disk.get(key(0)) is None and disk.drops == 0 and not caplog.records


def test_a_chunk_is_evicted_only_when_none_of_its_objects_is_held():
    host = HostTier(3 * 4096)
    chunk = filled(host, BLENDED)
    host.put(key(0), chunk)
    chunk.release()
    for obj in chunk.objects:
        obj.ref_count_up()
        assert host.allocate(BLENDED) is None and host.contains(key(0))
        obj.ref_count_down()
    host.allocate(BLENDED).release()
    assert not host.contains(key(0)) and host.evictions == 1
    host.close()


@pytest.mark.parametrize("folder", ["file/below", "file"])
def test_a_folder_that_cannot_be_is_refused(host, tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"local_disk: .* cannot be used: "):
        DiskTier(str(tmp_path / folder), SCOPE, 1 << 20, host.allocate)


class Full:
    """A file system without room: writing stops after so many bytes, or fsync or rename fail."""

    def __init__(self, monkeypatch, where: str, number: int):
        def fails(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        if where == "write":
            real = open

            def opened(path, mode="r", *args, **kwargs):
                file = real(path, mode, *args, **kwargs)
                return _Short(file, number) if mode == "wb" else file

            monkeypatch.setattr("builtins.open", opened)
        else:
            monkeypatch.setattr(os, where, fails)


class _Short:
    def __init__(self, file, number: int):
        self.file, self.number, self.room = file, number, 700

    def write(self, view):
        self.room -= len(view)
        if self.room < 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.file.write(view)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_counted_and_leaves_nothing(host, disk, monkeypatch, caplog, where, number):
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        Full(patch, where, number)
        assert not put(disk, host, 0) and not put(disk, host, 1)
    assert disk.skipped == {"disk_full" if number == errno.ENOSPC else "disk_error": 2}
    assert len(caplog.records) == 1, "said once"
    assert os.listdir(disk.folder) == [] and len(disk) == 0 == disk.used_bytes
    assert put(disk, host, 0) and on_disk(disk) == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_goes_on_with_a_full_disk(kind, tmp_path, monkeypatch):
    w = World(kind, folder=tmp_path)
    tokens = list(range(12))
    with monkeypatch.context() as patch:
        Full(patch, "fsync", errno.ENOSPC)
        assert w.store(tokens) == 12
        w.engine.flush()
        assert w.engine.stats().skipped == {"disk_full": 3}
        assert w.retrieve(tokens) == 12
    w.check_books()
    w.store([1] * 4)
    w.restart()
    assert (w.engine.lookup(tokens), w.engine.lookup([1] * 4)) == (0, 4)
    w.engine.close()


@pytest.mark.parametrize("kind", ["V2", "V3-groups", "buffer"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_engine_promises_only_what_is_before_a_damaged_chunk(kind, bad, tmp_path):
    w = World(kind, folder=tmp_path)
    tokens = list(range(12))
    w.store(tokens)
    w.restart()
    path = w.engine.storage.disk._path(w.engine.names.spans(tokens)[bad].key.chunk_hash)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert w.retrieve(tokens) == 4 * bad
    path.write_bytes(good)
    assert w.engine.lookup(tokens) == 4 * bad and w.engine.stats().disk_drops == 1
    assert w.store(tokens) == 4 and w.retrieve(tokens) == 12
    w.check_books()
    w.engine.close()


# ---------------------------------------------------------------------------------------------------------- the writer


class Slow(Tier):
    """A tier that waits to be told."""

    def __init__(self):
        self.go, self.began, self.keys = threading.Event(), threading.Event(), []

    def put(self, key, chunk):
        self.began.set()
        assert self.go.wait(30)
        if key.chunk_hash.endswith("f"):
            raise ValueError("a bug")
        self.keys.append(int(key.chunk_hash, 16))
        return True

    def contains(self, key):
        return False

    def get(self, key):
        return None

    def remove(self, key):
        pass

    def touch(self, keys):
        pass

    def close(self):
        pass


def test_the_writer_holds_a_bounded_number_of_chunks(host):
    slow, done = Slow(), []
    chunks = [filled(host, BLENDED, n) for n in range(4)]
    writer = BackgroundWriter(slow, 2 * chunks[0].size_bytes, done.append)
    assert [writer.submit(key(n), chunk) for n, chunk in enumerate(chunks)] == [True, True, False, False]
    assert [chunk.objects[0].get_ref_count() for chunk in chunks] == [2, 2, 1, 1]
    assert slow.began.wait(30) and not done
    slow.go.set()
    writer.flush()
    assert slow.keys == [0, 1] and done == [key(0), key(1)]
    assert {chunk.objects[0].get_ref_count() for chunk in chunks} == {1}
    assert writer.submit(key(15), chunks[3]) and writer.submit(key(3), chunks[3])
    writer.close()
    writer.close()
    assert slow.keys == [0, 1, 3], "closing writes what waits, an exception does not end the thread"
    assert not writer.submit(key(4), chunks[0])
    for chunk in chunks:
        chunk.release()
    assert host.allocator.used_bytes == 0


def test_one_chunk_may_wait_however_large(host):
    slow = Slow()
    slow.go.set()
    chunk = filled(host, BLENDED)
    writer = BackgroundWriter(slow, 1, lambda key: None)
    assert writer.submit(key(), chunk)
    writer.close()
    chunk.release()


def test_a_chunk_that_waits_is_not_evicted_and_a_full_queue_is_counted(tmp_path, monkeypatch):
    w = World(folder=tmp_path, host_chunks=4)
    go, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go.wait(30), fsync(file)))
    assert w.store(list(range(12))) == 12
    assert w.engine.stats().skipped == {"disk_queue_full": 1}, "half of the memory may wait"
    assert w.store([7] * 16) == 8, "two chunks wait and stay"
    assert w.engine.stats().skipped == {"disk_queue_full": 3, "no_memory": 2}
    go.set()
    w.check_books()
    assert w.engine.stats().disk_chunks == 2
    w.engine.close()
