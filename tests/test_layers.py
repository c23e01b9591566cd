"""Who may import whom, and what no file may say.

The layers of docs/architecture.md, read from the source text (imports inside functions and under TYPE_CHECKING count):

1. ``runtime`` imports nothing else of moec;
2. ``passes`` import the runtime, the IR (program, plan, router, overlap, precision, placement), the cost model, which
   imports no more than these, and each other;
3. outside ``passes``, only ``moec.compiler`` imports passes; the command line imports the public API alone;
4. no cycle of imports between files;
5. private torch names (a part that starts with one underscore) only in ``runtime/torch_compat.py``;
6. no path of somebody's machine in any file;
7. memory that ``runtime`` and ``passes`` allocate has a dtype that they name: the default is the user's to set.
"""

import ast
import re
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"moec": ROOT / "moec", "moec.passes": ROOT / "passes", "moec.runtime": ROOT / "runtime"}
COMPAT = "moec.runtime.torch_compat"
IR = (
    "moec.program", "moec.step", "moec.plan", "moec.router", "moec.overlap", "moec.precision", "moec.placement",
    "moec.cost",
)  # fmt: skip

# Private by spelling, public by use:
ALLOWED_PRIVATE = (
    "torch.ops.",  # names of operators (torch.ops._c10d_functional), not of Python objects
    "torch.utils._pytree",  # torch.export's public signatures are made of its TreeSpec; torch documents this spelling
    "torch._check",  # documented: how a program states a fact about a symbolic size
)

ALLOCATE = ("empty", "zeros", "ones", "full")


@cache
def sources() -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for package, folder in PACKAGES.items():
        for f in sorted(folder.rglob("*.py")):
            parts = f.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = f
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text())


