"""The connector classes on stand-ins for vLLM's base class: which one is chosen, what each passes on, what is refused.

Each case runs in a process of its own, where `vllm` is a package written for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BASE = """
import abc, enum

class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorMetadata:
    pass

class KVConnectorBase_V1(abc.ABC):
    def __init__(self, {arguments}):
        self.made_with = dict({arguments_by_name})
        self._connector_metadata = KVConnectorMetadata()

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def _get_connector_metadata(self):
        return self._connector_metadata
{more}
for name in ({abstract}):
    setattr(KVConnectorBase_V1, name, abc.abstractmethod(lambda self, *args: None))
KVConnectorBase_V1 = type(KVConnectorBase_V1)("KVConnectorBase_V1", (abc.ABC,), dict(vars(KVConnectorBase_V1)))
{after}
"""
ABSTRACT = (
    "start_load_kv wait_for_layer_load save_kv_layer wait_for_save "
    "get_num_new_matched_tokens update_state_after_alloc build_connector_meta"
)
FINISHED = """
    def request_finished(self, request, block_ids):
        return False, None
    def register_kv_caches(self, kv_caches):
        pass
"""
REPORTS = """
    def get_block_ids_with_load_errors(self):
        return set()
    def has_connector_metadata(self):
        return True
"""
HMA = """
class SupportsHMA(abc.ABC):
    @abc.abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...
"""
VERSIONS = {
    "0.8.5": dict(arguments="vllm_config, role", more="", after=""),
    "0.9": dict(arguments="vllm_config, role", more=FINISHED, after=""),
    "0.11.1": dict(arguments="vllm_config, role, kv_cache_config=None", more=FINISHED + REPORTS, after=HMA),
    "0.32": dict(arguments="vllm_config, role, kv_cache_config", more=FINISHED + REPORTS, after=HMA),
}


def make_vllm(folder: Path, arguments: str, more: str, after: str, abstract: str = ABSTRACT) -> None:
    package = folder / "vllm" / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    package.mkdir(parents=True)
    names = [part.split("=")[0].strip() for part in arguments.split(",")]
    text = BASE.format(
        arguments=arguments,
        arguments_by_name=", ".join(f"{name}={name}" for name in names),
        more=more,
        after=after,
        abstract=", ".join(repr(name) for name in abstract.split()),
    )
    (package / "base.py").write_text(text)
    for path in (package, *package.parents):
        if path == folder:
            break
        (path / "__init__.py").write_text("")


def python(folder: Path | None, code: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder)] if folder else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT), str(ROOT / "tests" / "vllm")])
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder or ROOT.parent
    )


def output_of(folder: Path, code: str) -> str:
    result = python(folder, code)
    assert result.returncode == 0, result.stderr
    return result.stdout


MODULES = ("lmcache_connector_v1", "lmcache_connector_v1_085")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("modules", [MODULES, MODULES[::-1]], ids=["new-first", "old-first"])
def test_both_modules_name_the_class_for_the_installed_vllm(tmp_path, version, modules):
    make_vllm(tmp_path, **VERSIONS[version])
    code = f"""
from importlib import import_module
classes = [import_module("lmcache_ref.integration.vllm." + m).LMCacheConnectorV1Dynamic for m in {modules}]
assert classes[0] is classes[1]
print(classes[0].__name__)
"""
    expected = "LMCacheConnectorV1_085" if version == "0.8.5" else "LMCacheConnectorV1"
    assert output_of(tmp_path, code).strip() == expected


USE = """
import pickle, torch
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from fake_engine import vllm_config, NL
from vllm_fakes import FakeRequest, scheduler_output
from lmcache_ref.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic as Connector
VERSION = {version!r}
old = VERSION == "0.8.5"
config = vllm_config(block_size=4, extra={{"lmcache.chunk_size": 8, "lmcache.max_local_cpu_size": 0.001}})
more = () if "kv_cache_config" not in {arguments!r} else (SimpleNamespace(kv_cache_groups=[]),)
worker = Connector(config, KVConnectorRole.WORKER, *more)
scheduler = Connector(config, KVConnectorRole.SCHEDULER, *more)
assert set(worker.made_with) == {{name.split("=")[0].strip() for name in {arguments!r}.split(",")}}

caches = {{f"layer{{i}}": torch.zeros(2, 9, 4, 2, 4, dtype=torch.float16) for i in range(NL)}}
layers = {{name: SimpleNamespace(kv_cache=[cache]) for name, cache in caches.items()}}
context = SimpleNamespace(no_compile_layers=layers, virtual_engine=0, attn_metadata=object())
if not old:
    worker.register_kv_caches(caches)

