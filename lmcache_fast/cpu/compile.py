"""Compiles C++ sources to a shared library at first use, and keeps it: one file per content, compiler, flags and CPU.

Processes that start together compile once (a file lock), and a half-written library is never seen (a rename). What the
library does is not known here.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_ref.errors import BackendError

from ..environment import CACHE_FOLDER, cache_folder

COMPILERS = ("g++", "c++", "clang++")
# No contraction of a*b+c: the bits of a rotation are each operation rounded by itself.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")


def find_compiler() -> list[str] | None:
    """The command to call: `CXX`, else the first of `COMPILERS` on the path; None when there is none."""
    command = shlex.split(os.environ.get("CXX", ""))
    for candidate in [command] if command else [[name] for name in COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    return None


def unavailable() -> str | None:
    """Why nothing can be compiled here, None when it can."""
    if os.name != "posix":
        return f"needs a POSIX system, this is {os.name}"
    if find_compiler() is None:
        return f"no C++ compiler: looked for {os.environ.get('CXX') or ', '.join(COMPILERS)} (CXX names another)"
    return None


def load_library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL:
    """The library made of `sources`, from the cache folder or compiled into it. `headers`: what else its content is.

    Raises BackendError with the compiler's log, or with the reason why the folder cannot be used.
    """
    reason = unavailable()
    if reason is not None:
        raise BackendError(reason)
    command = [*(find_compiler() or ()), *FLAGS, *flags]
    library = _folder() / f"{name}-{_digest(command, [*sources, *headers])}.so"
    if not library.exists():
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(command, sources, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BackendError(f"cannot load {library}: {error}") from error


def _folder() -> Path:
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(f"cannot create {folder}: {error}; {CACHE_FOLDER} names another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BackendError(f"cannot write to {folder}; {CACHE_FOLDER} names another folder")
    return folder


def _digest(command: Sequence[str], files: Sequence[Path]) -> str:
    """Changes with the sources, the flags, the compiler's version and the CPU it compiles for.

    The last two are what the compiler itself predefines under these flags; a cache folder may be shared by machines.
    """
    predefined = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    digest = hashlib.sha256("\0".join([*command, predefined]).encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:20]


def _compile(command: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    """Compile next to the library's place and move it there in one step."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".unfinished")
    os.close(handle)
    try:
        _run([*command, *map(str, sources), "-o", unfinished])
        os.replace(unfinished, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BackendError(f"{shlex.join(command)}\nfailed with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes respect; it goes with the process that holds it."""
    import fcntl  # POSIX only, as is the whole backend

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
