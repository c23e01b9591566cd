"""Shared by all tests: one thread a process, hypothesis profiles, the pool of gloo processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; worker processes inherit it
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on CPU tensors (tests/interpreter.py)

import hypothesis
import pytest
import torch
from pool import Pool

torch.set_num_threads(1)

# The everyday run repeats the same examples; MOEC_HYPOTHESIS=explore (nightly) draws new ones.
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("MOEC_HYPOTHESIS", "repeat"))


LONG = (
    "test_chunks", "test_aot", "test_commute_quantise", "test_commute_sequence", "test_check_fp8", "test_timeline",
    "test_fp8_curve", "test_delayed_ranks", "test_covering", "test_peak_memory", "test_causal_attention",
    "test_ops_dispatch", "test_commute_weights", "test_zoo", "test_sabotage", "test_simulated_grid",
)  # fmt: skip
"""Files of few tests that take long: they begin first, so that neither of two processes waits for one in the end."""


def pytest_collection_modifyitems(items):
    """Tests that start processes of their own are marked ``gloo``: they run by themselves, the others two at a time."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    for item in items:
        if "gloo4" in item.fixturenames or item.path.name == "test_pool.py":
            item.add_marker(pytest.mark.gloo)


@pytest.fixture(scope="session")
def gloo4():
    """Four processes with a gloo process group, started at the first use: ``gloo4.run(fn, *args)``."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def failing_compiler(monkeypatch, tmp_path):
    """``MOEC_CC`` names a C compiler that says "no such target" and fails; gives the directory of what is compiled."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("MOEC_CC", str(broken))
    kernels = tmp_path / "kernels"
    monkeypatch.setenv("MOEC_KERNELS", str(kernels))
    return kernels
