"""Our doors against upstream's own pure-Python functions (`lmcache.non_cuda_equivalents` of lmcache==0.4.5), on random
small cases, whole buffers: on the layouts it supports, so never on HND.

The wheel is installed without its dependencies: beside this environment, with LMCACHE_UPSTREAM naming the folder that
holds `lmcache/`, or in it. Only that one file is loaded; it stays out of `sys.modules`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from helpers import WORDS, words
from lmcache_ref import c_ops

VERSION = "0.4.5"
EXAMPLES = hypothesis.settings(max_examples=30)


def upstream_folder() -> Path | None:
    """The folder `lmcache` of the wheel, if it is there and of the right version."""
    if os.environ.get("LMCACHE_UPSTREAM"):
        folder = Path(os.environ["LMCACHE_UPSTREAM"]) / "lmcache"
        assert folder.is_dir(), f"LMCACHE_UPSTREAM: there is no {folder}"
    else:
        spec = importlib.util.find_spec("lmcache")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0])
    version = folder / "_version.py"
    found = re.search(rf"version.* = '{re.escape(VERSION)}'", version.read_text()) if version.is_file() else None
    return folder if found else None


def load_fallback(folder: Path) -> ModuleType:
    """The module, with stand-ins for numba and for lmcache itself while it loads."""
    numba, package = ModuleType("numba"), ModuleType("lmcache")
    numba.njit = lambda *args, **options: args[0] if args else lambda function: function
    package.torch_dev, package.torch_device_type = torch.cuda, "cpu"
    spec = importlib.util.spec_from_file_location("upstream_fallback", folder / "non_cuda_equivalents.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", numba)
        patch.setitem(sys.modules, "lmcache", package)
        spec.loader.exec_module(module)
    module._copy_lib = None  # a CUDA runtime that has no driver under it is of no use to it
    return module


@pytest.fixture(scope="module")
def upstream() -> ModuleType:
    folder = upstream_folder()
    if folder is None:
        pytest.skip(f"lmcache=={VERSION} is not installed")
    return load_fallback(folder)


@dataclass
class Sizes:
    """A random case: sizes, slots (a few negative, none twice) and what to skip."""

    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    slots: list[int]
    skip: int
    dtype: torch.dtype
    seed: int

    @property
    def hidden(self) -> int:
        return self.nh * self.hs

    @property
    def num_slots(self) -> int:
        return self.nb * self.bs

    def memory(self, *shape: int, number: int = 0) -> torch.Tensor:
        """Random bits, the same whenever the case asks for this number again."""
        generator = torch.Generator().manual_seed(self.seed * 100 + number)
        size = (*shape[:-1], shape[-1] * self.dtype.itemsize)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(self.dtype)


@st.composite
def cases(draw, negative=True) -> Sizes:
    nb, bs = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    slots = draw(st.lists(st.integers(0, nb * bs - 1), unique=True, max_size=8))
    if negative:
        slots = [slot if draw(st.integers(0, 3)) else -1 - slot for slot in slots]
    return Sizes(
        nl=draw(st.integers(1, 3)),
        nb=nb,
        bs=bs,
        nh=draw(st.integers(1, 3)),
        hs=draw(st.integers(1, 5)),
        slots=slots,
        skip=draw(st.integers(0, len(slots) + 1)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8])),
        seed=draw(st.integers(0, 1 << 20)),
    )


def same_after(upstream: ModuleType, buffers, call) -> None:
    """`call(module, buffers)` leaves the same bits in all buffers by upstream's module and by ours."""
    results = []
    for module in (upstream, c_ops):
        mine = [buffer.clone() for buffer in buffers]
        call(module, mine)
        results.append([words(buffer.view(-1)) for buffer in mine])
    for index, (theirs, ours) in enumerate(zip(*results, strict=True)):
        assert torch.equal(theirs, ours), f"buffer {index}: {int((theirs != ours).sum())} of {len(ours)} differ"


def pointers(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


# Names


#: upstream has this one in its compiled module only
COMPILED = "multi_layer_block_kv_transfer"


@pytest.mark.parametrize("name", [name for name in c_ops.__all__ if name.islower() and name != COMPILED])
def test_functions_have_upstreams_arguments(upstream, name):
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (upstream, c_ops))
    assert list(ours) == list(theirs)
    for argument, parameter in theirs.items():
        has_default = parameter.default is not inspect.Parameter.empty
        assert not has_default or ours[argument].default == parameter.default


def test_formats_have_upstreams_numbers(upstream):
    theirs = {member.name: member.value for member in upstream.GPUKVFormat}
    assert len(theirs) == 9 and theirs.items() <= {m.name: m.value for m in c_ops.GPUKVFormat}.items()
    assert [m.name for m in upstream.TransferDirection] == [m.name for m in c_ops.TransferDirection]


