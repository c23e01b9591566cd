"""Tiles: the table, the default, and ``moec tune``, which fills the one where kernels would take the other."""

import json

import pytest
import torch

import moec
from moec import MoecError
from moec.cli import main
from moec.runtime.kernels import tiles
from moec.runtime.kernels.tiles import Shape, Tile, choose, default
from moec.runtime.kernels.tune import Block, tune

SHAPE = Shape(768, 2048, 250, torch.bfloat16)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A machine with an sm_90 GPU, as far as the choice of tiles can see."""
    monkeypatch.setenv("MOEC_KERNELS", str(tmp_path))
    monkeypatch.setattr(tiles, "architecture", lambda index: "sm_90")
    tiles.table.cache_clear()
    yield tmp_path / "tiles.json"
    tiles.table.cache_clear()


def test_the_table_goes_before_the_default(table):
    gpu = torch.device("cuda", 0)
    assert choose("grouped_rows", SHAPE, gpu) == default("grouped_rows", SHAPE, "sm_90")
    tile = Tile(64, 256, 32, 4, 5)
    tiles.record(table, "sm_90", "grouped_rows", SHAPE, tile)
    tiles.record(table, "sm_100", "grouped_rows", Shape(1, 1, 1, torch.float32), Tile(16, 16, 16))
    tiles.table.cache_clear()
    assert choose("grouped_rows", SHAPE, gpu) == tile
    assert choose("grouped_rows", Shape(768, 2048, 129, torch.bfloat16), gpu) == tile, "the same bucket"
    for other in (Shape(768, 2048, 257, torch.bfloat16), Shape(768, 2048, 250, torch.float16)):
        assert choose("grouped_rows", other, gpu) == default("grouped_rows", other, "sm_90")
    assert choose("experts_forward", SHAPE, gpu) == default("experts_forward", SHAPE, "sm_90")


@pytest.mark.parametrize("text", ["[", '{"sm_90": {"router": {}}}', '{"sm_90": {"grouped_rows": {"x": [1]}}}', "[1]"])
def test_a_broken_table_is_refused(table, text):
    table.write_text(text)
    with pytest.raises(MoecError, match=r"tiles\.json[\s\S]*moec tune"):
        choose("grouped_rows", SHAPE, torch.device("cuda", 0))


def test_tune_keeps_the_fastest_tile_that_runs():
    pytest.importorskip("triton")
    from interpreter import repaired

    small, large = Tile(16, 32, 32), Tile(32, 32, 32)
    order = {small: 3.0, large: 2.0}
    ran = []

    def measure(run):
        tile = run.__defaults__[1]
        if tile not in order:
            raise RuntimeError("out of shared memory")
        with repaired():
            ran.append(run())
        return order[tile]

    block = Block(experts=2, hidden=32, width=16, top_k=1, tokens=8, dtype=torch.float32)
    found = tune(block, torch.device("cpu"), (small, large, Tile(1024, 1024, 64)), measure)
    assert len(ran) == 12, "six kernels, two tiles that run"
    assert {(f.tile, f.milliseconds, f.tried) for f in found} == {(large, 2.0, 2)}
    assert [(f.family, f.shape.columns, f.shape.depth, f.shape.rows) for f in found] == [
        ("experts_forward", 16, 32, 4),
        ("grouped_rows", 32, 16, 4),
        ("experts_backward", 16, 32, 4),
        ("grouped_rows", 32, 32, 4),
        ("grouped_outer", 32, 32, 4),
        ("grouped_outer", 32, 16, 4),
    ]
    with pytest.raises(MoecError, match="no tile runs; the last one: RuntimeError: out of shared memory"):
        tune(block, torch.device("cpu"), (Tile(1024, 1024, 64),), measure)


def test_what_tune_found_is_what_the_kernels_look_for(monkeypatch):
    """The keys that a step asks the table for are those that ``tune`` records."""
    pytest.importorskip("triton")
    from interpreter import repaired

    from moec.runtime.kernels import experts, grouped

    asked = set()

    def record(family, shape, device):
        asked.add((family, shape.key()))
        return Tile(32, 32, 32)

    block = Block(experts=2, hidden=32, width=16, top_k=1, tokens=8, dtype=torch.float32)
    found = tune(block, torch.device("cpu"), (Tile(32, 32, 32),), lambda run: 1.0)
    monkeypatch.setattr(experts, "choose", record)
    monkeypatch.setattr(grouped, "choose", record)
    x, w_in, w_out = torch.randn(8, 32), torch.randn(2, 32, 32), torch.randn(2, 16, 32)
    weights, body = torch.ones(8, 1), "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t = mul(g, u); return t"
    with repaired():
        y, h, row_of, counts = experts.forward(x, torch.zeros(8, 1).long(), weights, [w_in], [], w_out, None, body)
        experts.backward(y, x, weights, [w_in], [], w_out, None, h, row_of, counts, body, [True] * 4)
    assert asked == {(f.family, f.shape.key()) for f in found}


@pytest.mark.parametrize("fp8", ["blockwise", "mxfp8", "current"])
def test_fp8_products_are_tuned(monkeypatch, fp8):
    """The keys of the table that a step's products ask for are those that ``tune`` records."""
    pytest.importorskip("triton")
    from interpreter import repaired

    from moec.runtime.fp8 import Recipe
    from moec.runtime.kernels import scaled
    from moec.runtime.kernels.scaled_tune import candidates

    recipe, cpu = Recipe.parse(fp8), torch.device("cpu")
    tile = Tile(64, 64, recipe.block or 64)
    block = Block(experts=2, hidden=48, width=16, top_k=1, tokens=8, dtype=torch.bfloat16, fp8=fp8)
    with repaired():
        found = tune(block, cpu, (tile,), lambda run: run() is None)
    assert len(found) == 6 and all(t.k in (recipe.block or t.k,) for t in candidates(recipe, cpu))
    asked = set()
    monkeypatch.setattr(scaled, "choose", lambda family, shape, device: asked.add((family, shape.key())) or tile)
    ops = torch.ops.moec
    x = ops.align_rows(torch.randn(8, 48), counts := torch.tensor([4, 4]), recipe.alignment)
    act, d, g = (x.new_zeros(x.shape[0], n) for n in (16, 32, 48))

    def both(t, role):
        return ops.quantise(t, None, None, counts if role != "stack" else None, fp8, role, True)[1:]

    with repaired():
        for rows, columns, grad in ((x, 32, d), (act, 48, g)):
            a, b, c = both(rows, "rows"), both(torch.randn(2, rows.shape[1], columns), "stack"), both(grad, "grad")
            more = (counts, recipe, torch.bfloat16)
            scaled.grouped_rows(*a[:2], *b[:2], *more)
            scaled.grouped_rows(*c[:2], *(t.transpose(1, 2) for t in b[2:]), *more)
            scaled.grouped_outer(*c[2:], *a[2:], *more)
    assert asked == {(f.family, f.shape.key()) for f in found}


def test_without_a_gpu_tune_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    sizes = {"experts": 8, "hidden": 64, "width": 32, "top_k": 2, "tokens": 64}
    with pytest.raises(MoecError, match=r"no GPU[\s\S]*way out"):
        moec.tune(**sizes)
    with pytest.raises(MoecError, match="dtype='float64'"):
        moec.tune(**sizes, dtype="float64")
    with pytest.raises(MoecError, match="'nvfp4' is no FP8 recipe"):
        moec.tune(**sizes, fp8="nvfp4")
    with pytest.raises(MoecError, match="is no block"):
        moec.tune(**sizes | {"top_k": 9})
    argv = [a for k, v in sizes.items() for a in (f"--{k.replace('_', '-')}", str(v))]
    assert main(["tune", *argv]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_the_table_that_ships_is_one():
    path = tiles.Path(tiles.__file__).parent / "tiles.json"
    assert tiles.read(path) == json.loads(path.read_text())
