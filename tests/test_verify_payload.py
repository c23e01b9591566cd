"""What the verifier says of payloads, check by check: each of these mistakes has one check that sees it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_commute_quantise import THERE, calls, compiled
from test_commute_sequence import TwoViews

import moec
from moec.overlap import Overlap
from moec.passes.verify.payload import check_pairs, derive_payload
from moec.placement import M, P, R, S
from moec.plan import Plan
from moec.precision import Precision
from moec.program import op_name
from moec.runtime.collectives import TABLE
from moec.runtime.errors import MoecError

EP, ETP = (2, 1, 2, 1), (2, 2, 2, 2)


@cache
def program(name):
    match name:
        case "operand":
            return compiled({"fp8": "rowwise"} | THERE, EP, stage="commute_quantise")
        case "one scale":
            return compiled({"fp8": "current"} | THERE, EP, stage="commute_quantise")
        case "values":
            return compiled({"fp8": "current", "exclude": ("*moe*",)} | THERE, EP, stage="commute_quantise")
        case "etp":
            return compiled({"fp8": "rowwise"} | THERE, ETP, stage="commute_quantise")
        case "chunks":
            options = {"overlap": Overlap(chunks=2)}
            return compiled({"fp8": "mxfp8"} | THERE, EP, stage="commute_quantise", **options)
        case "sequence":
            plan = Plan(1, 2, precision=Precision(fp8="current", exclude=("last",)), sequence_parallel=True)
            stages = {}
            moec.compile_program(
                TwoViews(), plan, 2, (torch.zeros(4, 6, dtype=torch.long),), {}, training=True,
                observe=lambda name, p: stages.update({name: p}),
            )  # fmt: skip
            return stages["commute_quantise"]


def typed(node, changes, of):
    """Types of a node's results, of its operands' types but for ``changes``: position -> type on every axis."""
    types = {n: dict(n.meta["types"]) for n in node.all_input_nodes}
    for at, t in changes.items():
        types[node.args[at]] = dict.fromkeys(of.mesh.names, t)
    return derive_payload(of, node, types)


MISTAKES = [
    ("operand", "encode_rows", 0, P, "rounds rows of type"), ("operand", "encode_rows", 0, M, "rounds rows of type"),
    ("operand", "encode_rows", 0, S(1), "rounds rows of type S"), ("one scale", "encode_rows", 1, M, "of type M"),
    ("one scale", "decode_operand", 2, M, "of type M"), ("values", "decode_rows", 2, M, "of type M"),
    ("operand", "decode_operand", 3, M, "of type M"), ("operand", "decode_operand", 0, R, "of type R"),
    ("operand", "decode_operand", 4, R, "of type R"), ("values", "decode_rows", 0, R, "of type R"),
    ("operand", "carry_rows", 0, R, "of type R"), ("operand", "carry_rows", 1, R, "of type R"),
    ("operand", "carry_exchange", 0, P, "of type P"), ("operand", "carry_exchange", 1, R, "of type R"),
    ("etp", "carry_sorted", 0, S(0), "of type S"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "op", "at", "wrong", "said"), MISTAKES, ids=lambda x: str(x))
def test_types_that_are_refused(name, op, at, wrong, said):
    of = program(name)
    node = calls(of, f"moec.{op}")[0]
    assert typed(node, {}, of) == node.meta["types"]
    with pytest.raises(MoecError, match=said):
        typed(node, {at: wrong}, of)


def test_what_is_missing():
    """The largest magnitude of all ranks: of a recipe with one scale, and of one whose tiles reach over ranks."""
    for name, op, at, said in (
        ("one scale", "encode_rows", 1, "one scale, and nothing"),
        ("values", "decode_rows", 2, "one scale, and nothing"),
        ("one scale", "decode_operand", 2, "one scale, and nothing"),
        ("operand", "decode_operand", 3, "of this rank's part alone"),
    ):  # fmt: skip
        of = program(name).fork()
        node = calls(of, f"moec.{op}")[0]
        node.args = (*node.args[:at], None, *node.args[at + 1 :])
        with pytest.raises(MoecError, match=said):
            typed(node, {}, of)


# -- what belongs to what


def replaced(node, at, value):
    node.args = (*node.args[:at], value, *node.args[at + 1 :])


def of_another_payload(of):
    node, twin = calls(of, "moec.carry_exchange")[:2]
    replaced(node, 0, twin.args[0])
    return node, "is not what its carrier belongs to"


def bytes_of_another(of):
    node, twin = calls(of, "moec.decode_operand")[:2]
    replaced(node, 0, twin.args[0])
    return node, "its bytes and its carrier are two payloads'"


def numbered_otherwise(of):
    node, twin = calls(of, "moec.carry_rows")[:2]
    replaced(node, 2, twin.args[2])
    return node, "no rows that were numbered so"


def numbers_of_another_kind(of):
    node = calls(of, "moec.carry_rows")[0]
    counts = next(u for u in node.args[2].args[0].users if u.args[1] == 1)
    replaced(node, 2, counts)
    return node, "no rows that were numbered so"


def splits(of):
    node = calls(of, "moec.carry_exchange")[0]
    node.args = (*node.args[:2], node.args[3], node.args[2], *node.args[4:])
    return node, "moved its bytes otherwise"


def gathered_otherwise(of):
    node = calls(of, "moec.carry_gather")[0]
    node.args[1].args[0].target = TABLE["s_to_i"].op
    return node, "its bytes come from no moec.s_to_r"


def seen_otherwise(of):
    """Both as rows of a matrix, but the carrier as fewer rows than bytes."""
    node = next(n for n in calls(of, "moec.decode_operand") if op_name(n.args[0]) == "aten.reshape")
    carrier = node.args[1]
    carrier.args = (carrier.args[0], [1, *carrier.args[1]])
    return node, "its bytes and its carrier are two payloads'"


PAIRS = [
    ("chunks", of_another_payload), ("chunks", bytes_of_another), ("chunks", numbered_otherwise),
    ("operand", numbers_of_another_kind), ("operand", splits), ("sequence", gathered_otherwise),
    ("sequence", seen_otherwise),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), PAIRS, ids=lambda x: getattr(x, "__name__", x))
def test_a_carrier_and_its_bytes(name, mistake):
    of = program(name).fork()
    for node in of.graph.nodes:
        if op_name(node).startswith(("moec.carry_", "moec.decode_")):
            check_pairs(node)
    node, said = mistake(of)
    with pytest.raises(MoecError, match=said):
        check_pairs(node)
