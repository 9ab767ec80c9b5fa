"""LMCache's compiled functions (`c_ops` of the wheel lmcache==0.4.5) as a third opinion beside the specification and the
backend `cuda`: whole buffers, bit for bit, for each format that they have a kernel for.

LMCACHE_UPSTREAM names the folder in which the wheel is unpacked. Its module is for Python 3.12 and CUDA 13. What it does
with the other formats is listed, not assumed. Speed is `lmcache-ref bench`.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peer_worlds import BS, NB, NL, Call, Setting, World, agree, outcome

from lmcache_ref import c_ops
from lmcache_ref.layouts import LAYOUTS

on_gpu = pytest.mark.gpu
DIRECTIONS = ("H2D", "D2H")
DTYPES = (torch.bfloat16, torch.uint8, torch.float16, torch.float32)  # fp8 are bytes to it
CHUNKS = ("pinned", "device")
BACKENDS = ("reference", "cuda")
SLOTS = {
    "plain": [13, 0, 27, 6, 19, 3, 8, 22, 11, 1, 16],
    "some negative": [-1, 0, 27, -1, 19, 3, -1, 22, 11, 1, 16],
}
BLOCKS, CHUNK_BLOCKS = [5, 1, 0, 6, 3, 2], 2

WHOLE_MODEL = {
    "multi_layer_kv_transfer": (1, 2, 3, 5, 6, 7),
    "multi_layer_kv_transfer_unilateral": (3, 4, 5),
}
ONE_LAYER = (1, 2, 3, 6, 7)
WHOLE_BLOCKS = (0, 1, 2, 3, 4, 5, 8)
NAMES = {row.upstream_id: row.name for row in LAYOUTS.values() if row.upstream_id is not None and row.upstream_id <= 8}

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")  # of modules for this Python

#: It has a kernel for this too, which reads outside all memory (an illegal access on an H200) when it is given the one base
#: pointer that its block function takes for that format. A process does not survive that, so it is not called.
NOT_CALLED = {("multi_layer_kv_transfer", 0)}
REFUSES = "refuses: Unsupported GPUKVFormat"
#: (function, format) that the module has no kernel for -> how what it does begins
NO_KERNEL = {
    **{("multi_layer_kv_transfer", number): REFUSES for number in (4, 8)},
    **{("single_layer_kv_transfer", number): REFUSES for number in (0, 5, 8)},
    ("single_layer_kv_transfer", 4): "refuses: Dimension out of range",  # it looks for an axis of K and V first
    **{("multi_layer_block_kv_transfer", number): REFUSES for number in (6, 7)},
}


def load(folder: str | None) -> ModuleType:
    """The compiled module in an unpacked wheel; skips where there is none that this Python and torch can load."""
    file = Path(folder, "lmcache", f"c_ops{SUFFIX}") if folder else None
    if file is None or not file.is_file():
        pytest.skip("lmcache==0.4.5 is not installed")
    try:
        spec = importlib.util.spec_from_file_location("c_ops", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        pytest.skip(f"the compiled module of lmcache==0.4.5 does not load here: {error}")
    return module


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    return load(os.environ.get("LMCACHE_UPSTREAM"))


# ------------------------------------------------------------------------------------------------ the calls


def whole_model(function: str, slots: list[int], skip: int = 0) -> Call:
    def call(module, world):
        direction, kv_format = world.of(module)
        arguments = (world.chunks[0], world.pointers(), world.on_device(slots), world.device, NB * BS, direction)
        sizes = {"block_size": BS, "head_size": world.setting.sizes["hs"], "skip_prefix_n_tokens": skip}
        getattr(module, function)(*arguments, kv_format, **(sizes if function == "multi_layer_kv_transfer" else {}))

    return call


def one_layer(slots: list[int], token_major: bool) -> Call:
    def call(module, world):
        direction, kv_format = world.of(module)
        arguments = (world.chunks[0], world.tensors[1 % len(world.tensors)], world.on_device(slots))
        module.single_layer_kv_transfer(*arguments, direction, kv_format, token_major)

    return call


def one_layer_of_two_tensors(slots: list[int], token_major: bool, block_size: int) -> Call:
    def call(module, world):
        direction, _ = world.of(module)
        caches = [world.tensors[place].unflatten(0, (-1, block_size)) for place in (1, NL + 1)]
        module.single_layer_kv_transfer_sgl(world.chunks[0], *caches, world.on_device(slots), direction, token_major)

    return call


def flash(slots: list[int]) -> Call:
    def call(module, world):
        caches = [world.tensors[place].unflatten(0, (NB, BS)) for place in (1, NL + 1)]
        gathers = world.setting.direction == "D2H"
        function = module.load_and_reshape_flash if gathers else module.reshape_and_cache_back_flash
        function(world.chunks[0], *caches, world.on_device(slots), 2)

    return call


def whole_blocks(skip: int = 0) -> Call:
    def call(module, world):
        direction, kv_format = world.of(module)
        setting, desc = world.setting, module.PageBufferShapeDesc()
        desc.kv_size, desc.nl, desc.nb, desc.bs = setting.planes, NL, NB, BS
        desc.nh, desc.hs = setting.sizes["nh"], setting.sizes["hs"]
        desc.element_size, desc.block_stride_elems = setting.dtype.itemsize, 0
        objects = [chunk.data_ptr() for chunk in world.chunks]
        arguments = (world.pointers(), objects, world.on_device(BLOCKS), world.device, direction, desc)
        module.multi_layer_block_kv_transfer(*arguments, CHUNK_BLOCKS * BS, kv_format, skip)

    return call


def shapes(setting: Setting, function: str, token_major: bool = False) -> list[tuple[int, ...]]:
    """Of the chunks that a function takes."""
    tokens = len(SLOTS["plain"])
    if function == "multi_layer_block_kv_transfer":
        return [(setting.planes, NL, CHUNK_BLOCKS * BS, setting.hidden)] * (len(BLOCKS) // CHUNK_BLOCKS)
    if not function.startswith("single_layer"):
        return [(setting.planes, NL, tokens, setting.hidden)]
    if setting.planes == 1:
        return [(tokens, setting.hidden)]
    return [(tokens, 2, setting.hidden) if token_major else (2, tokens, setting.hidden)]


def compared(peer: ModuleType, setting: Setting, function: str, call: Call, what: object, token_major=False, **options):
    """One case, three opinions. options: other modules and backends than ours."""
    __tracebackhide__ = True
    ours, backends = options.get("ours", c_ops), options.get("backends", BACKENDS)
    chunk_shapes = shapes(setting, function, token_major)
    agree(peer, ours, backends, lambda: World(setting, chunk_shapes), call, f"{function} {setting} {what}")


# ------------------------------------------------------------------------------------------------ the opinions


def model_cases(function: str, slots: str):
    """(call, what it is) of a whole-model function."""
    for skip in (0, 3) if function == "multi_layer_kv_transfer" else (0,):
        yield whole_model(function, SLOTS[slots], skip), f"{slots} slots, {skip} skipped"


@on_gpu
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("function", "number"), [(f, n) for f, numbers in WHOLE_MODEL.items() for n in numbers])
def test_whole_model(function, number, direction, slots, peer):
    for dtype, chunks in itertools.product(DTYPES, CHUNKS):
        for call, what in model_cases(function, slots):
            compared(peer, Setting(NAMES[number], direction, dtype, chunks), function, call, what)


@on_gpu
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("number", ONE_LAYER)
def test_one_layer(number, direction, slots, peer):
    for dtype, chunks, token_major in itertools.product(DTYPES, CHUNKS, (False, True)):
        setting = Setting(NAMES[number], direction, dtype, chunks)
        call = one_layer(SLOTS[slots], token_major)
        compared(peer, setting, "single_layer_kv_transfer", call, (slots, token_major), token_major)


@on_gpu
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_layer_of_two_tensors(direction, slots, peer):
    for dtype, chunks, token_major, block_size in itertools.product(DTYPES, CHUNKS, (False, True), (1, BS)):
        setting = Setting(NAMES[4], direction, dtype, chunks)
        call = one_layer_of_two_tensors(SLOTS[slots], token_major, block_size)
        compared(peer, setting, "single_layer_kv_transfer_sgl", call, (slots, token_major), token_major)


@on_gpu
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_flash_pair(direction, slots, peer):
    for dtype, chunks in itertools.product(DTYPES, CHUNKS):
        compared(peer, Setting(NAMES[4], direction, dtype, chunks), "flash", flash(SLOTS[slots]), slots)


@on_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("number", WHOLE_BLOCKS)
def test_whole_blocks(number, direction, peer):
    for dtype, chunks, skip in itertools.product(DTYPES, CHUNKS, (0, 1, 3)):
        setting = Setting(NAMES[number], direction, dtype, chunks)
        compared(peer, setting, "multi_layer_block_kv_transfer", whole_blocks(skip), f"{skip} blocks skipped")


@on_gpu
def test_what_it_does_with_formats_that_it_has_no_kernel_for(peer):
    """Listed in NO_KERNEL. Ours moves all of them: `test_c_ops.py`, `_layers`, `_blocks`."""
    seen = {}
    for function, number in NO_KERNEL:
        seen[function, number] = set()
        for direction in DIRECTIONS:
            setting = Setting(NAMES[number], direction, torch.bfloat16)
            calls = {
                "multi_layer_kv_transfer": whole_model(function, SLOTS["plain"]),
                "single_layer_kv_transfer": one_layer(SLOTS["plain"], False),
                "multi_layer_block_kv_transfer": whole_blocks(),
            }
            seen[function, number].add(
                outcome(peer, lambda s=setting, f=function: World(s, shapes(s, f)), calls[function])
            )
    other = {what: found for what, found in seen.items() if not all(o.startswith(NO_KERNEL[what]) for o in found)}
    assert not other, f"to be listed: {other}"


# ------------------------------------------------------------------------------------------------ without a GPU


def on_host(function: str, number: int, direction: str, call: Call, peer=c_ops, token_major=False, **options):
    setting = Setting(NAMES[number], direction, torch.uint8, "host", "host")
    compared(peer, setting, function, call, "on the host", token_major, backends=("reference", "cpu"), **options)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_calls_are_in_order(direction):
    """Ours in the peer's place: every call is one that the doors take, and moves something."""
    count = 0
    for slots in SLOTS.values():
        for function, numbers in WHOLE_MODEL.items():
            for number in numbers:
                on_host(function, number, direction, whole_model(function, slots))
                count += 1
        for token_major in (False, True):
            for number in ONE_LAYER:
                call = one_layer(slots, token_major)
                on_host("single_layer_kv_transfer", number, direction, call, token_major=token_major)
            call = one_layer_of_two_tensors(slots, token_major, BS)
            on_host("single_layer_kv_transfer_sgl", 4, direction, call, token_major=token_major)
            count += len(ONE_LAYER) + 1
        on_host("flash", 4, direction, flash(slots))
        count += 1
    for number, skip in itertools.product(WHOLE_BLOCKS, (0, 3)):
        on_host("multi_layer_block_kv_transfer", number, direction, whole_blocks(skip))
        count += 1
    assert count == 2 * (9 + 2 * 6 + 1) + 14


