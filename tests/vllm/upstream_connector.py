"""The real LMCache's own connector for vLLM 0.8.5, made to run on a machine without a GPU: an oracle, nothing more.

Its Python is written for CUDA. Here its modules are compiled without their asserts (some say that a device is CUDA), and
streams and events, of which a CPU has no need, are objects that do nothing. Its wheel must be on the path.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import SimpleNamespace

import torch

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")


class WithoutAsserts(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.split(".")[0] == "lmcache" else None
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = WithoutAsserts(spec.loader.name, spec.loader.path)
        return spec


class Nothing:
    """A stream or an event: every method does nothing, `with` works."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None: ...

    def __getattr__(self, name):
        return lambda *args, **kwargs: True


sys.meta_path.insert(0, Finder())
torch.cuda.Stream = torch.cuda.Event = Nothing
torch.cuda.stream = lambda stream: contextlib.nullcontext(stream)
torch.cuda.current_stream = lambda *args: Nothing()
torch.cuda.synchronize = torch.cuda.set_device = lambda *args: None
torch.cuda.current_device, torch.cuda.device_count = lambda: 0, lambda: 1

import lmcache  # noqa: E402

lmcache.torch_device_type = "cpu"

import lmcache.v1.gpu_connector as connectors  # noqa: E402

connectors.torch_device_type = "cuda"
connectors.torch = SimpleNamespace(device=lambda *args: torch.device("cpu"))

from lmcache.integration.vllm.lmcache_connector_v1_085 import LMCacheConnectorV1Dynamic as LMCacheConnectorV1Dynamic  # noqa: E402
