"""A body compiled for this machine's CPU: C that moec writes, by whatever C compiler is there.

Where there is none (or ``MOEC_CC`` is empty), where it fails, or where a body has no C text, ``of`` is None and the
body is computed step by step by PyTorch: slower, and the same but for rounding.

1. The compiler is ``$MOEC_CC``, else the first of cc, gcc and clang on the path.
2. Text and library lie beside the other generated sources (``source.py``), named by the hash of the text, the command
   and the processor: a directory that machines share never gives one of them the instructions of another.
3. The library is made under a temporary name and renamed, so processes that compile at once do not meet.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..body import Body
from .c_text import c_text
from .source import cache_directory

FLAGS = (
    "-O3", "-march=native", "-std=c11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
)  # fmt: skip
SECONDS = 60
"""A compiler that takes longer is not waited for."""


@dataclass(frozen=True)
class CBody:
    """See ``c_text``.  Tensors are of the dtype that it was compiled for, their columns neighbours in memory."""

    library: Any

    def forward(self, h_RA: Tensor, a_RI: Tensor) -> None:
        self.library.forward(*_matrix(h_RA), *_matrix(a_RI), *a_RI.shape)

    def backward(
        self, h_RA: Tensor, d_RI: Tensor, weight_R: Tensor | None, dweight_R: Tensor | None, a_RI: Tensor, dh_RA: Tensor
    ) -> None:
        weight = None if weight_R is None else weight_R.float().contiguous()
        dweight = dweight_R
        if dweight_R is not None and (dweight_R.dtype != torch.float32 or not dweight_R.is_contiguous()):
            dweight = torch.empty(d_RI.shape[0])
        vectors = (None if t is None else t.data_ptr() for t in (weight, dweight))
        self.library.backward(*_matrix(h_RA), *_matrix(d_RI), *vectors, *_matrix(a_RI), *_matrix(dh_RA), *d_RI.shape)
        if dweight_R is not None and dweight is not None and dweight is not dweight_R:
            dweight_R.copy_(dweight)


def _matrix(t: Tensor) -> tuple[int, int]:
    assert t.stride(1) == 1 or t.shape[1] <= 1, t.stride()
    return t.data_ptr(), t.stride(0)


def of(body: Body, dtype: torch.dtype) -> CBody | None:
    """``body`` compiled for tensors of ``dtype``, or None."""
    command = compiler()
    return _compiled(body, dtype, command, cache_directory()) if command else None


def compiler() -> str | None:
    """The C compiler, if there is one and it is wanted."""
    return _first_of(os.environ.get("MOEC_CC", "cc gcc clang"), os.environ.get("PATH", ""))


@cache
def _first_of(names: str, path: str) -> str | None:
    return next((found for name in names.split() if (found := shutil.which(name, path=path))), None)


@cache
def _compiled(body: Body, dtype: torch.dtype, command: str, directory: Path) -> CBody | None:
    text = c_text(body, dtype)
    if text is None:
        return None
    try:
        library = ctypes.CDLL(str(_library(text, command, directory)))
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None) or e
        warnings.warn(f"a body is computed by PyTorch, since its C could not be compiled: {said}", stacklevel=2)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    matrix = (pointer, number)
    library.forward.argtypes = (*matrix, *matrix, number, number)
    library.backward.argtypes = (*matrix, *matrix, pointer, pointer, *matrix, *matrix, number, number)
    library.forward.restype = library.backward.restype = None
    return CBody(library)


def _library(text: str, command: str, directory: Path) -> Path:
    key = "\n".join([text, command, *FLAGS, _processor()])
    path = directory / f"body_{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".body_") as folder:
        source, made = Path(folder, path.stem + ".c"), Path(folder, path.name)
        source.write_text(text)
        subprocess.run(
            [command, *FLAGS, str(source), "-o", str(made), "-lm"],
            check=True, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
        os.replace(source, path.with_suffix(".c"))
        os.replace(made, path)
    return path


@cache
def _processor() -> str:
    """What instructions ``-march=native`` may use here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(told))])
