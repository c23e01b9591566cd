"""Two hosts with a network between them: torchrun starts on both, a step is exact, and nothing is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import lab  # noqa: E402

WORKER = HERE / "two_hosts_worker.py"
HANGS = 240
"""Seconds after which hosts that wait for each other are given up."""


@pytest.fixture(scope="module")
def hosts():
    if reason := lab.why_not():
        pytest.skip(reason)
    with lab.two_hosts() as built:
        yield built


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.gloo
def test_a_step_on_two_hosts(hosts):
    said = hosts.torchrun(WORKER, timeout=HANGS)
    result = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert result["world"] == 2
    assert result["worst"] < 1e-4  # float32
    first, second = map(set, result["cores"])
    assert first and second and (len(os.sched_getaffinity(0)) == 1 or not first & second)


@pytest.mark.gloo
def test_a_host_that_fails_ends_the_other(hosts):
    with pytest.raises(lab.LabError, match="on purpose") as raised:
        hosts.torchrun(WORKER, ["--fail"], timeout=HANGS)
    assert "not done after" not in str(raised.value)


def test_hosts_see_each_other_and_nothing_else(hosts):
    def reaches(address):
        return not subprocess.run(
            ["ip", "netns", "exec", hosts.namespaces[0], sys.executable, "-c", CONNECT, address], check=False
        ).returncode

    assert reaches(lab.ADDRESSES[1])
    assert not reaches("192.0.2.1")
    shape = subprocess.run(["tc", "-n", hosts.namespaces[0], "qdisc"], capture_output=True, text=True, check=True)
    assert "tbf" in shape.stdout and "rate 1Gbit" in shape.stdout


CONNECT = """
import errno, socket, sys
s = socket.socket()
s.settimeout(3)
sys.exit(s.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)  # refused: somebody is there
"""


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_behind(error):
    if reason := lab.why_not():
        pytest.skip(reason)
    before = namespaces()

    def use():
        with lab.two_hosts() as built:
            assert all(n in namespaces() for n in built.namespaces)
            raise error

    with pytest.raises(error):
        use()
    assert namespaces() == before


def test_without_rights_or_tools_it_says_so(monkeypatch):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    assert "root" in lab.why_not()
    monkeypatch.setenv("PATH", "")
    assert "ip and tc not found" in lab.why_not()
    with pytest.raises(lab.LabError, match="ip not found"), lab.two_hosts():
        pass


def test_an_order_agrees_case_by_case():
    import two_hosts

    def row(case, plan, predicted, measured):
        return {"case": case, "plan": plan, "predicted_s": predicted, "measured_s": measured}

    rows = [row("a", "x", 1.0, 1.1), row("a", "y", 2.0, 2.1), row("b", "x", 0.5, 5.0)]
    assert two_hosts.order_agrees(rows)
    assert not two_hosts.order_agrees([*rows, row("a", "z", 1.5, 1.0)])
