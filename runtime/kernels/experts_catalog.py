"""The experts' kernels of the list that is compiled ahead of time: models that people train, every family, both ways.

Legend: T tokens, K choices per token, E experts, H hidden, I columns of the body's result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..body import Body
from . import block, choice_dot, grouped_add, grouped_sum, sum_choices, zero_tail
from .block import Block
from .entry import Entry

SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
SEPARATE = "g = whole(h0); u = whole(h1); t0 = silu(g); t1 = mul(t0, u); return t1"
CLAMPED = (
    "g = every(h0, 2, 0); u = every(h0, 2, 1); t0 = clamp(g, -inf, 7.0); t1 = clamp(u, -7.0, 7.0); "
    "t2 = mul(t0, 1.702); t3 = sigmoid(t2); t4 = mul(t0, t3); t5 = add(t1, 1.0); t6 = mul(t5, t4); return t6"
)
GELU = "x = whole(h0); t0 = gelu_tanh(x); return t0"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Model:
    name: str
    E: int
    H: int
    I: int  # noqa: E741
    K: int
    tokens: int
    body: str = SWIGLU
    biases: bool = False
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = True
    """Weights are views of [E, out, in]; else [E, in, out] as they are stored."""
    everyday: tuple[str, ...] = ()
    """Kernels of the short list: each costs every run of the tests some seconds."""

    def block(self) -> Block:
        body = Body.parse(self.body)
        widths = (self.I * max(i.parts for i in body.inputs),) * body.products
        strides_in = tuple(self._strides(self.H, width) for width in widths)
        return Block(
            self.body, self.E, self.H, widths, self.H, strides_in, self._strides(self.I, self.H), self.biases,
            self.biases, self.dtype, self.K, -(-self.tokens * self.K // self.E),
        )  # fmt: skip

    def _strides(self, rows: int, columns: int) -> tuple[int, int, int]:
        return (rows * columns, 1, rows) if self.transposed else (rows * columns, columns, 1)


MODELS = (
    Model("qwen3_moe", 128, 2048, 768, 8, 4096,
          everyday=("first", "second", "activation's gradient", "first weight's gradient")),
    Model("mixtral", 8, 4096, 14336, 2, 8192),
    Model("deepseek_v3", 256, 7168, 2048, 8, 8192),
    Model("gpt_oss", 32, 2880, 2880, 4, 8192, CLAMPED, biases=True, transposed=False,
          everyday=("first", "activation's gradient")),
    Model("two_weights", 16, 1024, 3584, 2, 4096, SEPARATE, dtype=torch.float16),
    Model("few_rows", 128, 2048, 768, 8, 256),
    Model("small_fp32", 16, 256, 250, 4, 2048, dtype=torch.float32, everyday=("activation's gradient",)),
    Model("gelu", 8, 768, 3072, 2, 4096, GELU, biases=True),
)


def entries(arch: str) -> list[Entry]:
    return [entry for model in MODELS for entry in of_model(model, arch)] + small_kernels()


def of_model(m: Model, arch: str) -> list[Entry]:
    """Every kernel of a block's step."""
    found = []
    for name, spec in block.specs(m.block(), arch).items():
        arguments = _arguments(block.pointers(spec), spec.dtype)
        found.append(
            Entry(
                f"{m.name} {name}", block.source(spec), spec.name, arguments, warps=spec.tile.warps,
                stages=spec.tile.stages, nightly=name not in m.everyday,
            )
        )  # fmt: skip
    return found


def _type(pointer: str, dtype: torch.dtype) -> str:
    known = {"offset_ptr": "*i32", "pair_ptr": "*i64", "row_of_ptr": "*i64", "expert_ptr": "*i64",
             "weight_ptr": "*fp32", "share_ptr": "*fp32"}  # fmt: skip
    return known.get(pointer, "*" + TYPES[dtype]) + ":16"


def _arguments(pointers: list[str], dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    return tuple((p, _type(p, dtype)) for p in pointers)


def small_kernels() -> list[Entry]:
    """Those without products: one width each, they have no tiles to choose."""
    dtype, E, K, C = torch.bfloat16, 128, 8, 2880
    made = {
        "grouped_sum": (grouped_sum.source(C, dtype, K), grouped_sum.pointers(K)),
        "grouped_add": (grouped_add.source(E, C, dtype), ["offset_ptr", "x_ptr", "b_ptr", "y_ptr"]),
        "sum_choices": (sum_choices.source(K, C, dtype), ["row_of_ptr", "rows_ptr", "y_ptr"]),
        "choice_dot": (choice_dot.source(K, C, dtype), ["expert_ptr", "grad_ptr", "bias_ptr", "share_ptr"]),
        "zero_tail": (zero_tail.source(E, C), ["offset_ptr", "y_ptr"]),
    }
    counted = (("num_rows", "i32"),)
    return [
        Entry(f"{name} bf16 {C}", text, name,
              _arguments(pointers, dtype) + (counted if name in ("grouped_add", "zero_tail") else ()))
        for name, (text, pointers) in made.items()
    ]  # fmt: skip
