"""benchmarks/gpu.sh without a GPU: it runs from the checkout with torch and triton alone, knows every op, and outlives
kernels that crash or hang."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_cases  # noqa: E402

from moec.runtime.collectives import TABLE  # noqa: E402
from moec.runtime.torch_compat import custom_ops  # noqa: E402


def dry(tmp_path, *arguments):
    out = tmp_path / "gpu.json"
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--dry", "--out", str(out), *arguments]
    done = subprocess.run(command, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert results["finished"] and results["card"] == "dry"
    assert all(check["ok"] for check in results["checks"].values())
    assert not any("failed" in result for result in results["times"].values())
    return results


def test_some_of_it(tmp_path):
    results = dry(tmp_path, "--only", "unpermute")
    assert set(results["checks"]) >= {"unpermute/float32", "unpermute, holes/float32"}
    assert results["times"]["unpermute/tiny"]["ms"].keys() == {"moec", "eager"}


@pytest.mark.nightly
def test_all_of_it(tmp_path):
    results = dry(tmp_path)
    assert results["ceilings"]["copy_gb_s"] > 0 and results["times"].keys() >= {
        "experts/tiny/moec", "experts/tiny/hf", "experts/tiny/inductor", "router/tiny",
    }  # fmt: skip


def test_every_op_is_checked():
    """But collectives, which need other ranks; backwards come with their ops."""
    names = {name.removeprefix("moec::") for name in custom_ops() if name.startswith("moec::")}
    alone = {n for n in names if n not in TABLE and not n.endswith(("_backward", "exchange_counts"))}
    covered = {name for case in gpu_cases.cases(tiny=True) for name in case.covers}
    assert alone - covered == set()
    assert covered <= names


def test_only_the_runtime_is_imported():
    """The rest of moec wants packages that a bare machine need not have."""
    program = "import sys, gpu_worker; gpu_worker.import_runtime(); print({'yaml', 'moec.plan'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_error_sees_what_is_wrong():
    case = next(c for c in gpu_cases.cases(tiny=True) if c.name == "permute, holes")
    exact = gpu_cases.outputs(case, "cpu", gpu_cases.torch.float64, gpu_cases.torch.float32)
    assert gpu_cases.error(exact, exact) == 0
    for i, change in enumerate((lambda t: t + t.abs().max() / 100, lambda t: t + 1, lambda t: t.roll(1, 0))):
        wrong = [change(t) if j == i else t for j, t in enumerate(exact)]
        assert gpu_cases.error(wrong, exact) > gpu_cases.LIMIT["float32"]


def test_crashes_and_hangs(tmp_path, monkeypatch):
    """Each costs its own item; the rest is measured by a fresh process, and the file is whole at any time."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\n"
        "for item in json.load(sys.stdin):\n"
        "    print(json.dumps({'started': item}), flush=True)\n"
        "    if item == 'check/crashes': os.abort()\n"
        "    if item == 'check/hangs': time.sleep(60)\n"
        "    print(json.dumps({'item': item, 'ok': True, 'error': 0.0, 'repeats': True}), flush=True)\n"
    )
    monkeypatch.setattr(gpu, "ITEM_SECONDS", 1.0)
    monkeypatch.setattr(
        gpu, "worker",
        lambda options, *_: subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True),
    )  # fmt: skip
    report = gpu.Report(tmp_path / "out.json", {})
    items = [f"check/{name}" for name in ("a", "crashes", "b", "hangs", "c")]
    assert gpu.together(argparse.Namespace(dry=False), items, report, time.monotonic() + 60) == []
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert {name for name, result in checks.items() if result.get("ok")} == {"a", "b", "c"}
    assert "ended with" in checks["crashes"]["failed"] and "too long" in checks["hangs"]["failed"]
    late = ["check/hangs", "check/a"]
    gpu.work(argparse.Namespace(), late, report, time.monotonic() + 0.5)
    assert late == ["check/hangs", "check/a"], "what there was no time for is left, not failed"
