"""What is measured once a machine: kept, read again, overridden, shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from lmcache_fast.cuda import calibration
from lmcache_fast.cuda.backend import CudaBackend
from lmcache_fast.cuda.calibration import SIZES, Calibration, calibrate, largest_winner
from lmcache_fast.environment import CACHE_FOLDER, STAGING_BYTES, ZERO_COPY_BYTES, staging_bytes, zero_copy_bytes
from lmcache_ref.errors import BackendError

FOUND = Calibration(
    {"gather": 65536, "scatter": 0}, {"gather": {"65536": [3.0, 2.0]}, "scatter": {"65536": [2.0, 3.0]}}
)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """An engine whose measurement is FOUND, kept under tmp_path; the list of measurements made."""
    made: list[object] = []
    monkeypatch.setattr(calibration, "_file", lambda index: tmp_path / "folder" / f"calibration-{index}.json")
    monkeypatch.setattr(calibration, "_measure", lambda engine: made.append(engine) or FOUND)
    lanes = {name: SimpleNamespace(zero_copy_bytes=None, release=lambda: None) for name in calibration.OPERATIONS}
    return SimpleNamespace(device=SimpleNamespace(index=0), lanes=lanes), made, tmp_path / "folder"


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({}, 0),
        ({1: (2.0, 3.0)}, 0),
        ({1: (2.0, 2.0), 2: (3.0, 2.0), 4: (3.0, 4.0)}, 2),
        ({4: (3.0, 1.0), 2: (1.0, 2.0), 1: (2.0, 1.0)}, 1),  # what is won after a loss does not count
        ({4: (3.0, 1.0), 2: (1.0, 1.05), 1: (2.0, 1.0)}, 4),  # unless the loss may be chance
        ({2: (1.0, 1.05), 1: (2.0, 1.0)}, 1),
    ],
)
def test_the_largest_size_up_to_which_zero_copy_wins(times, winner):
    assert largest_winner(times) == winner


def test_it_is_measured_once_and_kept(measured):
    engine, made, folder = measured
    assert calibrate(engine) == FOUND and calibrate(engine) == FOUND
    assert len(made) == 1
    assert {name: lane.zero_copy_bytes for name, lane in engine.lanes.items()} == {"gather": 65536, "scatter": 0}
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["zero_copy_bytes"] == FOUND.zero_copy_bytes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"zero_copy_bytes": 3}'])
def test_a_broken_file_is_measured_again(measured, text):
    engine, made, folder = measured
    folder.mkdir()
    (folder / "calibration-0.json").write_text(text)
    assert calibrate(engine) == FOUND
    assert len(made) == 1 and calibrate(engine) == FOUND and len(made) == 1


def test_a_folder_that_cannot_be_made_is_said(measured, caplog):
    engine, _made, folder = measured
    folder.write_text("a file")
    assert calibrate(engine) == FOUND
    assert "will be measured again" in caplog.text


def test_the_environment_overrides_it(monkeypatch):
    monkeypatch.setenv(ZERO_COPY_BYTES, "4096")
    assert zero_copy_bytes() == 4096
    monkeypatch.delenv(ZERO_COPY_BYTES)
    assert zero_copy_bytes() is None


def test_staging_bytes_must_be_a_number(monkeypatch):
    monkeypatch.setenv(STAGING_BYTES, "128M")
    with pytest.raises(BackendError, match="LMCACHE_FAST_STAGING_BYTES='128M'; allowed: a number of bytes"):
        staging_bytes()


def test_facts_for_the_doctor(monkeypatch):
    backend = CudaBackend()
    backend._engines, backend._calibrations = {0: None, 1: None}, {0: FOUND}
    monkeypatch.setenv(ZERO_COPY_BYTES, "4096")
    facts = backend.facts()
    assert facts["staging"] == "128 MiB a direction (LMCACHE_FAST_STAGING_BYTES)"
    said = "gather up to 64 KiB, scatter up to 0 KiB, measured (LMCACHE_FAST_ZERO_COPY_BYTES sets it)"
    assert facts["zero copy on cuda:0"] == said
    assert facts["zero copy on cuda:1"] == "up to 4096 bytes (LMCACHE_FAST_ZERO_COPY_BYTES sets it)"


@pytest.mark.gpu
def test_a_real_device(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.delenv(ZERO_COPY_BYTES, raising=False)
    backend = CudaBackend()
    engine = backend._engine("the KV cache", torch.device("cuda"))
    found = backend._calibrations[engine.device.index]
    assert all(limit in (0, *SIZES) for limit in found.zero_copy_bytes.values())
    assert all(us > 0 for sizes in found.microseconds.values() for ways in sizes.values() for us in ways)
    assert calibrate(engine) == found
    assert engine.lanes["gather"].zero_copy_bytes == found.zero_copy_bytes["gather"]
