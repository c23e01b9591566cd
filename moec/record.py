"""record: what a step really did, node by node, as the spans that ``moec timeline`` shows beside the predicted ones.

    with moec.record(model) as spans:                 # a model whose plan has overlap: its graphs are what runs
        model(**batch).loss.backward()
    moec.save_spans(spans, "rank0.json")              # moec timeline … --measured rank0.json

Inside, the graphs are run node by node, with the clock read before and after each; the values are the same.  A
collective's span begins when it is started and ends when its wait returns: it may have been done earlier.  On a GPU
these are the times at which the host issued the work.
"""

from __future__ import annotations

import contextlib
import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import fx

from moec.cost import COMPUTE, Span
from moec.cost.roofline import group_key
from moec.module import ParallelModule
from moec.runtime.collectives import is_start, is_wait
from moec.runtime.errors import MoecError


@contextlib.contextmanager
def record(model: ParallelModule) -> Iterator[list[Span]]:
    """Yields the list that the spans of every step inside are put into; times are seconds since it began.

    Raises MoecError for a model whose plan has no ``overlap``: autograd runs its backward, not moec."""
    if model.program.step is None:
        raise MoecError(
            "its backward is not a graph that could be recorded",
            where="record",
            way_out="Plan(overlap=moec.Overlap()), or Overlap(schedule=False, bucket_mb=None) for the order as built",
        )
    recorder = _Recorder()
    with model.executed_by(recorder.function):
        yield recorder.spans


class _Recorder:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.began

    def function(self, module: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
        """The graph as a function of the list of its operands, which it empties (as ``boxed`` makes it)."""
        nodes, last = list(module.graph.nodes), dict[fx.Node, fx.Node]()
        for node in nodes:
            last.update(dict.fromkeys(node.all_input_nodes, node))
        dies: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in last.items():
            dies.setdefault(reader, []).append(node)

        def run(operands: list[Any]) -> tuple[Any, ...]:
            given, env, started = list(operands), dict[fx.Node, Any](), dict[fx.Node, float]()
            operands.clear()
            for node in nodes:
                if node.op == "placeholder":
                    env[node] = given.pop(0)
                elif node.op == "get_attr":
                    env[node] = operator.attrgetter(node.target)(module)
                elif node.op == "call_function":
                    env[node] = self._call(node, env, started)
                else:
                    return fx.node.map_arg(node.args[0], env.__getitem__)
                for dead in dies.get(node, ()):
                    del env[dead]
            raise AssertionError("a graph ends with its output")

        return run

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], started: dict[fx.Node, float]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        began = self.now()
        value = node.target(*args, **kwargs)
        ended, where = self.now(), node.meta.get("where", "")
        if is_wait(node.target):
            start = node.args[0]
            if start in started:
                self.spans.append(Span(start.name, f"comm:{group_key(start)}", started[start], ended, where))
            return value
        if is_start(node.target):
            started[node] = began
        self.spans.append(Span(node.name, COMPUTE, began, ended, where))
        return value


def save_spans(spans: Iterable[Span], path: str | Path) -> None:
    Path(path).write_text(json.dumps({"spans": [s._asdict() for s in spans]}))


def load_spans(path: str | Path) -> list[Span]:
    """Raises MoecError when it is not a file of spans."""
    try:
        return [Span(**s) for s in json.loads(Path(path).read_text())["spans"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise MoecError(f"not a recorded run: {type(e).__name__} {e}", where=str(path)) from None
