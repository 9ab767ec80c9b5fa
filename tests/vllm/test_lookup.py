"""Lookups between a scheduler and workers: in one process, over sockets, in several processes, and when nobody answers."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lmcache_ref.engine import CacheEngineBuilder
from lmcache_ref.errors import ArgumentError
from lmcache_ref.integration.vllm.lookup import (
    LookupServer,
    RemoteCache,
    WorkersLookup,
    remove_dead_sockets,
    worker_address,
    worker_name,
)

over_sockets = pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="pyzmq is not installed")


class Cache:
    """Holds as many tokens of everything as it is told; remembers what it was asked."""

    def __init__(self, holds: int) -> None:
        self.holds = holds
        self.asked: list[list[int]] = []
        self.pins: set[str] = set()
        self.wait = threading.Event()
        self.wait.set()

    def lookup(self, tokens, request_id):
        self.wait.wait(10)
        if self.holds < 0:
            raise RuntimeError("the disk is on fire")
        self.asked.append(list(tokens))
        hit = min(self.holds, len(tokens))
        if hit:
            self.pins.add(request_id)
        return hit

    def release(self, request_id):
        self.pins.discard(request_id)


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch):
    """Short, for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def workers(monkeypatch):
    """Makes the workers of an engine, in this process or behind sockets; undone at the end."""
    undo = []

    def make(engine_id, caches, transport):
        for rank, cache in enumerate(caches):
            if transport == "local":
                monkeypatch.setitem(CacheEngineBuilder._engines, worker_name(engine_id, rank), cache)
            else:
                undo.append(LookupServer(worker_address(engine_id, rank), cache).close)

    yield make
    for one in undo:
        one()


TOKENS = [5, 0, 2**40, -(2**61), 7]  # stand-ins for images are negative and large


@pytest.mark.parametrize("transport", ["local", pytest.param("zmq", marks=over_sockets)])
@pytest.mark.parametrize(("holds", "hit"), [([9], 5), ([3], 3), ([4, 2, 9], 2), ([4, 0, 9], 0)])
def test_a_token_counts_when_every_worker_holds_it(workers, transport, holds, hit):
    caches = [Cache(number) for number in holds]
    workers("e", caches, transport)
    asker = WorkersLookup("e", len(caches), transport=transport)
    assert asker.lookup(TOKENS, "r") == hit
    assert caches[0].asked == [TOKENS]
    assert [cache.pins for cache in caches] == [{"r"} if hit else set()] * len(caches)
    asker.release("r")
    assert not any(cache.pins for cache in caches)
    asker.close()
    asker.close()


@over_sockets
def test_auto_takes_the_cache_of_this_process_and_else_the_socket(workers):
    here, there = Cache(3), Cache(4)
    workers("e", [here], "local")
    server = LookupServer(worker_address("e", 1), there)
    asker = WorkersLookup("e", 2)
    assert asker.lookup(TOKENS, "r") == 3
    assert here.asked and there.asked
    asker.close()
    server.close()
    server.close()
    assert not list(Path(worker_address("e", 1).removeprefix("ipc://")).parent.glob("*.sock"))


def test_engines_do_not_answer_for_each_other(workers):
    workers("e:0", [Cache(3)], "local")
    with pytest.raises(ArgumentError, match="'local', but worker 0 is in another process"):
        WorkersLookup("e:1", 1, transport="local").lookup(TOKENS, "r")
    assert worker_address("e:0", 1) != worker_address("e:1", 0)


@over_sockets
def test_nobody_answers():
    """A worker that is not there: no hit, after the timeout, and no more than that."""
    asker = WorkersLookup("nobody", 1, transport="zmq", timeout_s=0.2)
    start = time.monotonic()
    assert asker.lookup(TOKENS, "r") == 0
    assert 0.15 < time.monotonic() - start < 2
    asker.close()


@over_sockets
def test_a_late_answer_is_no_hit_and_its_pins_go_back():
    cache = Cache(4)
    server = LookupServer(worker_address("slow", 0), cache)
    remote = RemoteCache(worker_address("slow", 0), timeout_s=0.3)
    cache.wait.clear()
    assert remote.lookup(TOKENS, "late") == 0
    cache.wait.set()
    for _ in range(100):
        if cache.pins:
            break
        time.sleep(0.02)
    assert cache.pins == {"late"}
    assert remote.lookup(TOKENS, "next") == 4
    assert cache.pins == {"next"}, "what is owed goes with the next question"
    remote.close()
    server.close()


@over_sockets
def test_a_worker_that_fails_answers_all_the_same(caplog):
    cache = Cache(-1)
    server = LookupServer(worker_address("e", 0), cache)
    remote = RemoteCache(worker_address("e", 0), timeout_s=5)
    assert remote.lookup(TOKENS, "r") == 0
    assert "RuntimeError: the disk is on fire" in caplog.text
    cache.holds = 2
    assert remote.lookup(TOKENS, "r") == 2
    remote.close()
    server.close()


def serve(address, ready, stop):
    server = LookupServer(address, Cache(3))
    ready.set()
    stop.wait(30)
    server.close()


@over_sockets
def test_another_process():
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    address = worker_address("e", 0)
    process = context.Process(target=serve, args=(address, ready, stop))
    process.start()
    assert ready.wait(60)
    asker = WorkersLookup("e", 1)
    assert [asker.lookup(TOKENS, f"r{number}") for number in range(50)] == [3] * 50
    stop.set()
    process.join(30)
    assert process.exitcode == 0
    asker.close()


# ---------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("tcp://127.0.0.1:5000", ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]),
        ("ipc:///run/lookup", ["ipc:///run/lookup.0", "ipc:///run/lookup.1"]),
    ],
)
def test_given_addresses(url, addresses):
    assert [worker_address("e", rank, url) for rank in range(2)] == addresses


def test_a_tcp_address_needs_a_port():
    with pytest.raises(ArgumentError, match="tcp://host:port"):
        worker_address("e", 0, "tcp://host")


def test_the_socket_is_in_a_folder_of_this_user_alone(own_temporary_folder):
    path = Path(worker_address("e" * 300, 0).removeprefix("ipc://"))
    assert path.parent.parent == own_temporary_folder and len(str(path)) < 100
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ArgumentError, match="not a folder of this user alone"):
        worker_address("e", 0)


def test_a_temporary_folder_too_long_for_sockets(monkeypatch, own_temporary_folder):
    long = own_temporary_folder / ("d" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ArgumentError, match="too long for a Unix socket"):
        worker_address("e", 0)


@over_sockets
def test_sockets_of_killed_processes_are_removed_and_no_others():
    server = LookupServer(worker_address("alive", 0), Cache(1))
    folder = Path(server.address.removeprefix("ipc://")).parent
    for name in ("dead", "young"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(folder / f"{name}.sock"))
    long_ago = time.time() - 3600
    os.utime(folder / "dead.sock", (long_ago, long_ago))
    os.utime(server.address.removeprefix("ipc://"), (long_ago, long_ago))
    remove_dead_sockets()
    assert sorted(path.name for path in folder.iterdir()) == sorted(["young.sock", Path(server.address).name])
    server.close()
