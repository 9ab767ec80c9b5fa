"""The environment variables that this package reads for itself, and where its files are. Which backend runs and what is
validated, lmcache_ref reads. Nothing here is cached: a change counts at once.
"""

from __future__ import annotations

from pathlib import Path

from lmcache_ref.environment import variable
from lmcache_ref.errors import BackendError

CACHE_FOLDER = "LMCACHE_FAST_CACHE"
STAGING_BYTES = "LMCACHE_FAST_STAGING_BYTES"
ZERO_COPY_BYTES = "LMCACHE_FAST_ZERO_COPY_BYTES"
DEFAULT_STAGING_BYTES = 128 << 20


def cache_folder() -> Path:
    """Where compiled code is kept: `LMCACHE_FAST_CACHE`, else `lmcache_fast` in the user's cache folder."""
    given = variable(CACHE_FOLDER)
    if given:
        return Path(given)
    return Path(variable("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache_fast"


def staging_bytes() -> int:
    """Device memory for staging, for each direction of each device: `LMCACHE_FAST_STAGING_BYTES`, by default 128 MiB."""
    given = _bytes(STAGING_BYTES)
    return DEFAULT_STAGING_BYTES if given is None else given


def zero_copy_bytes() -> int | None:
    """Up to so many bytes a call, kernels reach host memory themselves: `LMCACHE_FAST_ZERO_COPY_BYTES`; None when it is not
    set, and the calibration says."""
    return _bytes(ZERO_COPY_BYTES)


def _bytes(name: str) -> int | None:
    given = variable(name)
    if not given:
        return None
    if not given.isdecimal():
        raise BackendError(f"{name}={given!r}; allowed: a number of bytes")
    return int(given)


def source_folder() -> Path:
    """The kernel sources: beside this package in a wheel, one folder above it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "address.h").is_file():
            return folder
    raise BackendError(
        f"the kernel sources are missing: neither {package / 'csrc'} nor {package.parent / 'csrc'} has them"
    )
