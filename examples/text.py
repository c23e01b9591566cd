"""Real text that every machine has: the sources of Python's own standard library, as bytes (vocabulary 256).

A seeded sampler cuts the text into global batches.  Batch ``step`` depends on (text, sizes, seed, step) alone, so that
a parallel run and a single-process run of the same machine see the same batches, in any order.

Shape suffixes: B global batch, S sequence.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 256


def standard_library() -> torch.Tensor:
    """All ``*.py`` of the standard library in sorted order, one uint8 tensor (about 31 MB with its tests)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.relative_to(root).parts)]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in sorted(files))), dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    text: torch.Tensor
    batch: int
    seq: int
    seed: int

    def __call__(self, step: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels`` (equal values, two tensors: the model shifts them), each int64 [B, S]."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        start_B = torch.randint(len(self.text) - self.seq + 1, (self.batch,), generator=random)
        ids_BS = torch.stack([self.text[s : s + self.seq] for s in start_B.tolist()]).long()
        return {"input_ids": ids_BS, "labels": ids_BS.clone()}