def test_every_format_of_the_peer_is_compared_or_listed():
    assert sorted(NAMES) == list(range(9))
    have = [
        *((function, number) for function, numbers in WHOLE_MODEL.items() for number in numbers),
        *(("single_layer_kv_transfer", number) for number in ONE_LAYER),
        *(("multi_layer_block_kv_transfer", number) for number in WHOLE_BLOCKS),
    ]
    functions = ("multi_layer_kv_transfer", "single_layer_kv_transfer", "multi_layer_block_kv_transfer")
    assert len(have) == len(set(have)) and not set(have) & set(NO_KERNEL)
    assert not NOT_CALLED & {*have, *NO_KERNEL}
    assert {*have, *NO_KERNEL, *NOT_CALLED} >= set(itertools.product(functions, range(9)))
    assert {number for function, number in have} == set(range(9))


def wrong(change) -> SimpleNamespace:
    """Our functions, one of them changed, as a peer."""
    module = SimpleNamespace(**{name: getattr(c_ops, name) for name in c_ops.__all__})
    inner = module.multi_layer_kv_transfer
    module.multi_layer_kv_transfer = lambda *arguments, **sizes: change(inner, arguments, sizes)
    return module


def no_prefix(inner, arguments, sizes):
    inner(*arguments, **{**sizes, "skip_prefix_n_tokens": 0})


