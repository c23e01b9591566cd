"""Two hosts on one machine: network namespaces joined by a virtual cable of a given speed.

    with two_hosts() as lab:
        lab.torchrun("worker.py", ["--json"], ranks_per_host=1)

Each host is a network namespace of its own with one end of a veth pair, shaped by tbf in both directions; nothing of
the machine's own network is touched.  What is true of two machines is true of them: processes of one host reach those
of the other over the cable alone, and ``torchrun --nnodes 2`` meets over it.  Each has half of the machine's cores
(``cores``), and they share its memory.  Whatever happens (an exception, Ctrl-C, SIGTERM), processes are ended and the
namespaces removed.

Needs root and Linux's ``ip`` and ``tc`` (iproute2) with tbf; :func:`why_not` says what lacks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

HOSTS = ("a", "b")
ADDRESSES = ("10.255.77.1", "10.255.77.2")
"""Of the two ends; no other network is reachable from inside, so they clash with nothing."""
CABLE = "cable0"
PORT = 29400
PACKET = 256 << 10
"""Bytes.  4 MB each way beside matrix products take 6 to 7 ms from them at 64 KB, 3 to 5 ms at this."""
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""glibc keeps memory that was freed, as the allocators of GPUs do.  Otherwise it returns some of it to the system and
takes it back in the next step, as chance has it, which costs as much as the ops that write there."""


class LabError(RuntimeError):
    """The lab cannot be built here, or what ran in it failed."""


@dataclass(frozen=True)
class Lab:
    namespaces: tuple[str, str]

    def torchrun(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        ranks_per_host: int = 1,
        threads: int = 1,
        timeout: float = 600,
        environment: dict[str, str] | None = None,
    ) -> str:
        """``script`` under torchrun on both hosts; what the first host's ranks printed.

        Raises LabError, with the ends of both outputs, if a host fails or does not end in time."""
        hosts = []
        for index, namespace in enumerate(self.namespaces):
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes=2", f"--node-rank={index}", f"--nproc-per-node={ranks_per_host}"]
            command += [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", str(script), *arguments]
            more = {**KEEP_MEMORY, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": str(threads), **(environment or {})}
            into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
            hosts.append(subprocess.Popen(command, env=os.environ | more, preexec_fn=_on(cores(index)), **into))
        try:
            outputs = _outputs(hosts, timeout)
        finally:
            for host in hosts:
                _end(host)
        if any(host.returncode for host in hosts):
            ends = "\n".join(f"--- host {h}\n{o[-6000:]}" for h, o in zip(HOSTS, outputs, strict=True))
            raise LabError(f"{Path(script).name} failed\n{ends}")
        return outputs[0]


def cores(host: int) -> set[int]:
    """Which of the machine's cores a host has; with only one, both have that.

    Left to the kernel, a rank that wakes up may be put where the other host's rank computes, although its own core is
    free: the two are then up to 24 ms apart within a layer of 150 ms, and each waits for the other (measured)."""
    usable = sorted(os.sched_getaffinity(0))
    half = len(usable) // 2
    return set(usable[:half] if host == 0 else usable[half : 2 * half]) or set(usable)


def _on(own: set[int]) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, own)


def why_not() -> str | None:
    """Why this machine cannot be two hosts, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts():
            return None
    except LabError as e:
        return str(e)


@contextlib.contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Lab]:
    """The lab, for as long as the block lasts.  ``rate``: of the cable, each way, as ``tc`` spells it.

    Raises LabError, and leaves nothing behind, where it cannot be built."""
    names = tuple(f"moec-{uuid4().hex[:8]}-{host}" for host in HOSTS)
    with _terminable(), contextlib.ExitStack() as made:
        for name in names:
            _tool("ip", "netns", "add", name)
            made.callback(_tool, "ip", "netns", "del", name)
        _join(names, rate)
        yield Lab((names[0], names[1]))


def _join(names: tuple[str, ...], rate: str) -> None:
    ends = [["name", CABLE, "netns", name] for name in names]
    _tool("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for name, address in zip(names, ADDRESSES, strict=True):
        _tool("ip", "-n", name, "address", "add", f"{address}/30", "dev", CABLE)
        for device in ("lo", CABLE):
            _tool("ip", "-n", name, "link", "set", device, "up")
        _tool("ip", "netns", "exec", name, sys.executable, str(Path(__file__).with_name("lab_packets.py")), str(PACKET))
        shaped = ("root", "tbf", "rate", rate, "burst", str(2 * PACKET), "latency", "100ms")
        _tool("tc", "-n", name, "qdisc", "replace", "dev", CABLE, *shaped)


def _tool(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise LabError(f"{command[0]} not found (iproute2)") from None
    except subprocess.CalledProcessError as e:
        raise LabError(f"`{' '.join(command)}`: {e.stderr.strip()}") from None


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM raises, so that what has been started is ended."""

    def stop(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _outputs(hosts: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    """What the hosts print, until both have ended, or one has failed, or time is over."""
    texts: list[list[str]] = [[] for _ in hosts]
    readers = [
        threading.Thread(target=lambda h=h, t=t: t.extend(h.stdout), daemon=True)
        for h, t in zip(hosts, texts, strict=True)
    ]
    for reader in readers:
        reader.start()
    end = time.monotonic() + timeout
    while any(h.poll() is None for h in hosts) and not any(h.poll() for h in hosts):
        if time.monotonic() > end:
            ends = "\n".join("".join(t)[-6000:] for t in texts)
            raise LabError(f"not done after {timeout:.0f} s\n{ends}")
        time.sleep(0.05)
    for host in hosts:  # the peer of one that failed would wait for it
        _end(host, patience=5.0 if any(h.poll() for h in hosts) else 0.0)
    for reader in readers:
        reader.join(10)
    return ["".join(t) for t in texts]


def _end(host: subprocess.Popen[str], patience: float = 0.0) -> None:
    """End a host's processes, all of which are in its session's group, if they have not ended by themselves."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.wait(patience)
        return
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(5)
            return
