"""Compile kernels ahead of time, without a GPU, and measure what they would use: registers, shared memory, spills.

``python tests/aot.py`` compiles the whole list (runtime/kernels/catalog.py) for every target, prints the table,
writes it to build/kernels.json and exits with 1 where the gate fails: a register spilled, or more shared memory than a
multiprocessor gives to one block.  Triton does not check the latter without a device.

1. One process a target (``python tests/aot.py --worker ARCH`` < entries > rows, a line each): a crash of LLVM ends the
   process, and the first entry without a row is who did it.  Workers compile; they never interpret.
2. A row is kept in build/aot under a hash of everything it depends on, so an unchanged kernel is compiled once in a
   checkout; a fresh one (CI) compiles all.
3. What was spilled: NVIDIA's assembler says it in its log, AMD's compiler in the metadata of its assembly.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moec.runtime.kernels.entry import Entry

BUILD = Path(__file__).parent.parent / "build"

# arch: (Triton's backend, its name of the arch, threads of a warp, bytes of shared memory that one block may have)
TARGETS = {
    "sm_90": ("cuda", 90, 32, 232448),
    "sm_100": ("cuda", 100, 32, 232448),
    "gfx942": ("hip", "gfx942", 64, 65536),
    "gfx950": ("hip", "gfx950", 64, 163840),
}


@dataclass(frozen=True)
class Row:
    """What one kernel uses on one target."""

    kernel: str
    target: str
    registers: int
    """Of a thread; on AMD the vector registers."""
    shared: int
    """Bytes of a block."""
    spilled: int
    """NVIDIA: bytes stored and loaded; AMD: registers, vector and scalar."""
    error: str | None = None

    def problems(self) -> list[str]:
        """Why the gate does not let it pass."""
        limit = TARGETS[self.target][3]
        found = []
        if self.error:
            found.append(self.error)
        if self.spilled:
            found.append(f"spills registers ({self.spilled})")
        if self.shared > limit:
            found.append(f"wants {self.shared} bytes of shared memory, there are {limit}")
        return [f"{self.kernel} on {self.target}: {problem}" for problem in found]


def compile_all(work: dict[str, list[Entry]], cache: Path | None = BUILD / "aot") -> list[Row]:
    """Rows of all entries (arch -> entries), in order; ``cache=None`` compiles everything anew."""
    rows: dict[tuple[str, str], Row] = {}
    missing: dict[str, list[Entry]] = {}
    for arch, entries in work.items():
        for entry in entries:
            file = cache / f"{key(entry, arch)}.json" if cache else None
            if file and file.is_file():
                rows[arch, entry.name] = Row(**json.loads(file.read_text()))
            else:
                missing.setdefault(arch, []).append(entry)
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda item: compile_in_process(*item), missing.items())
    for (arch, entries), fresh in zip(missing.items(), done, strict=True):
        for entry, row in zip(entries, fresh, strict=True):
            rows[arch, entry.name] = row
            if cache and not row.error:
                cache.mkdir(parents=True, exist_ok=True)
                (cache / f"{key(entry, arch)}.json").write_text(json.dumps(dataclasses.asdict(row)))
    return [rows[arch, entry.name] for arch, entries in work.items() for entry in entries]


def key(entry: Entry, arch: str) -> str:
    import triton

    return hashlib.sha256(repr((entry, arch, triton.__version__, Path(__file__).read_text())).encode()).hexdigest()


def compile_in_process(arch: str, entries: list[Entry]) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {"TRITON_CACHE_DIR": scratch, "MOEC_KERNELS": scratch, "TRITON_ALWAYS_COMPILE": "1"}
        env.pop("TRITON_INTERPRET", None)
        text = json.dumps([dataclasses.asdict(e) for e in entries])
        command = [sys.executable, __file__, "--worker", arch]
        done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, check=False)
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    why = f"the compiler died ({done.returncode}: {said[0]})"
    for entry in entries[len(rows) :]:
        rows.append(Row(entry.name, arch, 0, 0, 0, error=why))
        why = "not compiled, after that"
    return rows


# -- in the worker


def measure(entry: Entry, arch: str) -> Row:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moec.runtime.kernels.source import load

    kernel = getattr(load(entry.source, re.sub(r"\W", "_", entry.kernel)), entry.kernel)
    types = dict(entry.arguments) | dict.fromkeys(entry.constexprs, "constexpr")
    source = ASTSource(
        kernel,
        signature={name: types[name].removesuffix(":16") for name in kernel.arg_names},
        constexprs=entry.constexprs,
        attrs={
            (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name].endswith(":16")
        },
    )
    triton.knobs.nvidia.dump_ptxas_log = True
    backend, name, warp, _ = TARGETS[arch]
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        options = {"num_warps": entry.warps, "num_stages": entry.stages}
        compiled = triton.compile(source, target=GPUTarget(backend, name, warp), options=options)
    if backend == "cuda":
        registers, spilled = nvidia(log.getvalue())
    else:
        registers, spilled = amd(compiled.asm["amdgcn"])
    return Row(entry.name, arch, registers, compiled.metadata.shared, spilled)


def nvidia(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) from ptxas' log."""
    (registers,) = re.findall(r"Used (\d+) registers", log)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return int(registers), int(stores) + int(loads)


def amd(assembly: str) -> tuple[int, int]:
    """(vector registers, registers spilled) from the metadata at the end of the assembly."""
    found = {name: int(n) for name, n in re.findall(r"\.(\w+_count):\s+(\d+)", assembly)}
    return found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"]


def worker(arch: str) -> None:
    for fields in json.load(sys.stdin):
        fields["arguments"] = tuple((name, kind) for name, kind in fields["arguments"])
        entry = Entry(**fields)
        try:
            row = measure(entry, arch)
        except Exception as e:  # the table says so, and the other kernels are compiled all the same
            said = " ".join(str(e).split())
            row = Row(entry.name, arch, 0, 0, 0, error=f"does not compile: {type(e).__name__}: {said[-300:]}")
        print(json.dumps(dataclasses.asdict(row)), flush=True)


# -- the table


def table(rows: list[Row]) -> str:
    width = max([len(r.kernel) for r in rows] + [6])
    lines = [f"{'kernel':{width}}  {'target':8} {'registers':>9} {'shared':>7} {'spilled':>7}"]
    lines += [f"{r.kernel:{width}}  {r.target:8} {r.registers:9} {r.shared:7} {r.spilled:7}" for r in rows]
    return "\n".join(lines)


def write_artifact(rows: list[Row], path: Path = BUILD / "kernels.json") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", metavar="ARCH", choices=TARGETS)
    parser.add_argument("--arch", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--only", metavar="TEXT", default="", help="kernels whose name contains it")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    from moec.runtime.kernels.catalog import entries

    rows = compile_all(
        {arch: [e for e in entries(arch) if options.only in e.name] for arch in options.arch or TARGETS}
    )
    print(table(rows))
    write_artifact(rows)
    failed = [problem for row in rows for problem in row.problems()]
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
