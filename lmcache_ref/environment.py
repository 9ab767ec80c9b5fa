"""How environment variables are read: at every look, so that a change counts at once, and cheaply, as every call looks."""

from __future__ import annotations

import os


def variable(name: str) -> str:
    """A variable's value without spaces around it, empty when it is not set."""
    if _AS_BYTES is None:
        return os.environ.get(name, "").strip()
    value = _AS_BYTES.get(name.encode())
    return "" if value is None else os.fsdecode(value).strip()


# What os.environ keeps and decodes anew at every look; this takes a quarter of the time.
_AS_BYTES: dict[bytes, bytes] | None = getattr(os.environ, "_data", None) if os.name == "posix" else None
