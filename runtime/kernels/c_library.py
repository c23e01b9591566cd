"""C that moec writes becomes a shared library, by whatever C compiler is there.

1. The compiler is ``$MOEC_CC``, else the first of cc, gcc and clang on the path; none where ``MOEC_CC`` is empty.
2. Text and library lie beside the other generated sources (``source.py``), named by the hash of the text, the command
   and the processor: a directory that machines share never gives one of them the instructions of another.
3. The library is made under a temporary name and renamed, so processes that compile at once do not meet.

Where there is no library, whoever asked for it has another way, of PyTorch, and takes that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
)  # fmt: skip
SECONDS = 60
"""A compiler that takes longer is not waited for."""


def compiler() -> str | None:
    """The C compiler, if there is one and it is wanted."""
    return _first_of(os.environ.get("MOEC_CC", "cc gcc clang"), os.environ.get("PATH", ""))


@cache
def _first_of(names: str, path: str) -> str | None:
    return next((found for name in names.split() if (found := shutil.which(name, path=path))), None)


def load(text: str, name: str, command: str, directory: Path, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL | None:
    """The library of ``text`` in ``directory``; None, and a warning that names ``name``, if the compiler fails."""
    try:
        return ctypes.CDLL(str(made(text, name, command, directory, flags)))
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None) or e
        warnings.warn(f"PyTorch computes, since the C of a {name} could not be compiled: {said}", stacklevel=2)
        return None


def made(text: str, name: str, command: str, directory: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The file of the library, compiled if it is not there yet.  OSError or SubprocessError if that fails."""
    key = "\n".join([text, command, *flags, processor()])
    path = directory / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=f".{name}_") as folder:
        source, library = Path(folder, path.stem + ".c"), Path(folder, path.name)
        source.write_text(text)
        subprocess.run(
            [command, *flags, str(source), "-o", str(library), "-lm"],
            check=True, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        os.replace(source, path.with_suffix(".c"))
        os.replace(library, path)
    return path


@cache
def processor() -> str:
    """What instructions ``-march=native`` may use here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(told))])
