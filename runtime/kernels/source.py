"""Generated source becomes a module: a readable file in a cache directory, named by its content, imported from there.

Triton reads the source of a kernel from its file, so generated kernels must be files; and whoever debugs, profiles or
doubts one can open it.

1. The file is ``<name>_<hash of the text>.py`` in ``cache_directory()``: the same text is always the same file, so
   processes share it and an edited copy is never run (its text is compared and replaced).
2. It is written to a temporary name and renamed: a reader sees the whole file or none.
3. It is imported once a process, under ``moec_kernels.<stem>``.

Never: a file outside of the directory, a clock, a path or a process number in the text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from ..errors import MoecError

HEADER = "# Written by moec; the name of this file ends in the hash of its text. Not meant to be edited.\n"


def cache_directory() -> Path:
    """``$MOEC_KERNELS``, or ``moec/kernels`` in the user's cache directory."""
    return _directory(*map(os.environ.get, ("MOEC_KERNELS", "XDG_CACHE_HOME", "HOME")))


@cache
def _directory(chosen: str | None, caches: str | None, home: str | None) -> Path:
    """Kept: kernels ask for it in every call.  ``home`` is what ``Path.home`` reads."""
    if chosen:
        return Path(chosen)
    return Path(caches or Path.home() / ".cache") / "moec" / "kernels"


def file_name(source: str, name: str) -> str:
    """The name of the file that ``load`` makes: deterministic, ``<name>_<16 hexadecimal digits>.py``."""
    return f"{name}_{hashlib.sha256((HEADER + source).encode()).hexdigest()[:16]}.py"


def write(source: str, name: str, directory: Path) -> Path:
    """Put the source into ``directory`` (made if missing) and return the file.  Raises MoecError where it cannot be."""
    path, text = directory / file_name(source, name), HEADER + source
    try:
        if path.is_file() and path.read_text() == text:
            return path
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}_", suffix=".tmp")
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.replace(temporary, path)
    except OSError as e:
        raise MoecError(
            f"cannot write the generated kernel to {directory}: {e}",
            where=f"kernel {name}",
            way_out="set MOEC_KERNELS to a directory that can be written",
        ) from None
    return path


def load(source: str, name: str) -> ModuleType:
    """The module that ``source`` (Triton kernels and what they import) defines.

    ``name`` (an identifier) says which kernel it is, in the file's name and in errors.  MoecError without Triton.
    """
    try:
        import triton  # noqa: F401
    except ImportError as e:
        raise MoecError(
            f"this op runs on a GPU as a Triton kernel, and triton cannot be imported ({e})",
            where=f"kernel {name}",
            way_out="pip install triton (torch's CUDA wheels bring the version that they want), or compute on the CPU",
        ) from None
    return _imported(source, name, cache_directory())


@cache
def _imported(source: str, name: str, directory: Path) -> ModuleType:
    path = write(source, name, directory)
    spec = importlib.util.spec_from_file_location(f"moec_kernels.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
