"""The commands: exit status, what they print, what they refuse.  In this process; one test starts the module."""

import json
import subprocess
import sys

import pytest
import torch
from spmd import STAGES

from moec import cli, compiler
from moec.passes.contract import Pass

MODEL = """
import torch
from capture_models import Model, WhereIndexAdd

def make_model():
    ids = torch.randint(0, 20, (4, 7))
    labels = ids.clone()
    labels[0] = -100
    return Model(WhereIndexAdd(experts=4)), (), {"ids": ids, "labels": labels}

def no_examples():
    return Model(WhereIndexAdd(experts=4))
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plan.yaml").write_text("tp: 2\nep: 4\n")
    return tmp_path


def check(files, *more, function="make_model"):
    return cli.main(["check", f"{files}/model.py:{function}", "--plan", f"{files}/plan.yaml", "--world", "4", *more])


def test_a_plan_that_holds(files, capsys):
    assert check(files, "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["ok"]
    assert report["plan"] == {"dp": 2, "tp": 2, "ep": 4, "etp": 1}
    names = list(STAGES)
    assert [p["name"] for p in report["passes"]] == names
    assert all(p["grads"]["layers.0.experts.*.w1.weight"] < 1e-12 for p in report["passes"])
    assert check(files, "--ep", "1") == 0  # degrees given in words win over the file's
    out = capsys.readouterr().out
    assert "'tp': 2, 'ep': 1, 'etp': 2" in out or "'tp': 2, 'etp': 2" in out
    assert "ok: all within 1e-12" in out


def broken(name, run):
    """The pipeline with one pass that does something else after what it should do."""

    def one(p):
        if p.contract.name != name:
            return p

        def both(program, plan):
            program = p.run(program, plan)
            run(program)
            program.module.recompile()
            return program

        return Pass(p.contract, both)

    return tuple(one(p) for p in compiler.PIPELINE)


def detach_a_norm(program):
    placeholder = next(p for p in program.placeholders() if program.params.get(p.name, p).name == "norms.0.weight")
    with program.graph.inserting_after(placeholder):
        cut = program.graph.call_function(torch.ops.aten.detach.default, (placeholder,))
    cut.meta.update(placeholder.meta)
    placeholder.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)


def another_activation(program):
    node = next(n for n in program.graph.nodes if "silu" in str(n.target))
    node.target = torch.ops.aten.relu.default


@pytest.mark.parametrize(
    ("name", "run", "parameter"),
    [("raise_moe", detach_a_norm, "norms.0.weight"), ("normalize", another_activation, "layers.0.")],
)
def test_a_broken_pass_is_named_with_the_parameter(files, capsys, monkeypatch, name, run, parameter):
    monkeypatch.setattr(compiler, "PIPELINE", broken(name, run))
    assert check(files, "--json") == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not report["ok"]
    where, what, error = report["first_failure"]
    assert where == name
    assert what.startswith(parameter)
    assert error > 1e-3
    assert check(files) == 1
    assert f"FAILED after {name}: {parameter}" in capsys.readouterr().out


def test_what_is_refused(files, capsys):
    def refused(status, *texts):
        assert status == 2
        err = capsys.readouterr().err
        assert err.startswith("refused: ")
        for t in texts:
            assert t in err

    refused(check(files, "--tp", "3"), "tp=3 does not divide the 4 ranks", "way out")
    refused(check(files, "--tp", "1", "--ep", "8"), "ep*etp = 8*1")
    refused(check(files, function="no_examples"), "no dummy_inputs", "way out")
    refused(check(files, function="nothing"), "defines no nothing")
    refused(cli.main(["check", "--world", "4"]), "name one model")
    refused(cli.main(["check", "absent.py:f", "--world", "4"]), "is not FILE.py:function")
    refused(check(files, "--plan", f"{files}/absent.yaml"), "absent.yaml")
    (files / "bad.yaml").write_text("tp: 2\nepp: 4\n")
    refused(check(files, "--plan", f"{files}/bad.yaml"), "'epp' (did you mean 'ep'?)")


def test_explain(files, capsys):
    plan = ["--plan", f"{files}/plan.yaml", "--world", "4"]
    assert cli.main(["explain", f"{files}/model.py:make_model", *plan, "--json"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {c["phase"] for c in data["collectives"]} == {"forward", "backward", "epilogue"}
    assert cli.main(["explain", f"{files}/model.py:make_model", *plan]) == 0
    assert "all_to_all" in capsys.readouterr().out


@pytest.mark.nightly
def test_hugging_face_architecture_as_a_command():
    command = [sys.executable, "-m", "moec.cli", "check", "--hf", "mixtral", "--layers", "1", "--world", "4"]
    done = subprocess.run(
        [*command, "--tp", "2", "--ep", "4", "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["world_size"] == 4
    assert any("layers.0." in n for n in report["passes"][-1]["grads"])
    assert not any("layers.1." in n for n in report["passes"][-1]["grads"])
