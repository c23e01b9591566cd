"""The command line: ``moec check``, ``moec explain``, ``moec timeline``, ``moec calibrate`` and ``moec tune``.

    moec check FILE.py:make_model --plan plan.yaml --world 8
    moec check --hf mixtral --layers 2 --world 4 --tp 2 --ep 4
    moec explain --hf qwen3_moe --world 8 --ep 8 --json
    moec timeline --hf mixtral --world 8 --ep 8 --cluster h100-nvl8-400g --size input_ids=4x4096 --out trace.json
    torchrun --nproc-per-node 2 -m moec.cli calibrate --out cluster.yaml
    moec tune --experts 128 --hidden 2048 --width 768 --top-k 8 --tokens 4096

``make_model()`` returns the model, or ``(model, example_inputs, example_kwargs)``.  Exit status: 0 when the proof
holds, 1 when it fails, 2 when the model or plan is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import moec
from moec import MoecError


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except MoecError as e:
        print(f"refused: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    _on_a_model(commands, "check", _check, "prove that the parallel program equals the model, after every pass, on "
                "simulated ranks")  # fmt: skip
    _on_a_model(commands, "explain", _explain, "print every collective of a step, where parameters lie, and what was "
                "declined")  # fmt: skip
    text = "predict a training step on a cluster, and write it as a trace for Chrome or Perfetto"
    p = _on_a_model(commands, "timeline", _timeline, text)
    p.add_argument("--cluster", required=True, metavar="NAME", help="a preset, or the path of a cluster file")
    p.add_argument("--size", action="append", default=[], metavar="INPUT=BxS", help="local sizes (default 2x16)")
    p.add_argument("--out", type=Path, metavar="TRACE.json", help="where to write the trace")
    p.add_argument("--measured", type=Path, metavar="FILE", help="a recorded run (moec.record), shown beside it")
    text = "measure this machine, and under torchrun its network, for the cost model"
    p = commands.add_parser("calibrate", help=text, description=text)
    p.add_argument("--out", type=Path, required=True, metavar="CLUSTER.yaml")
    p.add_argument("--name", default="calibrated")
    p.add_argument("--dtype", action="append", metavar="DTYPE", help="default: float32 and bfloat16")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.set_defaults(run=_calibrate)
    text = "time the generated kernels of one block's experts on this GPU, and keep the fastest tiles"
    p = commands.add_parser("tune", help=text, description=text)
    for size in ("experts", "hidden", "width", "top-k", "tokens"):
        p.add_argument(f"--{size}", type=int, required=True)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--fp8", metavar="RECIPE", help="the FP8 products of a recipe, instead of those of the dtype")
    p.add_argument("--table", type=Path, metavar="TILES.json", help="default: the user's cache directory")
    p.set_defaults(run=_tune)
    return parser


def _on_a_model(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    """A command that takes a model, a plan and a world."""
    p = commands.add_parser(name, help=text, description=text)
    p.add_argument("model", nargs="?", metavar="FILE.py:make_model")
    p.add_argument("--hf", metavar="NAME", help="a Hugging Face architecture, or the path of a config.json")
    p.add_argument("--layers", type=int, help="depth that the architecture is shrunk to (default 2)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=INT", help="a field of the shrunk config")
    p.add_argument("--plan", type=Path, metavar="PLAN.yaml")
    for degree in ("dp", "tp", "ep", "etp"):
        p.add_argument(f"--{degree}", type=int)
    p.add_argument("--layout", choices=("auto", "hf"), help="who places parameters (a plan's file may say more)")
    p.add_argument("--world", type=int, required=True, metavar="N")
    p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    p.set_defaults(run=run)
    return p


def _check(args: argparse.Namespace) -> int:
    model, inputs, kwargs = _model(args)
    report = moec.check(model, _plan(args), example_inputs=inputs, example_kwargs=kwargs, world_size=args.world)
    print(json.dumps(report.to_dict()) if args.json else report)
    return 0 if report.ok else 1


def _explain(args: argparse.Namespace) -> int:
    model, inputs, kwargs = _model(args)
    program = moec.compile_program(model, _plan(args), args.world, inputs, kwargs, training=model.training)
    explanation = moec.explain(program)
    print(explanation.to_json() if args.json else explanation)
    return 0


def _timeline(args: argparse.Namespace) -> int:
    model, inputs, kwargs = _model(args)
    sizes = dict(map(_size, args.size))
    measured = moec.load_spans(args.measured) if args.measured else []
    program = moec.compile_program(model, _plan(args), args.world, inputs, kwargs, training=True)
    found = moec.timeline(program, args.cluster, sizes)
    if args.out:
        args.out.write_text(json.dumps(found.trace(measured)))
    print(json.dumps(found.to_dict()) if args.json else found)
    return 0


def _size(text: str) -> tuple[str, tuple[int, ...]]:
    path, _, size = text.partition("=")
    try:
        return path, tuple(map(int, size.split("x")))
    except ValueError:
        raise MoecError(f"--size {text} is not INPUT=BxS", where="command line") from None


def _calibrate(args: argparse.Namespace) -> int:
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone:
        torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        options = {"dtypes": tuple(args.dtype)} if args.dtype else {}
        found = moec.calibrate(args.name, device=args.device, **options)
        if alone or torch.distributed.get_rank() == 0:
            args.out.write_text(found.to_yaml())
            print(f"wrote {args.out}" + (" (no links: run it under torchrun to measure them)" if alone else ""))
    finally:
        if not alone:
            torch.distributed.destroy_process_group()
    return 0


def _tune(args: argparse.Namespace) -> int:
    sizes = {k: getattr(args, k) for k in ("experts", "hidden", "width", "top_k", "tokens")}
    for f in moec.tune(**sizes, dtype=args.dtype, fp8=args.fp8, table=args.table):
        print(f"{f.family:16} {f.shape.key():40} {f.tile} {f.milliseconds:.3f} ms, best of {f.tried}")
    return 0


def _plan(args: argparse.Namespace) -> moec.Plan:
    try:
        data = moec.Plan.from_yaml(args.plan.read_text()).to_dict() if args.plan else {}
    except OSError as e:
        raise MoecError(f"cannot read the plan: {e}", where="command line") from None
    data.update({k: v for k in ("dp", "tp", "ep", "etp", "layout") if (v := getattr(args, k)) is not None})
    return moec.Plan.from_dict(data)


def _model(args: argparse.Namespace) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    if (args.model is None) == (args.hf is None):
        raise MoecError("name one model: FILE.py:make_model or --hf NAME", where="command line")
    if args.hf:
        from moec.hf import build

        return build(args.hf, args.layers, **{k: int(v) for k, _, v in (s.partition("=") for s in args.set)}), (), {}
    path, _, function = args.model.partition(":")
    if not Path(path).is_file() or not function:
        raise MoecError(
            f"{args.model!r} is not FILE.py:function", where="command line", way_out="for example model.py:make_model"
        )
    sys.path.insert(0, str(Path(path).resolve().parent))
    made = runpy.run_path(path)
    if function not in made:
        raise MoecError(f"{path} defines no {function}", where="command line")
    out = made[function]()
    if not isinstance(out, tuple):
        out = (out,)
    model, inputs, kwargs = (*out, (), {})[:3] if len(out) == 1 else (*out, {})[:3]
    return model, tuple(inputs), dict(kwargs)


if __name__ == "__main__":
    sys.exit(main())
