"""Collectives and bytes of one training step beside peers, and whether each peer's gradients are right.

    python benchmarks/collectives.py [--models mixtral qwen3_moe] [--only "tp 4"] [--json]     # needs the extra bench

Four gloo processes, anew for each contender of ``contenders.py``, train a tiny model (float32) for one step on the same
global batch.  torch's profiler records every ``c10d`` operation of that step on rank 0 (the second step, so that
nothing is counted that happens once), whoever issued it and through whichever interface; nothing is excluded.  *Bytes*
are tensor bytes on one rank: the larger of what goes in and what comes out.  Sends and receives between pairs of ranks
that one operator of moec is made of are one collective, under the operator's name.  *MFLOP a token* are the matrix
products of rank 0 over the tokens of the global batch: a peer that computes on all ranks what one could do alone pays
there.
*Gradients* is the largest relative difference of a parameter's gradient from the single device's on the global batch
(those below 1% of the largest on that scale), with the model's own balancing loss off and on.

The last line with ``--json`` is one object: ``{"setup": …, "models": {model: {"aux off" | "aux on": {contender:
{"collectives", "bytes", "mflop_per_token", "gradients", "worst", "by_kind"}}}}, "ratios": [...]}``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, RIVALS, Contender
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import moec

SEQUENCES, LENGTH = 8, 128
TINY = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "max_position_embeddings": 256, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 8},
    "qwen3_moe": {"moe_intermediate_size": 64, "intermediate_size": 256, "num_experts": 32, "decoder_sparse_step": 1},
}
ITEMSIZE = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "c10::BFloat16": 2, "bool": 1}
VANISHING = 1e-2
LAUNCH_SECONDS = 600
"""A launch takes about twenty seconds; one that hangs must not hang the rest of the table for ever."""


def build(name: str, aux: bool) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **TINY, **MODELS[name], output_router_logits=aux)
    config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config).train()


def batch_of(vocab: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocab, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


# -- what a step communicates and computes


def record(contender: Contender, batch: dict[str, Tensor]) -> tuple[dict[str, list[int]], float, Tensor]:
    """kind -> [count, bytes] of the ``c10d`` operations of a step on this rank, its FLOPs, and the loss."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
        loss = contender.step(batch)
    with tempfile.TemporaryDirectory() as folder:
        p.export_chrome_trace(str(Path(folder, "trace.json")))
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = [e for e in events if "Input Dims" in e.get("args", {})]
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kind, nbytes in [*by_pairs(events), *whole(events)]:
        found[kind][0] += 1
        found[kind][1] += nbytes
    return dict(found), flops(events), loss


