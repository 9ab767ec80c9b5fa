"""How the scheduler asks the workers' caches, in its own process or in others.

A scheduler in a worker's process finds its cache in the registry of engines and calls it directly, one in another process
over a socket whose address both derive from the engine's id and the worker's rank. Nothing but numbers crosses it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from ...engine.builder import CacheEngineBuilder
from ...errors import ArgumentError

logger = logging.getLogger("vllm.lmcache_ref")

LONGEST_SOCKET_PATH = 100
OLD_SOCKET_S = 60
POLL_MS = 200  # how soon a server notices that it is to stop


class Cache(Protocol):
    """What a worker offers: the cache engine's own methods."""

    def lookup(self, tokens: Any, request_id: str) -> int: ...

    def release(self, request_id: str) -> None: ...


def worker_name(engine_id: str, rank: int) -> str:
    """What a worker's cache is called in the registry of its process."""
    return f"{engine_id}:{rank}"


def worker_address(engine_id: str, rank: int, url: str | None = None) -> str:
    """Where a worker's server listens.

    url: `tcp://host:port`, where rank r takes port + r, or any other address, which gets `.r` appended. None: a Unix
    socket named after engine and rank, in a temporary folder that only this user can enter.
    """
    if url is not None and url.startswith("tcp://"):
        host, _, port = url.rpartition(":")
        if not port.isdigit():
            raise ArgumentError(f"lookup_url: {url!r}; allowed for tcp: tcp://host:port")
        return f"{host}:{int(port) + rank}"
    if url is not None:
        return f"{url}.{rank}"
    name = hashlib.sha256(worker_name(engine_id, rank).encode()).hexdigest()[:24]
    path = _socket_folder() / f"{name}.sock"
    if len(str(path)) > LONGEST_SOCKET_PATH:
        raise ArgumentError(f"TMPDIR: {tempfile.gettempdir()!r} is too long for a Unix socket; set lookup_url")
    return f"ipc://{path}"


def _socket_folder() -> Path:
    """This user's folder for sockets, made if need be. ArgumentError when somebody else made it."""
    folder = Path(tempfile.gettempdir()) / f"lmcache-ref-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ArgumentError(f"{folder} is not a folder of this user alone; remove it, or set lookup_url")
    return folder


def remove_dead_sockets() -> None:
    """Remove this user's sockets of processes that were killed: old ones on which nobody listens."""
    for path in _socket_folder().glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if time.time() - path.stat().st_mtime > OLD_SOCKET_S and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ImportError("a scheduler and workers in different processes need pyzmq: pip install pyzmq") from error
    return zmq


class LookupServer:
    """Answers the scheduler's questions to one worker's cache, in a thread of its own, until `close`.

    A question is `[request id, its tokens, ids of requests to release...]`; what is to be released goes first, and an
    empty request id asks nothing more.
    """

    def __init__(self, address: str, cache: Cache) -> None:
        zmq = _zmq()
        self.cache, self.address = cache, address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="lmcache-ref lookup", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(POLL_MS):
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        self._socket.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """A question that fails is answered, so that the scheduler does not wait; it counts as no hit there."""
        try:
            request_id, token_ids, *released = question
            for name in released:
                self.cache.release(name.decode())
            hit = 0
            if request_id:
                hit = self.cache.lookup(array.array("q", token_ids).tolist(), request_id=request_id.decode())
            return [str(hit).encode()]
        except Exception as error:
            logger.exception("lookup failed")
            return [b"0", f"{type(error).__name__}: {error}".encode()]

    def close(self) -> None:
        """Stop the thread and remove the socket. May be called twice."""
        if self._context.closed:
            return
        self._stop.set()
        self._thread.join()
        self._context.term()
        if self.address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://"))


class RemoteCache:
    """A worker's cache in another process; used by one thread.

    A worker that does not answer within `timeout_s` has no hit. What it should have released goes with the next question.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._zmq = _zmq()
        self._context = self._zmq.Context()
        self._socket: Any = None
        self._owed: set[str] = set()  # requests to release there

    def lookup(self, token_ids: list[int], request_id: str) -> int:
        """Tokens held and pinned there; 0 when it cannot say."""
        hit = self._ask(request_id.encode(), array.array("q", token_ids).tobytes())
        if hit is None:
            self._owed.add(request_id)  # it may find the hit later, and pin it
        return hit or 0

    def release(self, request_id: str) -> None:
        """Give the request's pins back."""
        self._owed.add(request_id)
        self._ask(b"", b"")

    def _ask(self, request_id: bytes, token_ids: bytes) -> int | None:
        """The hit; None, with a warning, when there is no answer in time or the worker failed."""
        if self._socket is None:
            self._socket = self._context.socket(self._zmq.REQ)
            self._socket.linger = 0
            self._socket.connect(self.address)
        self._socket.send_multipart([request_id, token_ids, *(name.encode() for name in sorted(self._owed))])
        if not self._socket.poll(int(self.timeout_s * 1000)):
            self._drop_socket()  # a REQ socket without its answer is of no more use
            logger.warning("no answer from %s in %s s: counts as no hit", self.address, self.timeout_s)
            return None
        hit, *failure = self._socket.recv_multipart()
        self._owed.clear()
        if failure:
            logger.warning("lookup at %s failed: %s", self.address, failure[0].decode())
            return None
        return int(hit)

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close the socket; the next question opens another. May be called twice."""
        self._drop_socket()


class WorkersLookup:
    """The caches of all workers of one engine: a token counts when every worker holds it.

    transport: `local` (this process only), `zmq` (sockets only) or `auto` (a cache of this process, else its socket).
    """

    def __init__(
        self,
        engine_id: str,
        world_size: int,
        *,
        transport: str = "auto",
        url: str | None = None,
        timeout_s: float = 3.0,
    ) -> None:
        self.engine_id, self.world_size = engine_id, world_size
        self.transport, self.url, self.timeout_s = transport, url, timeout_s
        self._remote: dict[int, RemoteCache] = {}

    def _cache(self, rank: int) -> Cache:
        cache = CacheEngineBuilder.get(worker_name(self.engine_id, rank))
        if cache is not None and self.transport != "zmq":
            return cache
        if self.transport == "local":
            raise ArgumentError(
                f"lookup_transport: 'local', but worker {rank} is in another process; allowed here: auto or zmq"
            )
        if rank not in self._remote:
            address = worker_address(self.engine_id, rank, self.url)
            self._remote[rank] = RemoteCache(address, self.timeout_s)
        return self._remote[rank]

    def lookup(self, token_ids: list[int], request_id: str) -> int:
        """Leading tokens that every worker holds and has pinned; a worker without a hit ends the asking."""
        hit = len(token_ids)
        for rank in range(self.world_size):
            hit = min(hit, self._cache(rank).lookup(token_ids, request_id=request_id))
            if hit == 0:
                for asked in range(rank):
                    self._cache(asked).release(request_id)
                break
        return hit

    def release(self, request_id: str) -> None:
        """Give the request's pins back in every worker."""
        for rank in range(self.world_size):
            self._cache(rank).release(request_id)

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        for remote in self._remote.values():
            remote.close()