def imported(module: str, code: ast.Module, is_package: bool) -> list[tuple[str, str | None]]:
    """``(module, name)`` of every import: ``import a.b`` is (a.b, None), ``from a import b`` is (a, b)."""
    out: list[tuple[str, str | None]] = []
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            out += [(a.name, None) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if is_package else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                base = f"{package}.{base}" if base else package
            out += [(base, a.name) for a in node.names]
    return out


@cache
def edges(module: str) -> frozenset[str]:
    """The moec modules that ``module`` imports; ``from package import submodule`` is the submodule."""
    is_package = sources()[module].name == "__init__.py"
    out = set()
    for base, name in imported(module, tree(module), is_package):
        target = f"{base}.{name}" if name and f"{base}.{name}" in sources() else base
        if target.split(".")[0] == "moec":
            out.add(target)
    return frozenset(out)


def inside(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def forbidden(module: str, target: str) -> str | None:
    """Why ``module`` may not import ``target``, or None."""
    if inside(module, "moec.runtime"):
        return None if inside(target, "moec.runtime") else "the runtime imports nothing else of moec"
    if inside(module, "moec.passes"):
        return None if inside(target, "moec.runtime", "moec.passes", *IR) else "passes import the runtime and the IR"
    if inside(module, "moec.cost"):
        return None if inside(target, "moec.runtime", *IR) else "the cost model imports the runtime and the IR"
    if module == "moec.cli":
        # moec.hf builds the models that `--hf` names: it belongs to the command line.
        return None if target in ("moec", "moec.hf") else "the command line imports the public API alone"
    if inside(target, "moec.passes") and module != "moec.compiler":
        return "only moec.compiler imports passes"
    return None


def private_torch_names(code: ast.Module) -> list[str]:
    """Dotted torch names with a private part, imports and attribute chains alike."""
    alias: dict[str, str] = {}
    names: list[str] = []
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            for a in node.names:
                names.append(a.name)
                alias[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                names.append(f"{node.module}.{a.name}")
                alias[a.asname or a.name] = f"{node.module}.{a.name}"
    for node in ast.walk(code):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in alias:
            names.append(".".join([alias[node.id], *reversed(parts)]))
    return [
        n
        for n in names
        if n.split(".")[0] == "torch"
        and re.search(r"\._(?!_)", n)
        and not any((n + ".").startswith(ok if ok.endswith(".") else ok + ".") for ok in ALLOWED_PRIVATE)
    ]


def test_sources_are_found():
    assert {"moec", "moec.program", "moec.passes", "moec.runtime.mesh", COMPAT} <= set(sources())


def test_layers():
    wrong = [f"{m} imports {t}: {why}" for m in sources() for t in edges(m) if (why := forbidden(m, t))]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_cycles():
    graph = nx.DiGraph((m, t) for m in sources() for t in edges(m) if t in sources())
    cycles = [c for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not cycles, f"import cycles: {[sorted(c) for c in cycles]}"
    assert not list(nx.selfloop_edges(graph))


def test_private_torch_names_only_in_torch_compat():
    wrong = {m: names for m in sources() if m != COMPAT and (names := private_torch_names(tree(m)))}
    assert not wrong, "\n".join(f"{m}: {', '.join(sorted(set(n)))}" for m, n in wrong.items())


def without_dtype(code: ast.Module) -> list[int]:
    """Lines of ``torch.empty(…)`` and its like that take the default dtype."""
    calls = [n for n in ast.walk(code) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    made = [n for n in calls if n.func.attr in ALLOCATE and ast.unparse(n.func.value) == "torch"]
    return [n.lineno for n in made if "dtype" not in {k.arg for k in n.keywords}]


def test_no_memory_of_the_default_dtype():
    found = [(m, without_dtype(tree(m))) for m in sources() if m.startswith(("moec.runtime", "moec.passes"))]
    assert not [(m, lines) for m, lines in found if lines]
    code = "x = torch.empty(3)\ny = torch.zeros(3, dtype=d)\nz = torch.full((3,), 1.0)"
    assert without_dtype(ast.parse(code)) == [1, 3]


def test_no_machine_paths():
    machine = re.compile(r"(?<![\w.~$}>-])/(?:work|home|root|Users|mnt)/|\.\./shared")
    wrong = []
    for folder in ("moec", "passes", "runtime", "tests", "examples", "benchmarks", "docs", ".ci", "."):
        for f in sorted((ROOT / folder).glob("*" if folder == "." else "**/*")):
            if f.is_file() and f.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ""} and f != Path(__file__):
                text = f.read_text(errors="ignore")
                wrong += [f"{f.relative_to(ROOT)}: {m.group()}" for m in machine.finditer(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("moec.runtime.mesh", "moec.placement"),
        ("moec.runtime.mesh", "moec.passes"),
        ("moec.passes.lower", "moec.compiler"),
        ("moec.passes.lower", "moec"),
        ("moec.module", "moec.passes.lower"),
        ("moec.cost.sizes", "moec.explain"),
        ("moec.cli", "moec.compiler"),
    ],
)
def test_the_rules_refuse(module, target):
    assert forbidden(module, target)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._dynamo.reset()", ["torch._dynamo.reset"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.distributed import _functional_collectives as f", ["torch.distributed._functional_collectives"]),
        ("import torch.distributed as dist\ndist._x.y", ["torch.distributed._x.y"]),
        ("from torch._subclasses import FakeTensorMode", ["torch._subclasses.FakeTensorMode"]),
        ("from torch.utils import _pytree as pytree\npytree.tree_map", []),
        ("import torch\ntorch.ops._c10d_functional.wait_tensor\ntorch.__version__\ntorch._check(True)", []),
    ],
)
def test_private_names_are_seen(code, found):
    names = private_torch_names(ast.parse(code))
    assert sorted(set(names)) == found or (found and found[0] in names)


def test_relative_imports_are_resolved():
    code = ast.parse("from .a import b\nfrom ..c import d\nfrom . import e")
    assert imported("moec.passes.shard.x", code, False) == [
        ("moec.passes.shard.a", "b"),
        ("moec.passes.c", "d"),
        ("moec.passes.shard", "e"),
    ]
    assert imported("moec.passes.shard", ast.parse("from . import e"), True) == [("moec.passes.shard", "e")]
