"""Forty steps of ``benchmarks/fp8_curve.py``: every precision learns as much as fp32 (by day, FP8 blockwise)."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")

import fp8_curve  # noqa: E402


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "curves", [["fp32", "blockwise"], pytest.param(list(fp8_curve.CURVES), marks=pytest.mark.nightly)], ids=len
)
def test_forty_steps(curves, capsys):
    losses = fp8_curve.main(["--steps", "40", "--seeds", "1", "--json", "--curves", *curves])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {name: fp8_curve.last(found["0"]) for name, found in losses.items()}
    assert list(said) == curves
    assert said["fp32"] < losses["fp32"]["0"][0] - 1.0
    for name, loss in said.items():
        assert loss == pytest.approx(said["fp32"], rel=0.01), name
        assert (losses[name] != losses["fp32"]) == (name != "fp32"), f"{name} rounded nothing"


def test_the_committed_curves_are_within_a_hundredth():
    found = json.loads((ROOT / "benchmarks" / "results" / "fp8_curve.json").read_text())
    assert found["steps"] == 300 and found["losses"].keys() == fp8_curve.CURVES.keys()
    fp32 = found["losses"]["fp32"]
    assert list(fp32) == [str(seed) for seed in range(6)]
    assert all(sum(x[-50:]) / 50 < x[0] - 1.0 for x in fp32.values())
    for name, losses in found["losses"].items():
        assert losses.keys() == fp32.keys(), "the same seeds"
        assert abs(fp8_curve.mean_last(losses) / fp8_curve.mean_last(fp32) - 1) < 0.01, name


def fake(monkeypatch, tmp_path):
    """Two steps a curve that nobody trains: the curves that are asked for are listed."""
    asked = []

    def curve(precision, steps, text, seed):
        name = next(n for n, p in fp8_curve.CURVES.items() if p is precision)
        asked.append((seed, name))
        return [9.0, 2.0 + seed + (0.02 * (seed + 1) if name == "bf16" else 0.0)]

    monkeypatch.setattr(fp8_curve, "curve", curve)
    monkeypatch.setattr(fp8_curve, "RESULTS", tmp_path)
    monkeypatch.setattr(fp8_curve, "standard_library", lambda: range(9))
    monkeypatch.setattr(fp8_curve, "plot", lambda losses: None)
    return asked


def test_what_was_stopped_goes_on(monkeypatch, tmp_path, capsys):
    asked = fake(monkeypatch, tmp_path)
    call = ["--write", "--steps", "2", "--curves", "fp32", "bf16", "--json", "--seeds"]
    fp8_curve.main([*call, "1"])
    fp8_curve.main([*call, "2"])
    assert asked == [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16")], "each once, all curves of a seed together"
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == pytest.approx({"fp32": 2.5, "bf16": 2.53})
    assert "+1.17% of fp32's (standard error 0.17%)" in out  # of 0.02 / 2 and 0.04 / 3
    kept = (tmp_path / "fp8_curve.json").read_text()
    fp8_curve.main([*call, "2"])
    assert len(asked) == 4 and (tmp_path / "fp8_curve.json").read_text() == kept
    fp8_curve.main([*call, "2", "--anew"])
    assert len(asked) == 8
    fp8_curve.main(["--write", "--steps", "3", "--curves", "fp32", "--seeds", "1"])
    assert len(asked) == 9, "curves of another length are none of these"


def test_a_seed_that_is_asked_for_is_what_is_said(monkeypatch, tmp_path, capsys):
    """More seeds in the file than are asked for do not count."""
    fake(monkeypatch, tmp_path)
    call = ["--write", "--steps", "2", "--curves", "fp32", "--json", "--seeds"]
    fp8_curve.main([*call, "2"])
    fp8_curve.main([*call, "1"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"fp32": 2.0}
