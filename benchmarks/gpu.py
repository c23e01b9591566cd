"""What one GPU says about moec's kernels: are they right, and how fast beside what else there is.

    benchmarks/gpu.sh [--minutes 8] [--only TEXT] [--dry]

Runs from the checkout, with torch and triton alone: of moec only the runtime is imported.  Writes
``benchmarks/results/gpu_<card>.json`` anew after every result, so it may be stopped at any time; after ``--minutes`` it
stops itself.  Exit status 1 if a check failed.

1. Ceilings: bytes a second of a copy, operations a second of one large bf16 product.
2. Checks: every op of moec that runs without other ranks, forward and backward, against its CPU kernel in fp64, and
   against itself, bit by bit; first half of the time, and what is left of it.
3. Times in bf16, medians: experts forward and forward+backward, router, permute, unpermute; each beside what Hugging
   Face composes around torch's own grouped product (eager) and the same under Inductor.

Items run in a process of their own that takes them one after the other: a kernel that crashes the GPU, or hangs, costs
its own item and a fresh process for the rest.

``--dry``: on a CPU, tiny sizes, kernels through Triton's interpreter: whether this script works, nothing more.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORKER = Path(__file__).parent / "gpu_worker.py"
ITEM_SECONDS = 75.0
"""What an item may take; compiling is most of it."""
PROCESSES = 4
"""Beside each other, for checks; what is timed is alone."""


class Report:
    """The file, written anew after every change."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.lock = path, threading.Lock()
        self.results = head | {"finished": False, "ceilings": {}, "checks": {}, "times": {}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(partial, self.path)

    def add(self, item: str, result: dict[str, Any]) -> None:
        kind, _, name = item.partition("/")
        with self.lock:
            if kind == "ceilings":
                self.results["ceilings"] = result
            else:
                self.results["checks" if kind == "check" else "times"][name if kind == "check" else item] = result
            self.write()
            print(f"{item}: {line(result)}", flush=True)


def line(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"FAILED, {result['failed']}"
    if "ok" in result:
        again = "" if result["repeats"] else ", other bits the second time"
        return f"{'ok' if result['ok'] else 'WRONG'}, error {result['error']:.1e}{again}"
    return ", ".join(f"{k} {v:.4g}" for k, v in (result.get("ms") or result).items())


def worker(options: argparse.Namespace, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), *(["--dry"] if options.dry else []), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(options: argparse.Namespace, what: str) -> Any:
    process = worker(options, what)
    said, _ = process.communicate(timeout=120)
    if process.returncode:
        raise SystemExit("no GPU with torch and triton here (or see above); --dry tries the script without one")
    return json.loads(said.splitlines()[-1])


def work(options: argparse.Namespace, items: list[str], report: Report, until: float) -> None:
    """Take items off the list, by workers that take one after the other, until all are done or the time is up."""
    while items and time.monotonic() < until:
        process = worker(options)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(items))
        process.stdin.close()
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=read, args=(process.stdout, lines), daemon=True).start()
        current, why = items[0], None
        while why is None:
            try:
                text = lines.get(timeout=max(0.1, min(ITEM_SECONDS, until - time.monotonic())))
            except queue.Empty:
                why = "it took too long" if time.monotonic() < until else ""
                break
            if text is None:
                why = f"its process ended with {process.wait()}"
            elif text.startswith("{"):
                said = json.loads(text)
                if (item := said.pop("item", None)) is None:
                    current = said["started"]
                else:
                    report.add(item, said)
                    items.remove(item)
        process.kill()
        process.wait()
        if why and current in items:  # the rest goes to a fresh process
            report.add(current, {"failed": why})
            items.remove(current)


def read(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for text in stream:
        lines.put(text)
    lines.put(None)


def together(options: argparse.Namespace, items: list[str], report: Report, until: float) -> list[str]:
    """``work`` by several workers at once, most of which compile; returns what is left."""
    processes = 1 if options.dry else PROCESSES
    shares = [items[i::processes] for i in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda share: work(options, share, report, until), shares))
    return [item for share in shares for item in share]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--only", default="", metavar="TEXT", help="items whose name contains it")
    parser.add_argument("--dry", action="store_true", help="on a CPU, through Triton's interpreter")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_<card>.json")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    head = ask(options, "--about")
    items = [item for item in head.pop("items") if options.only in item]
    card = re.sub(r"\W+", "_", head["card"]).strip("_").lower()
    report = Report(options.out or ROOT / "benchmarks" / "results" / f"gpu_{card}.json", head)
    half = until - 30 * options.minutes
    checks, times = ([i for i in items if i.startswith("check/") == which] for which in (True, False))
    checks = together(options, checks, report, half)
    work(options, times, report, until)
    checks = together(options, checks, report, until)
    report.results |= {"finished": not checks + times, "left": checks + times}
    report.write()
    wrong = [name for name, result in report.results["checks"].items() if not result.get("ok")]
    print(f"{report.path}: {len(report.results['checks'])} checks, wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