def another_format(inner, arguments, sizes):
    inner(*arguments[:-1], c_ops.GPUKVFormat.NL_X_NB_TWO_BS_NH_HS, **sizes)


def idle(inner, arguments, sizes):
    pass


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [(no_prefix, "elements differ"), (another_format, "elements differ"), (idle, "nothing moved")],
)
def test_another_opinion_is_seen(change, message, direction):
    call = whole_model("multi_layer_kv_transfer", SLOTS["plain"], skip=3)
    with pytest.raises(AssertionError, match=message):
        on_host("multi_layer_kv_transfer", 1, direction, call, peer=wrong(change))


def test_outcomes():
    def raising(inner, arguments, sizes):
        raise ValueError("Unsupported GPUKVFormat: 8\nand a trace")

    def writing(inner, arguments, sizes):
        inner(*arguments, **sizes)
        raising(inner, arguments, sizes)

    setting = Setting(NAMES[1], "D2H", torch.uint8, "host", "host")
    call = whole_model("multi_layer_kv_transfer", SLOTS["plain"])
    found = [
        outcome(wrong(change), lambda: World(setting, shapes(setting, "multi_layer_kv_transfer")), call)
        for change in (raising, writing, idle)
    ]
    assert found == [f"{REFUSES}: 8", f"{REFUSES}: 8, having written", "returns"]


def test_where_there_is_no_module(tmp_path):
    (tmp_path / "lmcache").mkdir()
    for folder in (None, str(tmp_path)):
        with pytest.raises(pytest.skip.Exception, match=r"^lmcache==0\.4\.5 is not installed$"):
            load(folder)
    (tmp_path / "lmcache" / f"c_ops{SUFFIX}").write_bytes(b"no library")
    with pytest.raises(pytest.skip.Exception, match="does not load here"):
        load(str(tmp_path))
