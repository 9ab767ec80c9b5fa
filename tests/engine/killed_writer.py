"""Processes killed in the middle of writing to one folder, each followed by one that checks what it finds there.

A script: `killed_writer.py FOLDER SEED KILLS [in-place]`; the last word makes writers that do not rename. It prints one
JSON line for the test that runs it. Processes are forked from this one, which has no other thread: one import of torch.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

for place in (".", "..", "../.."):
    sys.path.insert(0, str(Path(__file__).resolve().parent / place))

import torch  # noqa: E402
from engine_worlds import CHUNK, World  # noqa: E402

from lmcache_ref.engine import chunk_file  # noqa: E402
from lmcache_ref.engine.disk import SUFFIX  # noqa: E402

FAMILIES = 24


def request(family: int) -> list[int]:
    """One to three chunks."""
    return [1000 * family + i for i in range((family % 3 + 1) * CHUNK)]


def world(folder: str) -> World:
    return World("buffer", folder=folder, host_chunks=3 * FAMILIES)


def slow_down(in_place: bool, began: int) -> None:
    """Writing takes some milliseconds, its bytes reach the file one tensor after the other, `began` tells of each."""
    lock, views, fsync = chunk_file._try_lock, chunk_file._views, os.fsync
    writing = []

    def slow_lock(file):
        lock(file)
        writing.append(True)
        os.write(began, b"!")

    def slow_views(chunk):
        for view in views(chunk):
            time.sleep(0.0005 * len(writing))
            yield view

    def slow_fsync(file):
        writing.clear()
        fsync(file)
        time.sleep(0.0005)

    chunk_file._try_lock, chunk_file._views, os.fsync = slow_lock, slow_views, slow_fsync

    def unbuffered(path, mode):
        where = str(path).partition(SUFFIX)[0] + SUFFIX if in_place else path
        return open(where, mode, buffering=0 if mode == "wb" else -1)

    chunk_file.open = unbuffered
    if in_place:
        os.replace = lambda source, target: None


def write_for_ever(folder: str, seed: int, in_place: bool, began: int) -> None:
    """Store requests, forget some of their chunks, store them again."""
    w, order = world(folder), random.Random(seed)
    slow_down(in_place, began)
    while True:
        tokens = request(order.randrange(FAMILIES))
        w.store(tokens)
        w.engine.flush()
        disk = w.engine.storage.disk
        for span in w.engine.names.spans(tokens)[order.randrange(2) :]:
            w.engine.storage.host.remove(span.key)
            if order.random() < 0.3:
                disk.remove(span.key)


def check(folder: str, result: int) -> None:
    """Load all that is promised, compare every byte; say how much it was, or that it was wrong."""
    logging.disable(logging.CRITICAL)
    w, served = world(folder), 0
    try:
        for family in range(FAMILIES):
            tokens = request(family)
            hits = w.engine.lookup(tokens, "r")
            assert w.retrieve(tokens) == hits
            served += hits
            w.engine.release("r")
        stats = w.engine.stats()
        on_disk = sum(path.stat().st_size for path in w.engine.storage.disk.folder.iterdir())
        assert on_disk == stats.disk_used_bytes, "temporary files are gone, the rest is known"
        answer = {"served": served, "drops": stats.disk_drops, "wrong": ""}
    except BaseException as error:
        answer = {"served": served, "drops": 0, "wrong": repr(error)}
    os.write(result, json.dumps(answer).encode())


def forked(work, *args) -> tuple[int, int]:
    """(process, the end of a pipe that it writes to); `work` gets the other end last."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            work(*args, writing)
        finally:
            os._exit(0)
    os.close(writing)
    return process, reading


def main(folder: str, seed: int, kills: int, in_place: bool) -> None:
    torch.set_num_threads(1)
    order = random.Random(seed)
    answers, halves = [], 0
    for kill in range(kills):
        process, pipe = forked(write_for_ever, folder, order.randrange(1 << 30), in_place)
        for _ in range(order.randint(1, 12)):
            assert os.read(pipe, 1) == b"!"
        time.sleep(order.uniform(0, 0.004))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"writer {kill} ended by itself"
        os.close(pipe)
        halves += len(list(Path(folder).glob("*/*.tmp")))
        process, pipe = forked(check, folder)
        answers.append(json.loads(os.read(pipe, 1 << 16)))
        os.waitpid(process, 0)
        os.close(pipe)
    print(json.dumps({"kills": len(answers), "halves": halves, "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "in-place" in sys.argv)
