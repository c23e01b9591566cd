"""DeepSeek-V3 at its real size, compiled for 1024 ranks in one process: within the memory and the time of a laptop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.nightly
def test_deepseek_for_1024_ranks():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "compile_time.py", "--deepseek-1024", "--json"],
        capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["peak_gb"] < 8
    assert out["cpu_seconds"] < 120  # of one thread: the wall clock of a busy machine says nothing
    assert out["routers"] == 58
    assert out["pieces"] == {"all": 59, "distinct": 3}
    count = {}
    for row in out["communication"]:
        key = (row["phase"], row["collective"], row["ranks"])
        count[key] = count.get(key, 0) + row["count"]
    # Each of the 58 MoE layers: its counts, its rows out and back, and both of these in the backward, over ep.
    assert count["forward", "counts", 64] == 58
    assert count["forward", "exchange", 64] == count["backward", "exchange", 64] == 2 * 58
