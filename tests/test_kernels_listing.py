"""Which kernels a program runs: written with the dump, the same that a step launches, the same that CI compiles."""

import ast

import pytest
import torch
from user_models import Regression, floats

import moec
from moec.runtime.kernels import block, experts, experts_catalog, grouped_gemm, grouped_outer, tiles
from moec.runtime.kernels.block import Block
from moec.runtime.kernels.source import HEADER


@pytest.mark.parametrize(("plan", "world", "op"), [({}, 1, "experts"), ({"dp": 2, "ep": 2}, 2, "experts_rows")])
def test_a_dump_has_the_kernels_and_says_whose_they_are(tmp_path, plan, world, op):
    moec.compile_program(Regression(), moec.Plan(**plan), world, floats(4), {}, training=True, dump=tmp_path)
    lines = (tmp_path / "kernels" / "index.txt").read_text().splitlines()
    assert len(lines) == 7, "a node and its six kernels"
    assert f"(moec.{op}) of moe" in lines[0]
    assert lines[0].endswith(": " + (body := lines[0].partition(": ")[2]))
    assert "gelu(" in body
    for line in lines[1:]:
        file, _, _ = line.strip().partition(": ")
        text = (tmp_path / "kernels" / file).read_text()
        assert text.startswith(HEADER)
        about = ast.get_docstring(ast.parse(text))
        assert about.startswith("moec::experts")
        if file.startswith("experts_forward"):
            assert body.replace("; ", "\n") in about
        if op == "experts_rows":
            assert "pair_ptr" not in text


@pytest.mark.nightly
def test_a_program_without_fused_experts_writes_no_kernels(tmp_path):
    moec.compile_program(Regression(), moec.Plan(fuse=False), 1, floats(4), {}, training=True, dump=tmp_path)
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("name", ["gpt_oss", "two_weights"])
@pytest.mark.parametrize("pairs", [True, False])
def test_what_is_compiled_ahead_of_time_is_what_a_step_launches(monkeypatch, name, pairs):
    """Every kernel of a step, forward and backward, by its whole text."""
    (model,) = (m for m in experts_catalog.MODELS if m.name == name)
    b = model.block()
    launched: dict[object, None] = {}
    for module in (grouped_gemm, grouped_outer):
        monkeypatch.setattr(module, "launch", lambda spec, *_, **__: launched.setdefault(spec))
    for small in ("sum_choices", "zero_tail", "choice_dot", "grouped_sum"):
        monkeypatch.setattr(getattr(experts, small), "launch", lambda *tensors: tensors[-1])
    monkeypatch.setattr(experts, "choose", lambda family, shape, _: tiles.default(family, shape, "sm_90"))
    monkeypatch.setattr(experts.ops, "check", lambda *_: None)
    with torch.device("meta"):
        monkeypatch.setattr(experts.order, "of_ids", lambda ids, E, _: experts.order.Order(ids, ids, ids, ids[0]))
        monkeypatch.setattr(experts.order, "experts", lambda *_: torch.empty(1))
        E, H, C, K, N = b.experts, b.hidden, b.columns, b.choices, model.tokens * b.choices
        w_in = [torch.empty_strided((E, H, m), s, dtype=b.dtype) for m, s in zip(b.widths, b.strides_in, strict=True)]
        w_out = torch.empty_strided((E, model.I, C), b.strides_out, dtype=b.dtype)
        b_in = [torch.empty(E, m, dtype=b.dtype) for m in b.widths] if b.bias_in else []
        weights = (w_in, b_in, w_out, torch.empty(E, C, dtype=b.dtype) if b.bias_out else None)
        need = [True] * (len(w_in) + len(b_in) + 1 + b.bias_out)
        h, counts = torch.empty(N, sum(b.widths), dtype=b.dtype), torch.empty(E, dtype=torch.int64)
        if pairs:
            x, ids = torch.empty(model.tokens, H, dtype=b.dtype), torch.empty(model.tokens, K, dtype=torch.int64)
            share = torch.empty(model.tokens, K)
            monkeypatch.setattr(experts.choice_dot, "launch", lambda *_: share)
            experts.forward(x, ids, share, *weights, b.body)
            experts.backward(x, x, share, *weights, h, ids, counts, b.body, [True, True, *need])
        else:
            x = torch.empty(N, H, dtype=b.dtype)
            monkeypatch.setattr(experts.order, "checked_offsets", lambda counts, *_: counts)
            experts.rows_forward(x, counts, *weights, b.body)
            experts.rows_backward(x, x, *weights, h, counts, b.body, [True, *need])
    wanted = block.specs(b if pairs else Block(**vars(b) | {"choices": 0}), "sm_90")
    assert sorted(map(block.source, launched)) == sorted(map(block.source, wanted.values()))


class Wide(Regression):
    """Widths that tensor cores take, but for the first and the last."""

    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 16))
        for expert in self.moe.experts:
            expert.up, expert.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)


@pytest.mark.parametrize(("recipe", "linear", "experts"), [
    ("blockwise", 3, 3), pytest.param("current", 0, 2, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_dump_has_generated_fp8_products(tmp_path, recipe, linear, experts):
    """Of linears and of experts, forward and backward; those that torch computes are not there."""
    plan = moec.Plan(precision=moec.Precision(compute="bf16", fp8=recipe, exclude=()))
    moec.compile_program(Wide(), plan, 1, floats(4), {}, training=True, dump=tmp_path)
    nodes, found = [], []
    for line in (tmp_path / "kernels" / "index.txt").read_text().splitlines():
        if line.startswith(" "):
            file, _, what = line.strip().partition(": ")
            assert "FP8 into bfloat16" in ast.get_docstring(ast.parse((tmp_path / "kernels" / file).read_text()))
            found[-1].append(what)
        else:
            nodes.append(line)
            found.append([])
    assert sum(map(len, found)) == linear + 2 * experts
    assert all(line.endswith(": FP8 products") for line in nodes)
