"""The device and the local rank of a vLLM worker, with stand-ins for vLLM's platform and torch's device modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lmcache_ref.errors import ArgumentError, BackendError
from lmcache_ref.integration.vllm import utils


def device_module(count: int, available: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_available=lambda: available, device_count=lambda: count)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """vLLM cannot be imported, whatever is installed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)


@pytest.fixture
def torch_has(monkeypatch):
    """Let torch have these accelerators and no others."""

    def set_devices(**modules):
        for name in ("cuda", "xpu", "hpu"):
            monkeypatch.setattr(torch, name, modules.get(name, device_module(0, available=False)), raising=False)

    return set_devices


@pytest.fixture
def vllm_says(monkeypatch):
    """vLLM is installed, and its platform is of this device type."""

    def set_type(device_type):
        platforms = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(device_type=device_type)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)

    return set_type


def config(rank: int, world_size: int) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, world_size=world_size))


# The device module


def test_without_vllm_the_first_accelerator_that_is_available(torch_has):
    torch_has(xpu=device_module(2), hpu=device_module(2))
    assert utils.get_vllm_torch_dev() == (torch.xpu, "xpu")
    torch_has(cuda=device_module(0, available=False), hpu=device_module(1))
    assert utils.get_vllm_torch_dev() == (torch.hpu, "hpu")
    torch_has(cuda=device_module(1), xpu=device_module(1))
    assert utils.get_vllm_torch_dev() == (torch.cuda, "cuda")


def test_a_torch_without_a_module_for_an_accelerator(torch_has, monkeypatch):
    torch_has()
    monkeypatch.delattr(torch, "hpu")
    assert utils.get_vllm_torch_dev() == (torch.cpu, "cpu")


def test_vllms_platform_decides(torch_has, vllm_says):
    torch_has(cuda=device_module(8))
    vllm_says("cpu")
    assert utils.get_vllm_torch_dev() == (torch.cpu, "cpu")
    vllm_says("")  # vLLM found no device
    assert utils.get_vllm_torch_dev() == (torch.cuda, "cuda")


def test_a_device_that_torch_has_no_module_for(vllm_says):
    vllm_says("tpu_of_tomorrow")
    with pytest.raises(BackendError, match=r"'tpu_of_tomorrow', but this torch has no torch.tpu_of_tomorrow"):
        utils.get_vllm_torch_dev()


# The local rank

RANKS = [
    # devices a node, global rank, world size, answer
    (8, 9, 16, (1, 8)),
    (8, 15, 16, (7, 8)),
    (8, 7, 16, (7, 8)),
    (8, 3, 4, (3, 4)),
    (8, 0, 1, (0, 1)),
    (1, 3, 4, (0, 1)),
    (0, 3, 4, (0, 1)),
    (4, 4, 8, (0, 4)),
    (3, 5, 7, (2, 3)),
]


@pytest.mark.parametrize(("devices", "rank", "world_size", "answer"), RANKS)
@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_ranks_fill_one_node_after_the_other(torch_has, kind, devices, rank, world_size, answer):
    torch_has(**{kind: device_module(devices)})
    assert utils.calculate_local_rank_and_world_size(config(rank, world_size)) == answer


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (9, 16), (15, 16)])
def test_on_a_cpu_all_workers_share_the_node(torch_has, rank, world_size):
    torch_has()
    assert utils.calculate_local_rank_and_world_size(config(rank, world_size)) == (rank, world_size)


def test_a_cpu_build_of_vllm_beside_idle_gpus(torch_has, vllm_says):
    torch_has(cuda=device_module(2))
    vllm_says("cpu")
    assert utils.calculate_local_rank_and_world_size(config(5, 8)) == (5, 8)


@pytest.mark.parametrize(("rank", "world_size"), [(4, 4), (-1, 4), (0, 0)])
def test_a_rank_outside_the_world(rank, world_size):
    with pytest.raises(ArgumentError, match=f"parallel_config.rank: {rank}; world_size is {world_size}"):
        utils.calculate_local_rank_and_world_size(config(rank, world_size))
