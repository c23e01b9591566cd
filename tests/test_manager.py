"""The pass manager: schedules are validated before anything runs; every pass is checked; the dump is readable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from spmd import STAGES, Shape, captured, compile_stages

from moec import compiler
from moec.compiler import PIPELINE, compile_program
from moec.passes import manager
from moec.passes.contract import Pass, PassContract
from moec.passes.lower import lower
from moec.passes.normalize import normalize
from moec.passes.raise_moe import raise_moe
from moec.passes.shard import shard
from moec.plan import Plan
from moec.program import op_name
from moec.runtime.errors import MoecError

PLAN = Plan(2, 2, 2, 2)


def make(name, run=lambda p, plan: p, **contract) -> Pass:
    return Pass(PassContract(name, **{k: frozenset(v) for k, v in contract.items()}), run)


def never(program, plan):
    raise AssertionError("a pass of an invalid schedule ran")


@pytest.mark.parametrize(
    ("passes", "texts"),
    [
        ([shard, normalize], ["shard requires ['normalized', 'raised']", "normalize must not run after ['sharded']"]),
        ([lower], ["lower requires ['sharded'], but only ['captured'] holds before it"]),
        ([normalize, raise_moe, shard, lower, lower], ["lower must not run after ['lowered']"]),
        ([normalize, shard], ["shard requires ['raised']"]),
    ],
    ids=lambda x: "-".join(p.name for p in x) if isinstance(x[0], Pass) else "",
)
def test_a_wrong_schedule_is_refused_whole(passes, texts) -> None:
    with pytest.raises(MoecError) as e:
        manager.validate_schedule({"captured"}, passes)
    assert all(t in str(e.value) for t in texts)
    assert e.value.where == "schedule" and e.value.way_out


def test_nothing_runs_before_the_schedule_is_known_to_hold() -> None:
    with pytest.raises(MoecError, match="second requires"):
        manager.run(captured(Shape()).fork(), PLAN, [make("first", never), make("second", requires={"nowhere"})])


def test_the_pipeline_is_a_right_schedule() -> None:
    manager.validate_schedule({"captured"}, PIPELINE)
    names = "normalize causal_attention raise_moe raise_router configure_router statistics shard redundant bundle"
    names += " cast_bf16 fsdp chunk_experts pipeline_tp cast_fp8 commute_quantise units use_transformer_engine"
    names += " fuse_router fuse_experts fuse_quantise fuse_permute fuse_cross_entropy fuse_norm fuse_tp lower"
    assert " ".join(p.name for p in PIPELINE) == names
    changing = ["configure_router", "cast_fp8", "commute_quantise"]
    assert [p.name for p in PIPELINE if not p.contract.preserves_values] == changing


def test_who_names_the_pipeline_names_all_of_it() -> None:
    names = [*(p.name for p in PIPELINE), "expand", "rejoin"]
    document = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    for text in (compiler.__doc__, document.partition("    capture →")[2]):
        pipeline = text.partition("ParallelModule")[0]
        assert [w for w in re.findall(r"\w+", pipeline) if w in names] == names


def test_facts_follow_the_contracts_and_observers_see_every_stage() -> None:
    stages = compile_stages(captured(Shape()), PLAN)
    names = list(STAGES)
    assert [n for n, _ in stages] == names
    facts = [sorted(p.facts) for _, p in stages]
    assert facts[0] == ["captured"] and set(facts[-1]) >= {"captured", "normalized", "raised", "sharded", "lowered"}
    assert len({id(p.graph) for _, p in stages}) == len(stages), "each pass works on a fork"


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    def breaks(program, plan):
        node = next(n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "aten.topk")
        item = next(iter(node.users))
        item.meta["val"] = item.meta["val"].to(torch.float64)
        with program.graph.inserting_before(item):
            program.graph.call_function(torch.ops.aten.clone.default, (node.args[0],)).meta.update(node.args[0].meta)
        return program

    seen = []
    with pytest.raises(MoecError, match=r"the graph after this pass does not hold.*float64") as e:
        manager.run(captured(Shape()).fork(), PLAN, [make("breaker", breaks)], observe=lambda n, p: seen.append(n))
    assert "pass breaker" in str(e.value) and "layers.0.moe" in str(e.value)
    assert seen == ["captured"]


def dumped(tmp_path) -> dict[str, str]:
    return {p.name: p.read_text() for p in tmp_path.iterdir()}


def test_the_dump(tmp_path) -> None:
    program = captured(Shape()).fork()
    program.mesh = PLAN.mesh(4)
    program.why_not.append("layers.0.moe: not fused, because it is a test")
    manager.run(program, PLAN, PIPELINE, dump=tmp_path / "new" / "folder")
    files = dumped(tmp_path / "new" / "folder")
    names = list(STAGES)
    assert set(files) == {f"{i:02d}_{n}.txt" for i, n in enumerate(names)} | {
        f"{i:02d}_{n}.ops" for i, n in enumerate(names) if i
    } | {"why_not.txt"}
    assert files["why_not.txt"] == "layers.0.moe: not fused, because it is a test\n"
    # Readable: one line a node, with shape, types and module.
    assert "# layers.0.attention.q\n" in files["06_shard.txt"]
    assert "= moec.permute(" in files["06_shard.txt"] and "= moec.permute(" in files["00_captured.txt"]
    assert "dp_ep:S(0) tp_etp:I" in files["06_shard.txt"] and "dp_ep:S(0)" not in files["01_normalize.txt"]
    line = next(x for x in files["06_shard.txt"].splitlines() if "= layers.0.moe.gate_up" in x)
    assert "float32[6, 48, 12]" in line and "S(1,parts=2)" in line
    # The difference between neighbours, op by op.
    assert "moec.all_to_all: 0 -> 2 (+2)\n" in files["06_shard.ops"]
    assert "aten.cross_entropy_loss" not in files["01_normalize.ops"]
    assert files["03_raise_moe.ops"] == "no op count changed\n"
    before, after = (files[f"{n}.txt"] for n in ("05_statistics", "06_shard"))
    for row in files["06_shard.ops"].splitlines():
        op, counts = row.split(": ")
        old, new = counts.split(" (")[0].split(" -> ")
        assert before.count(f"= {op}(") == int(old) and after.count(f"= {op}(") == int(new)


def test_a_failing_pass_leaves_its_graph_in_the_dump(tmp_path) -> None:
    def breaks(program, plan):
        node = next(n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "aten.embedding")
        with program.graph.inserting_after(node):
            method = program.graph.call_method("double", (node,))
        node.replace_all_uses_with(method, delete_user_cb=lambda user: user is not method)
        return program

    with pytest.raises(MoecError, match="may branch"):
        manager.run(captured(Shape()).fork(), PLAN, [make("breaker", breaks)], dump=tmp_path)
    assert "double" in dumped(tmp_path)["01_breaker.txt"]


def test_nothing_declined_is_said_too(tmp_path, monkeypatch) -> None:
    """``MOEC_DUMP`` names the folder when the call does not."""
    monkeypatch.setenv("MOEC_DUMP", str(tmp_path))
    compile_program(torch.nn.Sequential(torch.nn.Linear(4, 4)), Plan(2), 2, (torch.randn(2, 4),), {}, training=True)
    assert dumped(tmp_path)["why_not.txt"] == "nothing was declined\n"


def test_a_pass_that_changes_only_the_contract_is_checked_too() -> None:
    """The graph's text stays the same; what it is owed does not."""
    program = compile_stages(captured(Shape()), PLAN)[-1][1]
    after = program.fork()
    assert not manager._changed(program, after)
    after.grad_reductions.popitem()
    assert manager._changed(program, after)
