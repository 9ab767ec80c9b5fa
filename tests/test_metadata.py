"""Engine names, layer groups and metadata: shapes and dtypes per group, where groups come from, every error."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
import torch

from lmcache_ref.errors import ArgumentError, LayoutError
from lmcache_ref.metadata import EngineType, LayerGroup, LMCacheMetadata

FULL = LayerGroup((0, 2), 2, 4, 8, torch.bfloat16, 16)
NARROW = LayerGroup((1, 3), 2, 1, 8, torch.float8_e4m3fn, 16)


def metadata(**changes: object) -> LMCacheMetadata:
    arguments: dict = dict(
        model_name="model",
        world_size=2,
        local_world_size=1,
        worker_id=1,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(4, 2, 64, 3, 5),
    )
    return LMCacheMetadata(**{**arguments, **changes})


def described(*groups: LayerGroup) -> SimpleNamespace:
    """A manager that describes the groups in the words of real ones."""
    return SimpleNamespace(
        kv_layer_groups=[
            SimpleNamespace(
                layer_indices=list(group.layer_indices),
                dtype=group.dtype,
                shape_desc=SimpleNamespace(
                    kv_size=group.kv,
                    nl=len(group.layer_indices),
                    nb=100,
                    bs=group.BS,
                    nh=group.NH,
                    hs=group.HS,
                    element_size=group.dtype.itemsize,
                ),
            )
            for group in groups
        ]
    )


# Engines


def test_engine_values() -> None:
    values = {engine.name: engine.value for engine in EngineType}
    assert values == {"VLLM": "vllm", "SGLANG": "sglang", "TRTLLM": "trtllm", "MOCK": "mock"}


@pytest.mark.parametrize("engine", list(EngineType))
def test_engine_from_anything(engine: EngineType) -> None:
    for value in (engine, engine.value, engine.name, engine.name.title()):
        assert EngineType(value) is engine
    assert engine == engine.value


@pytest.mark.parametrize("value", ["llama", "", None, 0])
def test_unknown_engine(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"^engine: .* unknown; known: vllm, sglang, trtllm, mock$"):
        EngineType(value)


# One group


def test_arguments_in_order() -> None:
    manager = described(FULL)
    found = LMCacheMetadata(
        "name", 16, 8, 9, 1, torch.uint8, (3, 1, 128, 1, 576), True, "worker", "served", 128, manager, "id", {"port": 1}
    )
    assert (found.model_name, found.world_size, found.local_world_size) == ("name", 16, 8)
    assert (found.worker_id, found.local_worker_id, found.kv_dtype) == (9, 1, torch.uint8)
    assert (found.kv_shape, found.use_mla, found.role) == ((3, 1, 128, 1, 576), True, "worker")
    assert (found.served_model_name, found.chunk_size) == ("served", 128)
    assert found.kv_layer_groups_manager is manager
    assert (found.engine_id, found.kv_connector_extra_config) == ("id", {"port": 1})


def test_defaults() -> None:
    found = metadata()
    assert (found.use_mla, found.role, found.served_model_name, found.chunk_size) == (False, None, None, 256)
    assert (found.kv_layer_groups_manager, found.engine_id, found.kv_connector_extra_config) == (None, None, None)
    assert found.layer_groups == ()


def test_one_group_from_kv_shape() -> None:
    found = metadata(chunk_size=64)
    assert found.get_shapes() == [torch.Size([2, 4, 64, 15])]
    assert found.get_shapes(7) == [torch.Size([2, 4, 7, 15])]
    assert found.get_shapes(0) == [torch.Size([2, 4, 0, 15])]
    assert isinstance(found.get_shapes()[0], torch.Size)
    assert found.get_dtypes() == [torch.float16] and found.get_num_groups() == 1


def test_default_tokens_are_the_chunk_size() -> None:
    assert metadata(chunk_size=32).get_shapes() == [torch.Size([2, 4, 32, 15])]
    assert metadata().get_shapes() == [torch.Size([2, 4, 256, 15])]


def test_mla() -> None:
    found = metadata(kv_shape=(4, 1, 64, 1, 576), use_mla=True)
    assert found.get_shapes(3) == [torch.Size([1, 4, 3, 576])]


def test_kv_shape_may_be_a_list_or_a_size() -> None:
    for kv_shape in ([4, 2, 64, 3, 5], torch.Size([4, 2, 64, 3, 5])):
        found = metadata(kv_shape=kv_shape).kv_shape
        assert found == (4, 2, 64, 3, 5) and type(found) is tuple


def test_first_rank() -> None:
    assert metadata(worker_id=0).is_first_rank() and not metadata(worker_id=1).is_first_rank()


BAD_ARGUMENTS = [
    ("model_name", dict(model_name=None)),
    ("world_size", dict(world_size=0)),
    ("world_size", dict(world_size="2")),
    ("local_world_size", dict(local_world_size=0)),
    ("worker_id", dict(worker_id=-1)),
    ("worker_id", dict(worker_id=True)),
    ("local_worker_id", dict(local_worker_id=-1)),
    ("kv_dtype", dict(kv_dtype="float16")),
    ("kv_dtype", dict(kv_dtype=None)),
    ("kv_shape", dict(kv_shape=None)),
    ("kv_shape", dict(kv_shape=(4, 2, 64, 15))),
    ("kv_shape", dict(kv_shape=(4, 2, 64, 0, 5))),
    ("kv_shape", dict(kv_shape=(4, 2, 64, 3, 5.0))),
    ("kv_shape[1]", dict(kv_shape=(4, 3, 64, 3, 5))),
    ("use_mla", dict(use_mla=None)),
    ("use_mla", dict(use_mla=True)),
    ("chunk_size", dict(chunk_size=0)),
    ("chunk_size", dict(chunk_size=None)),
]


@pytest.mark.parametrize(("argument", "changes"), BAD_ARGUMENTS)
def test_bad_arguments(argument: str, changes: dict) -> None:
    with pytest.raises(ArgumentError) as caught:
        metadata(**changes)
    assert str(caught.value).startswith(f"{argument}: ")


@pytest.mark.parametrize("num_tokens", [-1, 2.0, "3"])
def test_bad_num_tokens(num_tokens: object) -> None:
    with pytest.raises(ArgumentError, match=r"^num_tokens: "):
        metadata().get_shapes(num_tokens)


# Layer groups


def test_layer_group() -> None:
    group = LayerGroup([3, 1], 2, 4, 8, torch.bfloat16)
    assert group.layer_indices == (3, 1) and group.BS is None
    assert group.shape(5) == torch.Size([2, 2, 5, 32])
    with pytest.raises(FrozenInstanceError):
        group.kv = 1


BAD_GROUPS = [
    ("layer_indices", dict(layer_indices=())),
    ("layer_indices", dict(layer_indices=(1, 1))),
    ("layer_indices", dict(layer_indices=(0, -1))),
    ("layer_indices", dict(layer_indices=("0",))),
    ("kv", dict(kv=0)),
    ("kv", dict(kv=3)),
    ("kv", dict(kv=1.0)),
    ("NH", dict(NH=0)),
    ("HS", dict(HS=-8)),
    ("BS", dict(BS=0)),
    ("dtype", dict(dtype="bfloat16")),
]


@pytest.mark.parametrize(("argument", "changes"), BAD_GROUPS)
def test_bad_groups(argument: str, changes: dict) -> None:
    arguments: dict = dict(layer_indices=(0, 1), kv=2, NH=4, HS=8, dtype=torch.bfloat16, BS=16)
    LayerGroup(**arguments)
    with pytest.raises(ArgumentError, match=rf"^{argument}: "):
        LayerGroup(**{**arguments, **changes})


def check_two_groups(found: LMCacheMetadata) -> None:
    assert found.layer_groups == (FULL, NARROW) and found.get_num_groups() == 2
    assert found.get_shapes(5) == [torch.Size([2, 2, 5, 32]), torch.Size([2, 2, 5, 8])]
    assert found.get_shapes() == [torch.Size([2, 2, 256, 32]), torch.Size([2, 2, 256, 8])]
    assert found.get_dtypes() == [torch.bfloat16, torch.float8_e4m3fn]


def test_groups_of_a_manager() -> None:
    check_two_groups(metadata(kv_layer_groups_manager=described(FULL, NARROW)))


def test_groups_of_a_manager_that_learns_them_later() -> None:
    manager = SimpleNamespace(kv_layer_groups=[])
    found = metadata(kv_layer_groups_manager=manager)
    assert found.get_shapes(5) == [torch.Size([2, 4, 5, 15])]
    manager.kv_layer_groups = described(FULL, NARROW).kv_layer_groups
    check_two_groups(found)


def test_groups_of_a_manager_that_comes_later() -> None:
    found = metadata()
    found.kv_layer_groups_manager = described(FULL, NARROW)
    check_two_groups(found)


def test_set_layer_groups() -> None:
    found = metadata()
    found.set_layer_groups([FULL, NARROW])
    check_two_groups(found)
    found.set_layer_groups((FULL, NARROW))
    check_two_groups(found)


def test_mixed_kv_and_widths() -> None:
    found = metadata(kv_shape=(3, 1, 64, 1, 576), use_mla=True)
    latent = LayerGroup((0, 2, 4), 1, 1, 576, torch.bfloat16)
    indexer = LayerGroup((1, 3, 5), 1, 1, 132, torch.uint8)
    found.set_layer_groups([latent, indexer])
    assert found.get_shapes(5) == [torch.Size([1, 3, 5, 576]), torch.Size([1, 3, 5, 132])]
    assert found.get_dtypes() == [torch.bfloat16, torch.uint8]


def without_bs(group: LayerGroup) -> LayerGroup:
    return LayerGroup(group.layer_indices, group.kv, group.NH, group.HS, group.dtype)


def test_unknown_block_size_contradicts_nothing() -> None:
    found = metadata(kv_layer_groups_manager=described(FULL, NARROW))
    found.set_layer_groups([without_bs(FULL), without_bs(NARROW)])
    check_two_groups(found)
    blind = metadata()
    blind.set_layer_groups([without_bs(FULL)])
    blind.set_layer_groups([FULL])
    assert blind.get_shapes(1) == [FULL.shape(1)]


OTHER_GROUPS = {
    "order": [NARROW, FULL],
    "fewer": [FULL],
    "more": [FULL, NARROW, LayerGroup((4,), 2, 1, 8, torch.int8, 16)],
    "layers": [LayerGroup((0, 4), 2, 4, 8, torch.bfloat16, 16), NARROW],
    "kv": [LayerGroup((0, 2), 1, 4, 8, torch.bfloat16, 16), NARROW],
    "heads": [LayerGroup((0, 2), 2, 8, 8, torch.bfloat16, 16), NARROW],
    "head size": [LayerGroup((0, 2), 2, 4, 16, torch.bfloat16, 16), NARROW],
    "same hidden size": [LayerGroup((0, 2), 2, 8, 4, torch.bfloat16, 16), NARROW],
    "dtype": [LayerGroup((0, 2), 2, 4, 8, torch.float16, 16), NARROW],
    "block size": [LayerGroup((0, 2), 2, 4, 8, torch.bfloat16, 32), NARROW],
}


@pytest.mark.parametrize("name", OTHER_GROUPS)
def test_other_groups_later(name: str) -> None:
    others = tuple(OTHER_GROUPS[name])
    discovered, given, replaced = metadata(), metadata(kv_layer_groups_manager=described(FULL, NARROW)), metadata()
    discovered.set_layer_groups([FULL, NARROW])
    replaced.set_layer_groups([FULL, NARROW])
    replaced.kv_layer_groups_manager = described(*others)
    contradictions = [
        lambda: discovered.set_layer_groups(others),
        lambda: given.set_layer_groups(others),
        replaced.get_shapes,
    ]
    for contradict in contradictions:
        with pytest.raises(LayoutError) as caught:
            contradict()
        assert str((FULL, NARROW)) in str(caught.value) and str(others) in str(caught.value)
    check_two_groups(discovered)
    check_two_groups(given)


def test_a_layer_in_two_groups() -> None:
    found = metadata()
    with pytest.raises(LayoutError, match=r"a layer is in two groups"):
        found.set_layer_groups([FULL, LayerGroup((1, 2), 2, 1, 8, torch.bfloat16)])
    assert found.layer_groups == ()


@pytest.mark.parametrize("groups", [None, [], FULL, [FULL, None]])
def test_what_is_no_list_of_groups(groups: object) -> None:
    with pytest.raises(ArgumentError, match=r"^groups: "):
        metadata().set_layer_groups(groups)


@pytest.mark.parametrize(("name", "value"), [("nl", 3), ("element_size", 1)])
def test_manager_that_contradicts_itself(name: str, value: int) -> None:
    manager = described(FULL)
    setattr(manager.kv_layer_groups[0].shape_desc, name, value)
    with pytest.raises(LayoutError, match=r"\(nl, element_size\) = .* make it \(2, 2\)"):
        metadata(kv_layer_groups_manager=manager).get_shapes()


@pytest.mark.parametrize("missing", ["layer_indices", "shape_desc", "dtype"])
def test_manager_that_cannot_be_read(missing: str) -> None:
    manager = described(FULL)
    delattr(manager.kv_layer_groups[0], missing)
    for unreadable in (manager, SimpleNamespace()):
        with pytest.raises(ArgumentError, match=r"^kv_layer_groups_manager: "):
            metadata(kv_layer_groups_manager=unreadable).get_num_groups()
