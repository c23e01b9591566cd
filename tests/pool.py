"""A pool of processes with a gloo process group, started once and used by many tests.

``pool.run(fn, *args)`` calls the module-level function ``fn(rank, world, *args)`` in every process and returns the
results by rank.  The default process group is initialised (gloo, loopback only) and torch has one thread.

What goes wrong is reported, never waited for:

* an exception on any rank: all of them come back as an ``ExceptionGroup`` in rank order, each one with the remote
  traceback as a note (``MoecError`` arrives as itself);
* a hang, or ranks that still wait ``GRACE`` seconds after another one has raised: the stacks of all ranks are dumped,
  every worker is killed and ``PoolHang`` is raised; the next ``run`` starts new workers;
* a job that leaves something of moec replaced (a patch that was not taken back): later jobs would run with it;
* workers end by themselves when the process that started them is gone.

``pool.run_raising(fn, *args)`` asserts that *every* rank raises (``MoecError`` by default) and returns the exceptions.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moec.runtime.errors import MoecError

GRACE = 8.0
"""Seconds that the other ranks may go on after one of them has raised."""
START = 120.0
"""Seconds that the workers may take to start (importing torch four times on two cores)."""


class PoolHang(AssertionError):
    """Some ranks did not answer in time; the message has their stacks."""


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn, *args, timeout: float = 60) -> list[Any]:
        """Results of ``fn(rank, world, *args)`` by rank."""
        results, errors = self._call(fn, args, timeout)
        if errors:
            # A rank that left early may have left messages behind: no later test shall receive them.
            self.close()
            raise ExceptionGroup(f"{len(errors)} of {self.world} ranks raised", list(errors.values()))
        return [results[r] for r in range(self.world)]

    def run_raising(self, fn, *args, timeout: float = 60, expect: type[Exception] = MoecError) -> list[Any]:
        """The exceptions by rank; asserts that every rank raises ``expect`` and that none hangs."""
        results, errors = self._call(fn, args, timeout)
        wrong = [e for e in errors.values() if not isinstance(e, expect)]
        if results or wrong:
            self.close()
            calm = f"; ranks {sorted(results)} did not raise" if results else ""
            raise ExceptionGroup(f"every rank should raise {expect.__name__}{calm}", [*errors.values(), _Calm(calm)])
        try:
            self.run(_meet, timeout=GRACE)
        except (PoolHang, ExceptionGroup):
            self.close()  # they raised at different points of the program; the next run starts anew
        return [errors[r] for r in range(self.world)]

    def close(self) -> None:
        """Kill the workers; the next ``run`` starts new ones."""
        for w in self._workers:
            w.kill()
        for w in self._workers:
            w.join()
        for p in self._pipes:
            p.close()
        if self._stacks:
            self._stacks.cleanup()
        self._workers, self._pipes, self._store, self._stacks = [], [], None, None

    def _call(self, fn, args, timeout: float) -> tuple[dict[int, Any], dict[int, Exception]]:
        if not all(w.is_alive() for w in self._workers) or not self._workers:
            self.close()
            self._start()
        job = pickle.dumps((fn, args))
        try:
            for p in self._pipes:
                p.send_bytes(job)
            return self._collect(timeout, str(getattr(fn, "__qualname__", fn)))
        except BaseException:  # pytest's own timeout and Ctrl-C too: nothing may go on in the background
            self.close()
            raise

    def _collect(self, timeout: float, what: str) -> tuple[dict[int, Any], dict[int, Exception]]:
        results: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        rank_of = {p: r for r, p in enumerate(self._pipes)}
        end = time.monotonic() + timeout
        while rank_of:
            ready = wait(list(rank_of), max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(rank_of.values())
                raised = "".join("\n" + "".join(traceback.format_exception(e)) for e in errors.values())
                raise PoolHang(f"{what}: ranks {late} did not answer{raised}\n{self._dump()}")
            for p in ready:
                rank = rank_of.pop(p)
                try:
                    ok, value, remote = pickle.loads(p.recv_bytes())
                except EOFError:
                    ok, value, remote = False, RuntimeError("the process died"), f"exit code {self._exit_code(rank)}"
                if ok:
                    results[rank] = value
                else:
                    value.add_note(f"on rank {rank}:\n{remote}")
                    errors[rank] = value
                    end = min(end, time.monotonic() + GRACE)
        return results, dict(sorted(errors.items()))

    def _exit_code(self, rank: int) -> int | None:
        self._workers[rank].join(1)
        return self._workers[rank].exitcode

    def _dump(self) -> str:
        """The Python stacks of every worker, written by themselves on a signal."""
        assert self._stacks
        for w in self._workers:
            if w.is_alive():
                os.kill(w.pid, signal.SIGUSR1)
        time.sleep(0.5)
        files = sorted(Path(self._stacks.name).iterdir())
        return "\n".join(f"--- stack of {f.name}\n{f.read_text()}" for f in files)

    def _start(self) -> None:
        # The store lives here, so that it outlives the workers; port 0 takes a free one.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="moec-pool-")
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(
                target=_worker,
                args=(rank, self.world, self._store.port, theirs, f"{self._stacks.name}/rank{rank}", os.getpid()),
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        try:
            _, errors = self._collect(START, "start of the pool")
        except BaseException:
            self.close()
            raise
        if errors:
            self.close()
            raise ExceptionGroup("the pool did not start", list(errors.values()))


class _Calm(Exception):
    """Stands in the group for ranks that did not raise (a group may not be empty)."""


def _worker(rank: int, world: int, port: int, pipe: Connection, stacks: str, parent: int) -> None:
    stack_file = open(stacks, "w")  # noqa: SIM115  faulthandler keeps writing to it
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pipe.send_bytes(_guard(_join, rank, world, port))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_guard(_run_job, rank, world, job))


def _join(rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))


def _run_job(rank: int, world: int, job: bytes) -> Any:
    fn, args = pickle.loads(job)
    before = _attributes()
    try:
        return fn(rank, world, *args)
    finally:
        now = _attributes()
        if left := sorted(name for name, value in before.items() if now.get(name) is not value):
            raise AssertionError(f"{fn.__qualname__} left replaced: {', '.join(left)}")


def _attributes() -> dict[str, Any]:
    """What modules of moec and their classes have, by dotted name; submodules apart, which may be imported at any
    time."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "moec":
            for key, value in list(vars(module).items()):
                if f"{name}.{key}" in sys.modules or key.startswith("__"):
                    continue
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{k}": v for k, v in vars(value).items() if not k.startswith("__")}
    return found


def _meet(rank: int, world: int) -> None:
    dist.barrier()


def _guard(fn, *args) -> bytes:
    """Call and pickle ``(ok, value or exception, remote traceback)``; what does not survive pickling is described."""
    try:
        return pickle.dumps((True, fn(*args), ""))
    except BaseException as e:
        text = "".join(traceback.format_exception(e))
        try:
            blob = pickle.dumps((False, e, text))
            if isinstance(pickle.loads(blob)[1], Exception):
                return blob
        except Exception as why:
            text += f"\n(the exception itself does not pickle: {why})"
        return pickle.dumps((False, RuntimeError(f"{type(e).__name__}: {e}"), text))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    sys.stderr.flush()
    os._exit(1)