def whole(events: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    for e in events:
        kind = e["name"].removeprefix("c10d::").strip("_")
        if e["name"].startswith("c10d::") and kind not in ("send", "recv"):
            yield kind, tensor_bytes(kind, e["args"])


def by_pairs(events: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """The operators that sends and receives lie in; one that lies in none is a collective of its own."""
    pairs = [e for e in events if e["name"].removeprefix("c10d::").strip("_") in ("send", "recv")]
    ours = [e for e in events if e["name"].startswith("moec::")]
    inside: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in pairs:
        around = [o for o in ours if o["tid"] == e["tid"] and o["ts"] <= e["ts"] < o["ts"] + o["dur"]]
        if around:
            inside[ours.index(max(around, key=lambda o: o["ts"]))].append(e)
        else:
            yield e["name"].removeprefix("c10d::").strip("_"), tensor_bytes("send", e["args"])
    for i, parts in inside.items():
        given = tensor_bytes("", ours[i]["args"])
        sent, got = (sum(tensor_bytes("", e["args"]) for e in parts if w in e["name"]) for w in ("send", "recv"))
        kept = given - sent if given > sent else given  # of a gather everything goes to everyone, and stays
        yield ours[i]["name"], max(given, got + kept)


def tensor_bytes(kind: str, args: dict[str, Any]) -> int:
    """The larger of input and output; both are among the operation's first two arguments."""
    sizes, itemsize = [], 0
    for dims, dtype in list(zip(args["Input Dims"], args["Input type"], strict=True))[:2]:
        listed = dtype == "TensorList"
        tensors = dims if listed else [dims]
        # Lists do not tell their dtype; in these models, lists of tensors are float32 or a few integers.
        itemsize = max(itemsize, 4 if listed else ITEMSIZE.get(dtype, 0))
        if listed or dtype in ITEMSIZE:
            sizes.append(sum(torch.Size(t).numel() for t in tensors))
    # The output of this form is a list of lists, which the profiler does not show.
    return max(sizes, default=0) * itemsize * (dist.get_world_size() if kind == "allgather" else 1)


PRODUCTS: dict[str, Callable[[list[list[int]]], float]] = {
    "aten::mm": lambda d: 2 * d[0][0] * d[0][1] * d[1][1],
    "aten::addmm": lambda d: 2 * d[1][0] * d[1][1] * d[2][1],
    "aten::bmm": lambda d: 2 * d[0][0] * d[0][1] * d[0][2] * d[1][2],
    "aten::baddbmm": lambda d: 2 * d[1][0] * d[1][1] * d[1][2] * d[2][2],
    # scores and values; backward, with the scores computed anew: five products
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda d: 4 * torch.Size(d[0]).numel() * d[1][2],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda d: 10 * torch.Size(d[1]).numel() * d[2][2],
}


def flops(events: list[dict[str, Any]]) -> float:
    """Matrix products that ran on this rank.  An operation on a DTensor is recorded with its global shape around the
    local one that does the work, so only events without a product inside them count."""
    found = sorted((e for e in events if e["name"] in PRODUCTS), key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    total = 0.0
    for e, after in zip(found, [*found[1:], None], strict=True):
        inside = after is not None and after["tid"] == e["tid"] and after["ts"] + after["dur"] <= e["ts"] + e["dur"]
        if not inside:
            total += PRODUCTS[e["name"]](e["args"]["Input Dims"])
    return total


# -- gradients


def oracle(source: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    source.zero_grad()
    loss = source(**batch).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in source.named_parameters() if p.grad is not None}
    source.zero_grad()
    return loss.detach(), grads


def furthest(got: dict[str, Tensor | None], want: dict[str, Tensor]) -> tuple[float, str]:
    floor = VANISHING * max(float(g.norm()) for g in want.values())
    worst = (0.0, "")
    for name, g in want.items():
        mine = got.get(name)
        mine = torch.zeros_like(g) if mine is None else mine
        worst = max(worst, (float((mine - g).norm()) / max(float(g.norm()), floor), name))
    return worst


# -- one rank


def run_rank(a: argparse.Namespace) -> None:
    """One contender on one model, its balancing loss off and on."""
    (name,), (title,) = a.models, a.only
    dist.init_process_group("gloo")
    rows = {}
    for aux in (False, True):
        source = build(name, aux)
        batch = batch_of(source.config.vocab_size)
        loss, want = oracle(source, batch)
        folder = Path(a.folder, setting(aux))
        if dist.get_rank() == 0:
            source.save_pretrained(folder)
        dist.barrier()
        rows[setting(aux)] = measure(CONTENDERS[title], source, str(folder), batch, loss, want)
    if dist.get_rank() == 0:
        Path(a.folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def setting(aux: bool) -> str:
    return f"aux {'on' if aux else 'off'}"


def measure(make, source: nn.Module, folder: str, batch, loss: Tensor, want) -> dict[str, Any]:
    try:
        contender = make(source, folder)
        contender.step(batch)
        contender.model.zero_grad()
        by_kind, work, got_loss = record(contender, batch)
        grads = contender.grads()
    except Exception as e:  # a peer that cannot do it is a result; all ranks run into it alike
        return {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"}
    error, worst = furthest(grads, want)
    return {
        "collectives": sum(n for n, _ in by_kind.values()),
        "bytes": sum(b for _, b in by_kind.values()),
        "mflop_per_token": work / (SEQUENCES * LENGTH) / 1e6,
        "gradients": error,
        "worst": worst,
        "loss": float(got_loss),
        "loss_single": float(loss),
        "by_kind": by_kind,
    }


# -- the parent


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    p.add_argument("--only", nargs="+", help="contenders whose title contains one of these")
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    p.add_argument("--folder", help=argparse.SUPPRESS)
    a = p.parse_args()
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        run_rank(a)
        return
    results = {name: launch(name, a.only) for name in a.models}
    ratios = compare(results)
    show(results, ratios)
    if a.json:
        setup = {
            "torch": torch.__version__, "moec": getattr(moec, "__version__", ""), "machine": platform.machine(),
            "cores": os.cpu_count(), "processes": 4, "sequences": SEQUENCES, "length": LENGTH, "sizes": TINY | MODELS,
        }  # fmt: skip
        print(json.dumps({"setup": setup, "models": results, "ratios": ratios}))


def launch(name: str, only: list[str] | None) -> dict[str, Any]:
    """setting -> contender -> its row.  Each contender has processes of its own: it makes process groups, whose threads
    would slow down those who come after it."""
    rows: dict[str, Any] = {setting(aux): {} for aux in (False, True)}
    for title in CONTENDERS:
        if only and not any(o in title for o in only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", __file__]
            command += ["--folder", folder, "--models", name, "--only", title]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=LAUNCH_SECONDS)
            found = json.loads(Path(folder, "rows.json").read_text())
        for key, row in found.items():
            rows[key][title] = row
        print(f"{name}: {title}: {found}", file=sys.stderr)
    return rows


def compare(results: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for model, settings in results.items():
        for setting, rows in settings.items():
            for ours, rivals in RIVALS.items():
                for rival in rivals:
                    if "bytes" not in rows.get(ours, {}) or "bytes" not in rows.get(rival, {}):
                        continue
                    ratio = {k: rows[ours][k] / rows[rival][k] for k in ("bytes", "collectives")}
                    out.append({"model": model, "setting": setting, "ours": ours, "rival": rival, **ratio})
    return out


def show(results: dict[str, Any], ratios: list[dict[str, Any]]) -> None:
    print(f"torch {torch.__version__}, 4 gloo processes, one thread each; bytes of one step on one rank\n")
    for model, settings in results.items():
        for setting, rows in settings.items():
            print(f"{model}, {setting}")
            print(f"  {'contender':<46} {'collectives':>11} {'MB':>8} {'MFLOP/token':>12} {'gradients':>10}  worst")
            for title, r in rows.items():
                if "error" in r:
                    print(f"  {title:<46} {r['error']}")
                    continue
                print(
                    f"  {title:<46} {r['collectives']:>11} {r['bytes'] / 1e6:>8.2f} {r['mflop_per_token']:>12.3f} "
                    f"{r['gradients']:>10.1e}  {r['worst'] if r['gradients'] > 1e-4 else ''}"
                )
            print()
    print(f"  {'moec over rival':<100} {'bytes':>6} {'collectives':>11}")
    for r in ratios:
        title = f"{r['model']}, {r['setting']}: {r['ours']} / {r['rival']}"
        print(f"  {title:<100} {r['bytes']:>6.2f} {r['collectives']:>11.2f}")


if __name__ == "__main__":
    main()
