"""How long scheduling takes: DeepSeek-V3, 61 layers, 1024 ranks, its forward and backward graph.

    python benchmarks/schedule_time.py [--layers 16 31 61] [--chunks 2] [--json]

The model and the plan are those of ``deepseek_1024.py`` with ``Overlap(chunks=…, cluster="h100-nvl8-400g")``; one
process, no process group, one thread.  ``schedule`` is buckets, groups by purpose, list scheduling and the check of the
order, of the graphs of training and of inference; what comes before (capture, passes, autograd) is ``compile`` and
``graphs``.  CPU seconds: other work on the machine is not in them.

The last line with ``--json`` is ``{"cases": [{"layers", "compile", "graphs", "schedule", "forward_nodes",
"backward_nodes", "peak_gb"}], …}``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import replace

import torch
from deepseek_1024 import PLAN, RANKS, TOKENS, model

import moec
from moec.passes.step import complete_graphs, finish

SHAPES = {"input_ids": TOKENS, "labels": TOKENS}


def measure(layers: int, chunks: int) -> dict[str, float]:
    ids = torch.zeros(2, 64, dtype=torch.int64)
    overlap = moec.Overlap(chunks=chunks, cluster="h100-nvl8-400g")
    marks = [time.process_time()]
    chunked = replace(PLAN, overlap=replace(overlap, schedule=False, bucket_mb=None))
    program = moec.compile_program(
        model(layers), chunked, RANKS, (), {"input_ids": ids, "labels": ids}, training=True, shapes=SHAPES
    )
    marks.append(time.process_time())
    graphs = complete_graphs(program)
    marks.append(time.process_time())
    step = finish(graphs, program, overlap, SHAPES)
    marks.append(time.process_time())
    backward = step.backward(step.usual())
    return {
        "layers": layers,
        "compile": marks[1] - marks[0],
        "graphs": marks[2] - marks[1],
        "schedule": marks[3] - marks[2],
        "forward_nodes": len(step.forward.graph.nodes),
        "backward_nodes": len(backward.graph.nodes),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--layers", type=int, nargs="+", default=[16, 31, 61])
    p.add_argument("--chunks", type=int, default=2)
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    a = p.parse_args()
    torch.set_num_threads(1)
    keys = ("layers", "compile", "graphs", "schedule", "forward_nodes", "backward_nodes", "peak_gb")
    print(f"torch {torch.__version__}, one thread; deepseek_v3, {RANKS} ranks, {a.chunks} chunks; CPU seconds\n")
    print("".join(f"{k:>15}" for k in keys))
    cases = []
    for layers in a.layers:
        cases.append(measure(layers, a.chunks))
        print("".join(f"{v:>15.2f}" if isinstance(v, float) else f"{v:>15}" for v in cases[-1].values()), flush=True)
    if a.json:
        setup = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "chunks": a.chunks}
        print(json.dumps({"cases": cases} | setup))


if __name__ == "__main__":
    main()
