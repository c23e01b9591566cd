"""Compile DeepSeek-V3 at its real size for a cluster that is not there (``compile_time.py --deepseek-1024``).

61 layers (3 dense), 7168 wide, 256 experts, 671 billion parameters in bf16 on the meta device; 1024 ranks: tp 2, ep 64,
dp 512.  One process, no process group.  Measured: capture, every pass, the forward and the backward graph; peak memory
of the process.  With ``--scaling`` also the passes for half and twice the ranks and half the layers, and what a further
layer costs the capture: in CPU seconds, of the passes the least of several runs, since other work on the machine only
ever adds.
"""

from __future__ import annotations

import re
import resource
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moec
from moec import compiler
from moec.passes import manager
from moec.program import Program

LAYERS, RANKS = 61, 1024
PLAN = moec.Plan(tp=2, ep=64)
TOKENS = (1, 4096)
"""Sequences of a rank, and their length, that the communication table is for."""


def model(layers: int) -> torch.nn.Module:
    config = AutoConfig.for_model("deepseek_v3")
    config.num_hidden_layers, config.pad_token_id = layers, None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Clock:
    """Seconds between marks, on the wall and of this process's CPU time."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float, float]] = []
        self("start")

    def __call__(self, name: str, _: object = None) -> None:
        self.marks.append((name, time.perf_counter(), time.process_time()))

    def stages(self) -> dict[str, tuple[float, float]]:
        return {b[0]: (b[1] - a[1], b[2] - a[2]) for a, b in pairwise(self.marks)}


def compile_all(layers: int) -> tuple[Program, Program, Any, dict[str, tuple[float, float]]]:
    """(captured program, lowered program, forward and backward graphs, stages)."""
    m, captured = model(layers), []
    ids = torch.zeros(2, 64, dtype=torch.int64)
    clock = Clock()

    def observe(name: str, program: Program) -> None:
        clock(name)
        if name == "captured":
            captured.append(program)

    program = moec.compile_program(
        m, PLAN, RANKS, (), {"input_ids": ids, "labels": ids}, training=True, observe=observe
    )
    graphs = compiler.joint_graphs(program)
    clock("forward and backward graphs")
    assert len(program.blocks) == layers - 3 and not program.why_not, program.why_not
    return captured[0], program, graphs, clock.stages()


def pass_seconds(captured: Program, ranks: int) -> float:
    """CPU seconds of all passes for a world of ``ranks``."""
    program = replace(captured.fork(), mesh=PLAN.mesh(ranks))
    start = time.process_time()
    manager.run(program, PLAN.resolve(ranks), (*compiler.PIPELINE, compiler.expand))
    return time.process_time() - start


def captured_in(layers: int) -> tuple[Program, float]:
    """The captured program, and the CPU seconds that it took."""
    m, ids = model(layers), torch.zeros(2, 64, dtype=torch.int64)
    start = time.process_time()
    program = compiler.capture(m, (), {"input_ids": ids, "labels": ids}, training=True, reduced=True)
    return program, time.process_time() - start


def communication(program: Program) -> list[tuple[str, str, str, int, int, int]]:
    """(phase, collective, where, ranks, count, bytes), layers taken together."""
    sizes = {s.path: TOKENS for s in program.inputs.values()}
    count: Counter = Counter()
    size: Counter = Counter()
    for c in moec.explain(program, sizes).collectives:
        key = (c.phase, c.primitive, re.sub(r"\.\d+\b", ".*", c.where) or "(top)", c.ranks)
        count[key] += 1
        size[key] += c.bytes
    return [(*key, count[key], size[key]) for key in count]


def main(scaling: bool, repeats: int) -> dict[str, Any]:
    captured, program, graphs, stages = compile_all(LAYERS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    wall, cpu = (sum(s[i] for s in stages.values()) for i in (0, 1))
    billions = sum(torch.Size(p.shape).numel() for p in program.params.values()) / 1e9
    print(f"deepseek_v3: {LAYERS} layers, {billions:.0f} billion parameters, {RANKS} ranks, plan {PLAN.to_dict()}\n")
    print(f"{'stage':<30}{'wall s':>10}{'CPU s':>10}")
    for name, (w, c) in [*stages.items(), ("total", (wall, cpu))]:
        print(f"{name:<30}{w:>10.2f}{c:>10.2f}")
    forward, backward = (len(g.graph.nodes) for g in (graphs.forward, graphs.backward))
    print(
        f"\n{len(program.graph.nodes)} nodes; forward {forward}, backward {backward} from {graphs.distinct} distinct "
        f"pieces of {graphs.pieces}; peak memory {peak:.2f} GB\n"
    )
    table = communication(program)
    print(f"communication of one step on one rank, {TOKENS[0]} x {TOKENS[1]} tokens a rank\n")
    print(f"{'phase':<10}{'collective':<16}{'ranks':>6}{'count':>7}{'MB':>12}  where")
    for phase, kind, where, ranks, n, b in table:
        print(f"{phase:<10}{kind:<16}{ranks:>6}{n:>7}{b / 1e6:>12.1f}  {where}")
    out: dict[str, Any] = {
        "seconds": wall, "cpu_seconds": cpu, "peak_gb": peak, "layers": LAYERS, "ranks": RANKS,
        "plan": PLAN.to_dict(), "stages": {n: {"seconds": w, "cpu_seconds": c} for n, (w, c) in stages.items()},
        "nodes": {"program": len(program.graph.nodes), "forward": forward, "backward": backward},
        "routers": program.op_counts()["moec.route"],
        "pieces": {"all": graphs.pieces, "distinct": graphs.distinct},
        "communication": [
            dict(zip(("phase", "collective", "where", "ranks", "count", "bytes"), row, strict=True)) for row in table
        ],
    }  # fmt: skip
    if scaling:
        out["scaling"] = measure_scaling(captured, repeats)
    return out


def measure_scaling(captured: Program, repeats: int) -> dict[str, Any]:
    half = LAYERS // 2
    short, half_seconds = captured_in(half)
    capture = {half: half_seconds, LAYERS: captured_in(LAYERS)[1]}
    cases = {
        f"{LAYERS} layers, {RANKS} ranks": (captured, RANKS),
        f"{LAYERS} layers, {RANKS // 2} ranks": (captured, RANKS // 2),
        f"{LAYERS} layers, {RANKS * 2} ranks": (captured, RANKS * 2),
        f"{half} layers, {RANKS} ranks": (short, RANKS),
    }
    runs: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (program, ranks) in cases.items():
            runs[name].append(pass_seconds(program, ranks))
    passes = {name: min(r) for name, r in runs.items()}
    per_layer = (capture[LAYERS] - capture[half]) / (LAYERS - half)
    print(f"\nall passes, CPU s, least of {repeats} runs")
    for name, seconds in passes.items():
        print(f"{name:<30}{seconds:>10.2f}")
    print(f"capture: {capture[half]:.2f} s for {half} layers, {capture[LAYERS]:.2f} s for {LAYERS}: ", end="")
    print(f"{per_layer:.3f} s a layer")
    names = list(cases)
    return {
        "passes_cpu_seconds": passes,
        "all_runs": runs,
        "growth_of_passes": {
            "ranks doubled": passes[names[2]] / passes[names[0]] - 1,
            "layers doubled": passes[names[0]] / passes[names[3]] - 1,
        },
        "capture_cpu_seconds": {str(n): s for n, s in capture.items()},
        "capture_seconds_per_layer": per_layer,
        "repeats": repeats,
    }
