"""What the benchmark measures by default, how, by clocks whose time is made up, and how a report is shown: in words and as a
picture."""

from __future__ import annotations

import dataclasses
import importlib.machinery
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from lmcache_ref.bench import Options, Report, Row, measure, run
from lmcache_ref.bench.__main__ import main
from lmcache_ref.bench.figures import GROUPS, ON_HOST
from lmcache_ref.bench.measure import CudaClock, HostClock, ceilings, interleaved
from lmcache_ref.bench.peers import load_compiled, load_fallback
from lmcache_ref.bench.plot import check_plot, write_plot
from lmcache_ref.bench.report import as_text, tables
from lmcache_ref.bench.shapes import SHAPES, Shape
from lmcache_ref.errors import ArgumentError

# Before measuring


def test_defaults_follow_the_device(monkeypatch):
    on_cpu = Options().completed()
    assert (on_cpu.tokens, on_cpu.block_sizes, on_cpu.figures, on_cpu.repeats) == ((4096,), (16,), ON_HOST, 5)
    monkeypatch.setattr(run, "get_backend", lambda device: SimpleNamespace(name="chosen"))
    monkeypatch.delenv("LMCACHE_BACKEND", raising=False)
    on_gpu = Options("cuda").completed()
    assert (on_gpu.tokens, on_gpu.figures, on_gpu.repeats) == ((8192,), tuple(GROUPS), 7)
    assert on_gpu.backends == ["chosen"] and on_gpu.orders == on_cpu.orders == ("NHD", "HND", "fused")
    short = Options("cuda").shortened(quick=True, no_matmul=True)
    assert (short.tokens, short.repeats) == ((1024,), 3)
    assert [*short.figures, "matmul"] == [name for name in GROUPS if name != "matmul"] + ["matmul"]


