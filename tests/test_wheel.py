"""The wheel holds every package and works outside the checkout, without triton and without transformers."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Every module of the installed moec comes from the target folder, and imports with the optional packages absent.
PROBE = """
import importlib, pkgutil, sys
sys.modules["triton"] = sys.modules["transformers"] = None
import moec
names = ["moec", *(m.name for m in pkgutil.walk_packages(moec.__path__, "moec."))]
for name in names:
    file = importlib.import_module(name).__file__
    assert file.startswith(sys.argv[1]), f"{name} comes from {file}"
print(*names)
"""


FOLDERS = {"moec": "moec", "moec.passes": "passes", "moec.runtime": "runtime"}


def _modules(root: Path) -> set[str]:
    found = set()
    for top, folder in FOLDERS.items():
        for f in (root / folder).rglob("*.py"):
            parts = f.relative_to(root / folder).with_suffix("").parts
            found.add(".".join([top, *(p for p in parts if p != "__init__")]))
    return found


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = set()
    for top, folder in FOLDERS.items():
        for f in (ROOT / folder).rglob("*.py"):
            assert (f.parent / "__init__.py").exists(), f"{f.parent} has no __init__.py"
            folders.add(".".join([top, *f.parent.relative_to(ROOT / folder).parts]))
    assert set(listed) == folders


def test_wheel_works_outside_the_checkout(tmp_path):
    # From a copy: an older build/ in the checkout must not leak into the wheel.
    source = tmp_path / "source"
    for name in ("moec", "passes", "runtime"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "-q"]
    env = os.environ | {"PYTHONPATH": str(site), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    build = [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist")]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("moec-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, cwd=tmp_path)
    tops = {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")}
    assert tops <= {"moec", "bin"}, "no bare top-level `passes` or `runtime`"
    seen = subprocess.run(
        [sys.executable, "-c", PROBE, str(site)], check=True, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE
    )
    assert set(seen.stdout.split()) == _modules(source)
