"""The cache engine's settings: one table of keys with their defaults, read from code, a YAML file or the environment.

Every value is checked, every unknown key is named. What the settings do is the business of those who read them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

logger = logging.getLogger(__name__)

GIB = 1 << 30
PREFIX = "LMCACHE_"
CONFIG_FILE = "LMCACHE_CONFIG_FILE"
#: variables of this package that are no keys; so is everything that starts with LMCACHE_FAST_
NO_KEYS = (CONFIG_FILE, "LMCACHE_BACKEND", "LMCACHE_VALIDATE")
TRANSPORTS = ("auto", "local", "zmq")


@dataclass
class LMCacheEngineConfig:
    """All settings. Raises ArgumentError naming key, value and what is allowed, from every way of making one.

    chunk_size: tokens a chunk. local_cpu: keep chunks in host memory; without it host memory is only the way to the
    disk. max_local_cpu_size: GiB of pinned host memory. local_disk: a folder, also as `file://...`; None is no disk.
    max_local_disk_size: GiB of files, for each worker. use_layerwise, enable_blending, use_gpu_connector_v3, enable_pd:
    which connector, see `CreateGPUConnector`. save_unfull_chunk: store a last chunk that is not full.

    For the engine's adapter: save_decode_cache: store chunks that decoding completes. skip_last_n_tokens: tokens at the
    end of a prompt that are neither looked up nor stored. lookup_transport: how a scheduler asks a worker: `local`
    (same process), `zmq`, or `auto`; lookup_url: the address for zmq, None: a socket named after the instance;
    lookup_timeout_ms: after this a lookup is a miss. lmcache_instance_id: name of the engine within its process.
    extra_config: for whoever builds on this; not read here.
    """

    chunk_size: int = 256
    local_cpu: bool = True
    max_local_cpu_size: float = 5.0
    local_disk: str | None = None
    max_local_disk_size: float = 0.0
    use_layerwise: bool = False
    enable_blending: bool = False
    use_gpu_connector_v3: bool = False
    enable_pd: bool = False
    save_unfull_chunk: bool = False
    save_decode_cache: bool = False
    skip_last_n_tokens: int = 0
    lookup_transport: str = "auto"
    lookup_url: str | None = None
    lookup_timeout_ms: int = 3000
    lmcache_instance_id: str = "lmcache_default_instance"
    extra_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every value and what must fit together; brings `file://` paths and whole numbers of GiB to their type."""
        for key, kind in KINDS.items():
            setattr(self, key, _checked(key, getattr(self, key), kind))
        if self.local_disk is not None and not self.max_local_disk_size:
            raise ArgumentError("max_local_disk_size: 0.0; allowed with local_disk: more than 0 GiB")
        if not self.local_cpu and self.local_disk is None:
            raise ArgumentError("local_cpu: False; allowed without local_disk: True, for chunks must be kept somewhere")

    @property
    def max_local_cpu_bytes(self) -> int:
        return int(self.max_local_cpu_size * GIB)

    @property
    def max_local_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * GIB)

    def updated(self, values: Mapping[str, Any]) -> LMCacheEngineConfig:
        """A copy with some keys set anew. ArgumentError names keys that there are not."""
        unknown = [key for key in values if key not in KINDS]
        if unknown:
            raise ArgumentError(f"unknown {'; '.join(map(_hint, unknown))}; known keys: {', '.join(KINDS)}")
        return dataclasses.replace(self, **values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LMCacheEngineConfig:
        """From keys and values; keys left out have their defaults."""
        return cls().updated(values)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | None = None) -> LMCacheEngineConfig:
        """From a YAML file, by default the one that `LMCACHE_CONFIG_FILE` names."""
        path = path or os.environ.get(CONFIG_FILE, "").strip()
        if not path:
            raise ArgumentError(f"path: none was given, and {CONFIG_FILE} is not set")
        try:
            return cls.from_dict(_read_yaml(Path(path)))
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LMCacheEngineConfig:
        """From `LMCACHE_<KEY IN CAPITALS>`, over the file that `LMCACHE_CONFIG_FILE` names, if it is set.

        A variable that starts with LMCACHE_ and is no key is warned of: it may be somebody else's, or misspelt.
        """
        environ = os.environ if environ is None else environ
        file = environ.get(CONFIG_FILE, "").strip()
        config = cls.from_file(file) if file else cls()
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX) or name in NO_KEYS or name.startswith("LMCACHE_FAST_"):
                continue
            key = name[len(PREFIX) :].lower()
            if key in KINDS and name.isupper():
                values[key] = _parsed(name, text, KINDS[key])
            else:
                logger.warning("environment variable %s is ignored: unknown %s", name, _hint(key))
        return config.updated(values)