def test_shape_descriptions_have_upstreams_attributes(upstream):
    theirs, ours = upstream.PageBufferShapeDesc(), c_ops.PageBufferShapeDesc()
    assert {name: getattr(theirs, name) for name in theirs.__slots__} == vars(ours)


# Whole model: one tensor a layer, flattened as upstream's callers do

FLATTENED = {
    "NL_X_TWO_NB_BS_NH_HS": (2, lambda c: (2, c.num_slots, c.hidden)),
    "NL_X_NB_TWO_BS_NH_HS": (2, lambda c: (c.nb, 2, c.bs, c.hidden)),
    "NL_X_NB_BS_HS": (1, lambda c: (c.num_slots, c.hidden)),
    "NL_X_NBBS_ONE_HS": (1, lambda c: (c.num_slots, c.hidden)),
}


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("as_pointers", [True, False])
@pytest.mark.parametrize("name", FLATTENED)
@hypothesis.given(case=cases())
@EXAMPLES
def test_multi_layer(upstream, name, as_pointers, direction, case):
    planes, shape = FLATTENED[name]
    layers = [case.memory(*shape(case), number=layer) for layer in range(case.nl)]
    chunk = case.memory(planes, case.nl, len(case.slots), case.hidden, number=99)

    def call(module, buffers):
        *layers, chunk = buffers
        module.multi_layer_kv_transfer(
            chunk,
            pointers(layers) if as_pointers else layers,
            torch.tensor(case.slots, dtype=torch.int64),
            torch.device("cpu"),
            case.num_slots,
            module.TransferDirection[direction],
            module.GPUKVFormat[name],
            block_size=case.bs,
            skip_prefix_n_tokens=case.skip,
        )

    same_after(upstream, [*layers, chunk], call)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("as_pointers", [True, False])
@pytest.mark.parametrize("name", ["TWO_X_NL_X_NBBS_NH_HS", "NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS"])
@hypothesis.given(case=cases())
@EXAMPLES
def test_unilateral(upstream, name, as_pointers, direction, case):
    planes = 2 if name.startswith("TWO") else 1
    tensors = [case.memory(case.num_slots, case.hidden, number=index) for index in range(planes * case.nl)]
    chunk = case.memory(planes, case.nl, len(case.slots), case.hidden, number=99)

    def call(module, buffers):
        *tensors, chunk = buffers
        module.multi_layer_kv_transfer_unilateral(
            chunk,
            pointers(tensors) if as_pointers else tensors,
            torch.tensor(case.slots, dtype=torch.int64),
            torch.device("cpu"),
            case.num_slots,
            module.TransferDirection[direction],
            module.GPUKVFormat[name],
        )

    same_after(upstream, [*tensors, chunk], call)


# One layer

LAYERS = {
    "NL_X_TWO_NB_BS_NH_HS": lambda c: (2, c.nb, c.bs, c.nh, c.hs),
    "NL_X_NB_TWO_BS_NH_HS": lambda c: (c.nb, 2, c.bs, c.nh, c.hs),
    "NL_X_NB_BS_HS": lambda c: (c.nb, c.bs, c.hidden),
    "NL_X_NBBS_ONE_HS": lambda c: (c.num_slots, 1, c.hidden),
}


def chunk_shape(case: Sizes, planes: int, token_major: bool) -> tuple[int, ...]:
    tokens = len(case.slots)
    if planes == 1:
        return tokens, case.hidden
    return (tokens, 2, case.hidden) if token_major else (2, tokens, case.hidden)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@hypothesis.given(case=cases())
@EXAMPLES
def test_single_layer(upstream, name, token_major, direction, case):
    planes = 2 if "TWO" in name else 1

    def call(module, buffers):
        chunk, layer = buffers
        slots = torch.tensor(case.slots, dtype=torch.int64)
        way, fmt = module.TransferDirection[direction], module.GPUKVFormat[name]
        module.single_layer_kv_transfer(chunk, layer, slots, way, fmt, token_major)

    chunk = case.memory(*chunk_shape(case, planes, token_major), number=99)
    same_after(upstream, [chunk, case.memory(*LAYERS[name](case))], call)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
@pytest.mark.parametrize("token_major", [True, False])
@hypothesis.given(case=cases())
@EXAMPLES
def test_single_layer_sgl(upstream, token_major, direction, case):
    def call(module, buffers):
        chunk, key, value = buffers
        slots = torch.tensor(case.slots, dtype=torch.int64)
        way = module.TransferDirection[direction]
        module.single_layer_kv_transfer_sgl(chunk, key, value, slots, way, token_major)

    caches = [case.memory(case.nb, case.bs, case.nh, case.hs, number=number) for number in (1, 2)]
    same_after(upstream, [case.memory(*chunk_shape(case, 2, token_major), number=99), *caches], call)


