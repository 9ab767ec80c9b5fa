"""Every environment variable this package reads, and where its files are. Nothing here caches: a change counts at once."""

from __future__ import annotations

import os
from pathlib import Path

from lmcache_ref.errors import BackendError

CACHE_FOLDER = "LMCACHE_FAST_CACHE"
VALIDATE = "LMCACHE_VALIDATE"


def cache_folder() -> Path:
    """Where compiled code is kept: `LMCACHE_FAST_CACHE`, else `lmcache_fast` in the user's cache folder."""
    given = os.environ.get(CACHE_FOLDER, "").strip()
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache") / "lmcache_fast"


def validation_is_on() -> bool:
    """Whether optional checks run: `LMCACHE_VALIDATE` is set to anything but 0 or nothing."""
    return os.environ.get(VALIDATE, "").strip() not in ("", "0")


def source_folder() -> Path:
    """The kernel sources: beside this package in a wheel, one folder above it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "address.h").is_file():
            return folder
    raise BackendError(
        f"the kernel sources are missing: neither {package / 'csrc'} nor {package.parent / 'csrc'} has them"
    )
