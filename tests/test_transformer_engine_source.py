"""FP8 products by Transformer Engine, against its own Python source, where that is installed: its functions take what
is passed, and its classes read what they are handed as moec meant it."""

import ast
import sys
from types import ModuleType

import pytest
import torch
from test_transformer_engine import source
from test_transformer_engine_fp8 import WITH_TE, draw

from moec.runtime import transformer_engine_fp8 as te_fp8
from moec.runtime.fp8 import Recipe
from moec.runtime.fp8.tiles import dequantised, quantised


@pytest.mark.nightly
@pytest.mark.parametrize("file", te_fp8.USED)
def test_signatures(file):
    """TE has what is used, with the parameters that are passed, and asks for no other; classes and answers are what its
    package exports."""
    tree = ast.parse(source(file).read_text()).body
    exported = source("pytorch/__init__.py").read_text()
    for name, passed in te_fp8.USED[file].items():
        found = next(n for n in tree if name in (getattr(n, "name", None), *map(_name, getattr(n, "targets", []))))
        if not passed:
            continue
        if isinstance(found, ast.ClassDef):
            found = next(n for n in found.body if getattr(n, "name", None) == "__new__")
        if file != "pytorch/cpp_extensions/gemm.py":
            assert f"import {name}\n" in exported
        arguments = found.args
        known = [a.arg for a in arguments.posonlyargs + arguments.args if a.arg != "cls"]
        required = known[: len(known) - len(arguments.defaults)]
        required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
        known += [a.arg for a in arguments.kwonlyargs]
        assert set(passed) <= set(known), f"{name} takes {known}"
        assert set(required) <= set(passed), f"{name} asks for {required}"


def _name(target):
    return getattr(target, "id", None)


class Compiled(type):
    """Of a class of TE's compiled part: whatever member is asked for, a number of its own."""

    def __init__(cls, *args):
        super().__init__(*args)
        cls.__members__ = {}

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.__members__.setdefault(name, len(cls.__members__))


class Anything(ModuleType):
    """A module that has whatever class is asked for."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Compiled(name, (), {}))


@pytest.fixture
def te_python(monkeypatch):
    """TE's Python, of its source, without its compiled part and what its packages do when they are imported."""
    root = source("pytorch/__init__.py").parent.parent
    packages = {"": ModuleType, ".common": Anything, ".pytorch": ModuleType, ".pytorch.tensor": ModuleType,
                ".pytorch.tensor.storage": ModuleType}  # fmt: skip
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    for name, kind in packages.items():
        package = kind("transformer_engine" + name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", Anything("transformer_engine_torch"))
    yield
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        sys.modules.pop(name)


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["rows", "grad", "weight"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", WITH_TE)
def test_te_reads_what_it_is_handed(te_python, recipe, turned, role):
    """TE's own Python gives back the values that moec means, of both layouts; MXFP8, which it reads by its compiled
    part alone, it wants in scales of these shapes."""
    how = Recipe.parse(recipe)
    x = draw(384, 256)  # of the shapes that it gives back it wants multiples of 128
    q, scale = quantised(x, how, role, turned)
    wanted = dequantised(q, scale, how, role, turned, torch.float32)
    q, scale, wanted = (t.t() if turned else t for t in (q, scale, wanted))
    made = te_fp8.operand(q, scale, how, role == "weight")
    if recipe != "mxfp8":
        assert torch.equal(made.dequantize(dtype=torch.float32), wanted)
        return
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    data, of_tiles = made._rowwise_data, made._rowwise_scale_inv
    assert tuple(of_tiles.shape) == tuple(MXFP8Quantizer.get_scale_shape(None, q.shape, columnwise=False))
    power = (of_tiles[: q.shape[0], : q.shape[1] // 32].int() - 127).repeat_interleave(32, 1)
    assert torch.equal(torch.ldexp(data.view(q.dtype).float(), power), wanted)
