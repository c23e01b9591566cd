"""moec: a compiler-centric toolkit for Mixture-of-Experts models in PyTorch.

plan = moec.Plan(tp=2, ep=4)                  # dp fills the rest of the world
model = moec.parallelize(model, plan)         # an ordinary nn.Module from here on
model(input_ids=ids, labels=labels).loss.backward()
"""

from moec.calibrate import calibrate
from moec.check import CheckReport, check
from moec.compiler import compile_program, parallelize, sharding_rule
from moec.expert_bias import update_expert_bias
from moec.explain import Explanation, explain
from moec.module import ParallelModule
from moec.overlap import Overlap
from moec.plan import Plan
from moec.precision import Precision
from moec.record import load_spans, record, save_spans
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.state import full_grads, full_state_dict, load_full_state_dict, shard_batch
from moec.statistics import MoEStats, moe_stats
from moec.timeline import Prediction, timeline
from moec.tune import tune

__all__ = [
    "CheckReport",
    "Explanation",
    "MoEStats",
    "MoecError",
    "Overlap",
    "ParallelModule",
    "Plan",
    "Prediction",
    "Precision",
    "Router",
    "calibrate",
    "check",
    "compile_program",
    "explain",
    "full_grads",
    "full_state_dict",
    "load_full_state_dict",
    "load_spans",
    "moe_stats",
    "parallelize",
    "record",
    "save_spans",
    "shard_batch",
    "sharding_rule",
    "timeline",
    "tune",
    "update_expert_bias",
]
