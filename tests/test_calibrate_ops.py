"""What is made of the seconds that ops were measured to take; that they are measured at all is in ``test_timeline``."""

from dataclasses import replace

import pytest
import torch

from moec import calibrate_ops, cost
from moec.calibrate_ops import _Sum

CLUSTER = replace(cost.cluster("cpu2-1gbit"), ops={})


def test_overheads_and_ratios(monkeypatch):
    """The overhead is what few tokens take; what many take beyond it is held against their roofline, 1 to ``MOST``."""
    few = {"slow": _Sum(2, 20e-6, 1e-6), "fast": _Sum(1, 1e-6, 0.0), "tiny": _Sum(1, 1e-6, 0.0), "odd": _Sum(1, 1e-6)}
    many = {"slow": _Sum(2, 620e-6, 201e-6), "fast": _Sum(1, 2e-6, 1e-3), "tiny": _Sum(1, 9e-6, 1e-9),
            "odd": _Sum(1, 1.0, 1e-5)}  # fmt: skip
    monkeypatch.setattr(calibrate_ops, "_measured", lambda _, __, B, S: few if (B, S) == calibrate_ops.FEW else many)
    found = calibrate_ops.ops(CLUSTER, "cpu", lambda x: x)
    assert found["slow"] == pytest.approx((10e-6, 3.0))
    assert found["fast"] == pytest.approx((1e-6, 1.0)), "not below 1"
    assert found["tiny"] == pytest.approx((1e-6, 1.0)), "too little work to mean anything"
    assert found["odd"] == pytest.approx((1e-6, calibrate_ops.MOST))
    few["aten.mm"], many["aten.mm"] = _Sum(1, 50e-6, 40e-6), _Sum(2, 2 * CLUSTER.op_overhead_s + 300e-6, 200e-6)
    found = calibrate_ops.ops(CLUSTER, "cpu", lambda x: x)
    assert found["aten.mm"] == pytest.approx((CLUSTER.op_overhead_s, 1.5)), "few tokens read all weights too"
    assert found["aten.addmm"] == found["aten.mm"] and "moec.experts_rows" not in found
    ranks = calibrate_ops.ops(CLUSTER, "cpu", lambda x: 2 * x)
    assert ranks["slow"] == pytest.approx((20e-6, 6.0)), "of numbers over the ranks"


def test_a_pass_is_left_out_and_the_others_median_counts(monkeypatch):
    """Of every op but what takes nothing, all nodes together."""
    passes = iter([100.0, 1.0, 2.0, 3.0, 4.0, 90.0])
    module, operands = calibrate_ops._traced("cpu", *calibrate_ops.FEW)
    one_pass = calibrate_ops._one_pass

    def timed(module, operands, device):
        return dict.fromkeys(one_pass(module, operands, device), next(passes))

    monkeypatch.setattr(calibrate_ops, "_traced", lambda *_: (module, operands))
    monkeypatch.setattr(calibrate_ops, "_one_pass", timed)
    found = calibrate_ops._measured(CLUSTER, "cpu", *calibrate_ops.FEW)
    sorts = module.graph.find_nodes(op="call_function", target=torch.ops.moec.sort_chunks.default)
    assert (found["moec.sort_chunks"].calls, found["moec.sort_chunks"].took) == (len(sorts), 3.0 * len(sorts))
    assert found["moec.sort_chunks"].expected > 0
    assert set(calibrate_ops.PRODUCTS) <= set(found) and not {"getitem", "aten.view"} & set(found)
