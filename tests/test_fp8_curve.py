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
    losses = fp8_curve.main(["--steps", "40", "--json", "--curves", *curves])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said == {name: fp8_curve.last(found) for name, found in losses.items()}
    assert list(said) == curves
    assert said["fp32"] < losses["fp32"][0] - 1.0
    for name, loss in said.items():
        assert loss == pytest.approx(said["fp32"], rel=0.01), name
        assert (losses[name] != losses["fp32"]) == (name != "fp32"), f"{name} rounded nothing"


def test_the_committed_curves_are_within_a_hundredth():
    found = json.loads((ROOT / "benchmarks" / "results" / "fp8_curve.json").read_text())
    assert found["steps"] == 300
    fp32 = found["losses"]["fp32"]
    assert sum(fp32[-50:]) / 50 < fp32[0] - 1.0
    for name, losses in found["losses"].items():
        assert abs(sum(losses[-50:]) / sum(fp32[-50:]) - 1) < 0.01, name