@pytest.mark.parametrize("function", ["load_and_reshape_flash", "reshape_and_cache_back_flash"])
@hypothesis.given(case=cases(negative=False), data=st.data())
@EXAMPLES
def test_flash_pair(upstream, function, case, data):
    layer = data.draw(st.integers(0, case.nl - 1))

    def call(module, buffers):
        getattr(module, function)(*buffers, torch.tensor(case.slots, dtype=torch.int64), layer)

    chunk = case.memory(2, case.nl, len(case.slots), case.hidden, number=99)
    caches = [case.memory(case.nb, case.bs, case.nh, case.hs, number=number) for number in (1, 2)]
    same_after(upstream, [chunk, *caches], call)


# Bytes and rotation


@hypothesis.given(st.integers(0, 200), st.integers(0, 300), st.integers(0, 9), st.booleans())
@EXAMPLES
def test_memcpy(upstream, nbytes, offset, exponent, as_tensors):
    def call(module, buffers):
        ends = buffers if as_tensors else [buffer.data_ptr() for buffer in buffers]
        module.lmcache_memcpy_async(*ends, nbytes, module.TransferDirection.H2D, offset, 1 << exponent)

    source = torch.arange(200, dtype=torch.uint8)
    same_after(upstream, [torch.zeros(200, dtype=torch.uint8), source], call)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rotation(upstream, dtype, tolerance, is_neox):
    """Upstream rounds in between and multiplies where ours divides: close, not equal."""
    generator = torch.Generator().manual_seed(3)
    angles = torch.randn(50, 4, dtype=torch.float64, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    keys = torch.randn(20, 3, 10, dtype=torch.float64, generator=generator).to(dtype)
    old, new = (torch.randint(0, 50, (20,), generator=generator) for _ in range(2))
    results = []
    for module in (upstream, c_ops):
        results.append(keys.clone())
        module.rotary_embedding_k_fused(old, new, results[-1], 10, table, is_neox)
    theirs, ours = results
    assert torch.equal(theirs[..., 8:], ours[..., 8:]) and not torch.equal(ours, keys)
    assert (theirs - ours).abs().max() < tolerance * keys.abs().max()


# Where ours is another


def test_negative_slots_in_the_flash_pair(upstream):
    """Ours: a negative slot is skipped (rule 2), as in every other function. Upstream's: counted from the end."""
    cache = torch.arange(24, dtype=torch.int16).view(3, 2, 2, 2)
    results = []
    for module in (upstream, c_ops):
        chunk = torch.full((2, 1, 2, 4), -7, dtype=torch.int16)
        module.load_and_reshape_flash(chunk, cache, cache + 100, torch.tensor([1, -1]), 0)
        results.append(chunk[0, 0].tolist())
    assert results == [[[4, 5, 6, 7], [20, 21, 22, 23]], [[4, 5, 6, 7], [-7] * 4]]


def test_upstream_has_no_hnd(upstream):
    """It refuses whole models in HND, which is why no differential case here is one."""
    layer = torch.zeros(1, 2, 3, 4, 5)
    for module in (upstream, c_ops):
        chunk = torch.ones(2, 1, 1, 15)
        arguments = [chunk, [layer.expand(2, 2, 3, 4, 5).clone()], torch.tensor([3]), torch.device("cpu"), 8]
        arguments += [module.TransferDirection.D2H, module.GPUKVFormat.NL_X_TWO_NB_NH_BS_HS, 4, 5]
        if module is upstream:
            with pytest.raises(NotImplementedError, match="HND"):
                module.multi_layer_kv_transfer(*arguments)
        else:
            module.multi_layer_kv_transfer(*arguments)
            assert not chunk.any()


def test_the_comparison_sees_a_difference(upstream):
    def call(module, buffers):
        buffers[0][3] += module is upstream

    with pytest.raises(AssertionError, match="buffer 0: 1 of 5 differ"):
        same_after(upstream, [torch.zeros(5, dtype=WORDS[4])], call)


# Finding the wheel


def wheel(folder: Path, version: str) -> Path:
    (folder / "lmcache").mkdir()
    (folder / "lmcache" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return folder


def test_the_wheel_is_found_by_its_version(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_UPSTREAM", str(tmp_path / "missing"))
    with pytest.raises(AssertionError, match="LMCACHE_UPSTREAM: there is no"):
        upstream_folder()
    monkeypatch.setenv("LMCACHE_UPSTREAM", str(wheel(tmp_path, "0.4.6")))
    assert upstream_folder() is None
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("LMCACHE_UPSTREAM", str(wheel(tmp_path / "other", VERSION)))
    assert upstream_folder() == tmp_path / "other" / "lmcache"
    monkeypatch.delenv("LMCACHE_UPSTREAM")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert upstream_folder() is None