@dataclass(frozen=True)
class Kind:
    """What a key holds: its type, None allowed or not, what else must hold, and all of that in words."""

    type: type
    allowed: str
    holds: Callable[[Any], bool] = lambda value: True
    optional: bool = False


_FLAG = Kind(bool, "true or false")
_NAME = Kind(str, "a string that is not empty", bool)
_POSITIVE = Kind(int, "integers from 1 on", lambda value: value >= 1)
KINDS: dict[str, Kind] = {
    "chunk_size": _POSITIVE,
    "local_cpu": _FLAG,
    "max_local_cpu_size": Kind(float, "a number of GiB above 0", lambda value: int(value * GIB) > 0),
    "local_disk": Kind(str, "the path of a folder, or none", bool, optional=True),
    "max_local_disk_size": Kind(float, "a number of GiB, 0 or more", lambda value: value >= 0),
    "use_layerwise": _FLAG,
    "enable_blending": _FLAG,
    "use_gpu_connector_v3": _FLAG,
    "enable_pd": _FLAG,
    "save_unfull_chunk": _FLAG,
    "save_decode_cache": _FLAG,
    "skip_last_n_tokens": Kind(int, "integers from 0 on", lambda value: value >= 0),
    "lookup_transport": Kind(str, " | ".join(TRANSPORTS), TRANSPORTS.__contains__),
    "lookup_url": Kind(str, "an address, or none", bool, optional=True),
    "lookup_timeout_ms": _POSITIVE,
    "lmcache_instance_id": _NAME,
    "extra_config": Kind(dict, "a mapping, or none", optional=True),
}
assert list(KINDS) == [field.name for field in dataclasses.fields(LMCacheEngineConfig)]


def _checked(key: str, value: Any, kind: Kind) -> Any:
    """The value in the key's type, or ArgumentError."""
    if value is None and kind.optional:
        return None
    if kind.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if key == "local_disk" and isinstance(value, (str, os.PathLike)):
        value = os.fspath(value).removeprefix("file://")
    right_type = isinstance(value, kind.type) and not (kind.type is int and isinstance(value, bool))
    if not right_type or (kind.type is float and not math.isfinite(value)) or not kind.holds(value):
        raise ArgumentError(f"{key}: {value!r}; allowed: {kind.allowed}")
    return value


def _parsed(name: str, text: str, kind: Kind) -> Any:
    """The text of an environment variable in the key's type. The range is checked later."""
    text = text.strip()
    if kind.optional and text.lower() in ("", "none", "null"):
        return None
    try:
        if kind.type is bool:
            return {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False,
                    "off": False}[text.lower()]  # fmt: skip
        return json.loads(text) if kind.type is dict else kind.type(text)
    except (ValueError, KeyError):
        raise ArgumentError(f"{name}: {text!r}; allowed: {kind.allowed}") from None


def _hint(key: Any) -> str:
    """The unknown key, and the known one that it resembles."""
    close = difflib.get_close_matches(str(key), KINDS, n=1)
    return f"key {key!r}" + (f" (did you mean {close[0]}?)" if close else "")


def _read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; empty for an empty file."""
    try:
        import yaml
    except ImportError:
        raise ArgumentError("reading a file needs PyYAML: pip install 'lmcache-ref[engine]'") from None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ArgumentError(f"cannot be read: {error}") from None
    if values is not None and not isinstance(values, dict):
        raise ArgumentError(f"holds a {type(values).__name__}; allowed: keys and values")
    return values or {}
