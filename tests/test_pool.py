"""The pool itself: results by rank, exceptions as themselves, hangs reported and survived."""

import os
import signal
import time
from unittest import mock

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from pool import Pool, PoolHang

from moec import delayed, epilogue
from moec.runtime.errors import MoecError


def _sum(rank, world, x):
    y = x + rank
    dist.all_reduce(y)
    return y, os.getpid(), torch.get_num_threads()


def _raise(rank, world, ranks):
    if rank in ranks:
        raise MoecError(f"bad on {rank}", where="plan.tp", way_out="tp=1")
    return rank


def _raise_then_wait(rank, world):
    if rank == 1:
        raise MoecError("only here")
    dist.barrier()


def _raise_unpicklable(rank, world):
    class Local(Exception):
        pass

    raise Local("odd")


def _sleep(rank, world):
    if rank == 2:
        time.sleep(1000)


def _die(rank, world):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_replaced(rank, world):
    epilogue.dist = delayed.Histories.enter = None
    raise MoecError("not this one is told")


def _take_back(rank, world):
    with mock.patch.object(epilogue, "dist", None), mock.patch.object(delayed.Histories, "enter"):
        pass


def test_what_a_job_leaves_replaced(gloo4):
    gloo4.run(_take_back)
    left = "left replaced: moec.delayed.Histories.enter, moec.epilogue.dist$"
    with pytest.RaisesGroup(*[pytest.RaisesExc(AssertionError, match=left)] * 4):
        gloo4.run(_leave_replaced)


def test_results_by_rank_from_the_same_processes(gloo4):
    first = gloo4.run(_sum, torch.ones(3))
    again = gloo4.run(_sum, torch.zeros(2))
    assert [r[0].tolist() for r in first] == [[10.0] * 3] * 4
    assert [r[0].tolist() for r in again] == [[6.0] * 2] * 4
    assert len({r[1] for r in first}) == 4
    assert [r[1] for r in first] == [r[1] for r in again]
    assert {r[2] for r in first} == {1}


def test_moec_errors_arrive_whole_on_all_ranks(gloo4):
    errors = gloo4.run_raising(_raise, range(4))
    assert [e.message for e in errors] == [f"bad on {r}" for r in range(4)]
    assert {(e.where, e.way_out) for e in errors} == {("plan.tp", "tp=1")}
    assert gloo4.run(_raise, ()) == [0, 1, 2, 3]


@pytest.mark.nightly
def test_run_raising_wants_every_rank(gloo4):
    with pytest.raises(ExceptionGroup, match=r"ranks \[0, 3\] did not raise"):
        gloo4.run_raising(_raise, (1, 2))
    with pytest.raises(ExceptionGroup, match="every rank should raise MoecError"):
        gloo4.run_raising(_raise_unpicklable)


@pytest.mark.nightly
def test_an_exception_on_one_rank_while_others_wait(gloo4, monkeypatch):
    monkeypatch.setattr(pool_module, "GRACE", 1.0)
    with pytest.raises(PoolHang) as caught:
        gloo4.run(_raise_then_wait)
    text = str(caught.value)
    assert "only here" in text
    assert "ranks [0, 2, 3] did not answer" in text
    assert "_raise_then_wait" in text.split("--- stack of rank0")[1]


def test_a_hang_is_dumped_and_survived():
    pool = Pool(3)
    with pytest.raises(PoolHang, match=r"ranks \[2\] did not answer") as caught:
        pool.run(_sleep, timeout=1)
    assert "_sleep" in str(caught.value).split("--- stack of rank2")[1]
    pids = [r[1] for r in pool.run(_sum, torch.zeros(1))]
    with pytest.raises(ExceptionGroup) as died:
        pool.run(_die)
    assert "exit code -9" in died.value.exceptions[0].__notes__[0]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
