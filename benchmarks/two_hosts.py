"""How much communication is hidden between two hosts, and how well the cost model knows it.

    python benchmarks/two_hosts.py [--cases ep fsdp fsdp_kept grad_reduction] [--rounds 5] [--rate 1gbit] [--json]

Two network namespaces joined by a 1 Gbit/s cable (``lab.py``), one rank of one thread in each, float32, gloo.  Every
case runs its contenders in the same processes, taking turns; a figure is the median over rounds of the slower rank's
forward and backward, and of three repeats the median.

* ``ep``: a Mixtral whose experts lie on both hosts; balanced routing, so that both have the same to do.
* ``grad_reduction``: a deep dense model, data parallel; beside torch's DDP.
* ``fsdp``: the same, sharded; beside torch's ``fully_shard``.  Parameters are gathered twice, for the forward and for
  the backward: half as many bytes again as DDP sends.
* ``fsdp_kept``: the same with ``reshard_after_forward=False`` (of ``fully_shard`` too): as many bytes as DDP.
* ``plans``: the Mixtral under six plans, for the prediction alone.

Contenders: ``unscheduled`` (the plan without ``overlap``), ``scheduled`` (with it), ``compute_only`` (the unscheduled
program, whose collectives return at once: ``two_hosts_cases.nothing_sent``).  Then

    exposed_share = (unscheduled - compute_only) / unscheduled
    hidden        = (unscheduled - scheduled) / what could be hidden
    speedup       = unscheduled / scheduled

What could be hidden is for ``ep`` all of ``unscheduled - compute_only``, else the smaller of that and the compute that
may run beside it: the backward for gradients, the whole step for FSDP.  Peers are held against their own compute (DDP
without synchronisation) and the same communication.

A host has one core for its rank and for what moves the rank's bytes, so not all can be hidden: ``comm_share`` is what
``calibrate`` found compute to lose while something travels.

``prediction``: the step that the cost model predicts for each plan, beside the measured one: the mean of what it says
of the clusters that ``calibrate`` measured in the lab before the cases and after them (``predicted_each_s``: both),
since a machine is not equally fast for minutes.  Plans are scheduled for the first.  ``order_agrees``: whether the
plans of each case, sorted by one and by the other, are in the same order.  The last line with ``--json`` is one object:
``{"hidden", "speedup", "exposed_share", …}`` of ``ep`` at top level, the others under their names, ``"prediction":
[{"plan", "predicted_s", "measured_s"}, …]``, ``"order_agrees"``, ``"comm_share"``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import two_hosts_cases as cases
from lab import LabError, two_hosts

import moec

WORKER = Path(cases.__file__)
BEFORE, AFTER = cases.CALIBRATIONS


def summary(case: str, repeats: dict[str, list[float]]) -> dict[str, Any]:
    seconds = {name: median(values) for name, values in repeats.items()}
    if case == "plans":
        return {"seconds": seconds, "repeats": repeats}
    unscheduled, scheduled, compute = (seconds[n] for n in ("unscheduled", "scheduled", "compute_only"))
    sent = unscheduled - compute
    beside = {"ep": sent, "grad_reduction": compute - seconds["forward_only"]}.get(case, compute)
    hideable = min(sent, beside)
    found = {
        "hidden": (unscheduled - scheduled) / hideable,
        "speedup": unscheduled / scheduled,
        "exposed_share": sent / unscheduled,
        "seconds": seconds,
        "repeats": repeats,
    }
    for peer in ("ddp", "fully_shard"):
        if peer in seconds:
            alone = seconds["torch_compute_only"] + sent
            found[peer] = {"hidden": (alone - seconds[peer]) / hideable, "slower": seconds[peer] / scheduled}
    return found


def predictions(names: list[str], clusters: list[Path], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """``clusters``: as calibrated before and after; the first is the one that plans are scheduled for."""
    rows = []
    for case in names:
        model, inputs = cases.MODELS[case]()
        sizes = {name: tuple(x.shape) for name, x in inputs.items()}
        for name, plan in cases.plans(case, str(clusters[0])).items():
            program = moec.compile_program(model, plan, 2, (), inputs, training=True)
            steps = [moec.timeline(program, cluster, sizes).step for cluster in clusters]
            rows.append(
                {
                    "case": case, "plan": name, "predicted_s": fmean(s.step_s for s in steps),
                    "predicted_each_s": [s.step_s for s in steps], "measured_s": results[case]["seconds"][name],
                    "predicted_compute_s": fmean(s.compute_s for s in steps),
                }
            )  # fmt: skip
    return rows


def order_agrees(rows: list[dict[str, Any]]) -> bool:
    """Are the plans of each case in the same order, sorted by what was predicted and by what was measured?"""
    by_case = [[r for r in rows if r["case"] == case] for case in {r["case"] for r in rows}]
    return all(sorted(r, key=itemgetter("predicted_s")) == sorted(r, key=itemgetter("measured_s")) for r in by_case)


def report(results: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    for case, r in results.items():
        print(f"\n{case}")
        if "hidden" in r:
            print(f"  hidden {r['hidden']:.1%}, {r['speedup']:.2f}x faster, exposed {r['exposed_share']:.1%}")
        for name, value in r["seconds"].items():
            spread = ", ".join(f"{v:.3f}" for v in r["repeats"][name])
            print(f"  {name:<20} {value:7.3f} s   ({spread})")
        for peer in ("ddp", "fully_shard"):
            if peer in r:
                print(f"  {peer} hides {r[peer]['hidden']:.1%} and takes {r[peer]['slower']:.2f} of scheduled's time")
    print("\npredicted against measured")
    for row in rows:
        off = row["predicted_s"] / row["measured_s"] - 1
        name = f"{row['case']}, {row['plan']}"
        print(f"  {name:<28} {row['predicted_s']:7.3f} s {row['measured_s']:7.3f} s {off:+7.1%}")
    print(f"  the order of the plans {'agrees' if order_agrees(rows) else 'differs'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(cases.MODELS), choices=list(cases.MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit", help="of the cable, each way, as tc spells it")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with two_hosts(args.rate) as lab:
                for case in (BEFORE, *args.cases, AFTER):
                    lab.torchrun(WORKER, [case, folder, str(args.rounds)], timeout=900)
                    if case in args.cases:
                        results[case] = summary(case, json.loads(Path(folder, f"{case}.json").read_text()))
        except LabError as e:
            sys.exit(f"two_hosts: {e}")
        measured = [Path(folder, f"{name}.yaml") for name in (BEFORE, AFTER)]
        rows = predictions(args.cases, measured, results)
        cluster = measured[0].read_text()
        share = moec.cost.cluster(measured[0]).comm_share
    report(results, rows)
    print(f"\nload {os.getloadavg()[0]:.1f}, compute loses {share:.1%} beside a transfer\n{cluster}")
    if args.json:
        top = results.pop("ep", {})
        prediction = {"prediction": rows, "order_agrees": order_agrees(rows)}
        print(json.dumps({**top, **results, **prediction, "comm_share": share, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