def step(request, tokens, blocks):
    matched = scheduler.get_num_new_matched_tokens(request, 0)
    hit = matched if old else matched[0]
    assert type(hit) is int and (old or matched[1] is False)
    scheduler.update_state_after_alloc(request, *(() if old else (object(),)), hit)
    request.num_computed_tokens = hit
    output = scheduler_output("0.8.5" if old else "0.32", [(request, tokens - hit, blocks)])
    metadata = scheduler.build_connector_meta(output)
    assert isinstance(metadata, KVConnectorMetadata)
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
    worker.start_load_kv(context)
    for name, cache in caches.items():
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name, cache, object())
    worker.wait_for_save()
    return hit

for cache in caches.values():
    cache[:, 1:5] = torch.rand(2, 4, 4, 2, 4)
assert step(FakeRequest("a", range(16)), 16, [1, 2, 3, 4]) == 0
assert step(FakeRequest("b", range(16)), 16, [5, 6, 7, 8]) == 15
for cache in caches.values():
    assert torch.equal(cache[:, 1:5], cache[:, 5:9]) and cache[:, 5:9].any() and not cache[:, 0].any()
if not old:
    assert worker.get_finished({{"a"}}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker._lmcache_engine.worker.reports_failures == (VERSION != "0.9")
    assert scheduler.request_finished(FakeRequest("b", range(16)), [5]) == (False, None)
    assert scheduler.request_finished_all_groups(FakeRequest("b", range(16)), ([5],)) == (False, None)
    scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={{5}}))
    assert not scheduler.requires_kv_delivery
    assert Connector.requires_piecewise_for_cudagraph({{"lmcache.use_layerwise": True}})
    assert not Connector.requires_piecewise_for_cudagraph({{}})
for one in (scheduler, worker, worker):
    one.shutdown()
print("well")
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hit_through_the_class_of_each_version(tmp_path, version):
    make_vllm(tmp_path, **VERSIONS[version])
    code = USE.format(version=version, arguments=VERSIONS[version]["arguments"])
    assert output_of(tmp_path, code).strip().endswith("well")


@pytest.mark.parametrize("module", MODULES)
def test_without_vllm(module):
    result = python(None, f"import lmcache_ref.integration.vllm.{module}")
    assert "ImportError: the LMCache connector needs vLLM 0.8.5 or later" in result.stderr
    assert "found no vLLM" in result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_a_vllm_without_the_api(tmp_path, module):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.6.3'")
    result = python(tmp_path, f"import lmcache_ref.integration.vllm.{module}")
    assert "ImportError: the LMCache connector needs vLLM 0.8.5 or later" in result.stderr
    assert "found vLLM 0.6.3, and importing the API failed: No module named 'vllm.distributed'" in result.stderr


@pytest.mark.parametrize("version", ["0.8.5", "0.32"])
def test_a_vllm_that_wants_more(tmp_path, version):
    make_vllm(tmp_path, **VERSIONS[version], abstract=f"{ABSTRACT} teleport_kv")
    result = python(tmp_path, "import lmcache_ref.integration.vllm.lmcache_connector_v1")
    assert "ImportError: this vLLM's connector API wants teleport_kv, which LMCacheConnectorV1" in result.stderr


FACTORY = """
class KVConnectorFactory:
    registry = {}

    @classmethod
    def register_connector(cls, name, module, class_name):
        if name in cls.registry:
            raise ValueError(name)
        cls.registry[name] = (module, class_name)
"""


def test_the_plugin_makes_the_connector_known_by_its_name(tmp_path):
    make_vllm(tmp_path, **VERSIONS["0.8.5"])
    (tmp_path / "vllm/distributed/kv_transfer/kv_connector/factory.py").write_text(FACTORY)
    code = """
import importlib
from lmcache_ref.integration.vllm import plugin
plugin.register()
plugin.register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
((name, (module, class_name)),) = KVConnectorFactory.registry.items()
print(name, getattr(importlib.import_module(module), class_name).__name__)
"""
    assert output_of(tmp_path, code).split() == ["LMCacheConnectorV1Dynamic", "LMCacheConnectorV1_085"]


def test_the_plugin_does_nothing_without_vllm():
    result = python(None, "from lmcache_ref.integration.vllm.plugin import register; register()")
    assert result.returncode == 0, result.stderr


def test_the_halves_import_no_vllm():
    code = """
import sys
from lmcache_ref.integration.vllm import vllm_v1_adapter
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
"""
    result = python(None, code)
    assert result.returncode == 0, result.stderr