def test_a_peer_that_is_not_there_or_does_not_fit(tmp_path):
    with pytest.raises(ArgumentError, match=r"peer: no non_cuda_equivalents.py at .*; give the folder of an unpacked"):
        load_fallback(tmp_path)
    with pytest.raises(ArgumentError, match=r"peer: no c_ops\*.so at "):
        load_compiled(tmp_path)
    other = tmp_path / "c_ops.cpython-27-x86_64-linux-gnu.so"
    other.write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"c_ops.cpython-27-x86_64-linux-gnu.so is not for Python 3"):
        load_compiled(tmp_path)
    other.rename(tmp_path / f"c_ops{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    with pytest.raises(ArgumentError, match="does not load beside torch"):
        load_compiled(tmp_path)


# Measuring


def test_interleaved_medians_take_turns_and_leave_the_warm_up_out():
    order = []
    seconds = {"a": iter([99.0, 1.0, 2.0, 6.0]), "b": iter([0.0, 5.0, 4.0, 3.0])}

    def once(run):
        name = run()
        order.append(name)
        return next(seconds[name])

    assert interleaved({"a": lambda: "a", "b": lambda: "b"}, once, 3) == {"a": 2.0, "b": 4.0}
    assert order == ["a", "b"] * 4


def test_a_run_that_raises_is_left_out():
    calls = []

    def bad():
        calls.append("bad")
        raise ValueError("bad")

    taken = interleaved({"bad": bad, "good": lambda: None}, HostClock(torch.device("cpu")).whole, 2)
    assert isinstance(taken["bad"], ValueError) and taken["good"] >= 0
    assert calls == ["bad"]


def test_ceilings_are_copies_of_the_pool_and_one_that_fails_is_not_hidden(monkeypatch):
    clock = HostClock(torch.device("cpu"))
    host = torch.ones(1 << 16, dtype=torch.uint8)
    assert all(rate > 0 for rate in ceilings(clock, host, 1).values())
    assert int(host.sum()) == 1 << 15, "the half that was copied to holds the device's zeros"
    monkeypatch.setattr(measure, "interleaved", lambda *_: {"d2h": RuntimeError("no copy")})
    with pytest.raises(RuntimeError, match="no copy"):
        ceilings(clock, host, 1)


class FakeCuda:
    """What `CudaClock` asks of torch.cuda, written down; time and memory are set by the test."""

    def __init__(self, monkeypatch):
        self.log, self.milliseconds, self.bytes, self.peak = [], iter((1.0, 3.5)), 100, 0
        fakes = {
            "synchronize": lambda: self.log.append("synchronize"),
            "_sleep": lambda cycles: self.log.append("sleep"),
            "empty_cache": lambda: self.log.append("empty"),
            "memory_allocated": lambda: self.bytes,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.bytes),
            "max_memory_allocated": lambda: self.peak,
            "current_stream": lambda: SimpleNamespace(wait_event=lambda event: self.log.append("wait")),
            "Event": self.event,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def event(self, enable_timing):
        event = SimpleNamespace(at=None)
        event.record = lambda: (self.log.append("record"), setattr(event, "at", next(self.milliseconds)))
        event.elapsed_time = lambda later: later.at - event.at
        return event

    def allocate(self, kept, freed):
        self.peak = max(self.peak, self.bytes + kept + freed)
        self.bytes += kept


def test_a_gpu_is_timed_by_events_behind_a_busy_stream_and_its_memory_by_what_is_added(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    clock = CudaClock(torch.device("cuda"))
    assert clock.on_device(lambda: cuda.log.append("run")) == pytest.approx(2.5e-3)
    assert cuda.log == ["synchronize", "sleep", "record", "run", "record", "synchronize"]
    assert clock.extra_bytes(lambda: cuda.allocate(kept=7, freed=20)) == (27, 7)
    clock.wait(None)
    clock.release()
    assert cuda.log[-3:] == ["wait", "synchronize", "empty"]


# Shown


def hand_made() -> Report:
    facts = {"device": "Card", "torch": "2", "python": "3", "backends": ["cuda"], "requested_backend": "auto"}
    facts |= {
        "variables": {"LMCACHE_X": "1"},
        "slots_on": "cpu",
        "chunk_tokens": 256,
        "repeats": 7,
        "peer": "lmcache 1",
    }
    rows = [
        Row("8b", "NHD", 16, 8192, "store", "cuda", "GB/s", 54.32, 0.1, 98.25, 1.05),
        Row("8b", "NHD", 16, 8192, "load", "cuda", "GB/s", error="ValueError: what: it is"),
        Row("8b", "NHD", 16, 8192, "store", "peer", "GB/s", 51.7, 0.1, 93.5),
        Row("8b", "NHD", 16, 8192, "one chunk store", "cuda", "us over copy", 33.4, 0.1, None, 1.5),
        Row("8b", "NHD", 16, 8192, "one chunk load", "cuda", "us over copy", 30.2, 0.1),
        Row("8b", "NHD", 16, 8192, "staging", "cuda", "MiB", 256.0),
    ]
    return Report(facts, {"d2h": 55.25}, rows)


def test_a_report_in_words():
    report = hand_made()
    shown = tables(report)
    assert [table.title for table in shown] == [
        "rates, block size 16, tokens 8192",
        "layer by layer; beside matmuls; memory, block size 16, tokens 8192",
        "host time, and one chunk, block size 16, tokens 8192",
    ]
    assert shown[0].columns == ["shape", "order", "runner", "store", "load"]
    assert shown[0].rows == [
        ["8b", "NHD", "cuda", "54.3 98.2% (1.05)", "ValueError"],
        ["8b", "NHD", "peer", "51.7 93.5%", "-"],
    ]
    assert shown[1].columns[3:] == ["staging MiB"] and shown[1].rows == [["8b", "NHD", "cuda", "256.0"]]
    assert shown[2].rows == [["8b", "NHD", "cuda", "33 (1.50) / 30"]]
    text = as_text(report)
    for part in ("Card", "peer lmcache 1", "LMCACHE_X=1; slots on cpu", "ceilings, GB/s: d2h 55.2"):
        assert part in text
    assert text.endswith("8b NHD block 16 tokens 8192, cuda, load: ValueError: what: it is")
    more = dataclasses.replace(report, rows=[*report.rows, dataclasses.replace(report.rows[0], block_size=64)])
    assert tables(more)[0].columns[:4] == ["shape", "order", "block size", "runner"]


def test_a_picture_has_a_bar_for_each_rate(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    write_plot(hand_made(), tmp_path / "a.svg")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    words = (tmp_path / "a.svg").read_text()  # each text is a comment beside its outlines
    for part in ("98.2 %   54.3", "93.5 %   51.7", "store to host memory", "8b NHD", "peer, lmcache 1", "ceiling"):
        assert f"<!-- {part}" in words
    assert "block size 16; tokens 8192" in words and "tokens a block" not in words
    assert "load from host memory" not in words, "no rate, no panel"
    write_plot(hand_made(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(SHAPES, "tiny", Shape("tiny", 1, 1, 1, 8, torch.uint8))
    assert (
        main(
            [
                "--shape",
                "tiny",
                "--tokens",
                "20",
                "--repeats",
                "1",
                "--backend",
                "reference",
                "--figure",
                "gather",
                "--plot",
                str(tmp_path / "c.svg"),
            ]
        )
        == 0
    )
    assert "backend reference" in (tmp_path / "c.svg").read_text()
    with pytest.raises(ArgumentError, match="no figure with a ceiling was measured"):
        write_plot(dataclasses.replace(hand_made(), rows=hand_made().rows[3:]), tmp_path / "b.png")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    with pytest.raises(ArgumentError, match=r"a.pdf: allowed: a file that ends in .svg or .png"):
        check_plot("a.pdf")
    with pytest.raises(ArgumentError, match=r"no/a.svg: there is no such folder"):
        check_plot(tmp_path / "no" / "a.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--plot", str(tmp_path / "a.svg"), "--backend", "nope"]) == 2
    shown = capsys.readouterr().err
    assert shown == "ArgumentError: --plot needs matplotlib; install the extra: pip install 'lmcache-ref[notebooks]'\n"
