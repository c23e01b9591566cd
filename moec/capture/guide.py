"""Guide: run a MoE block's forward again, with the expert loop replaced by the canonical operations.

The module's own Python code runs, under a mode that follows the tape call by call.

1. A call outside of the region is executed on what is really there (fake tensors while exporting).
2. A call of the region is *not* executed: Python is handed the recorded tensor, so ``if idx.numel() == 0``,
   ``for e in hit`` and the like take the branches that were observed, in which every expert has work.
3. At the call that completes the combined output, ``permute``, the body on stacked parameters and ``unpermute`` are
   emitted; from there on that output stands for the recorded one.
4. What the module returns, or keeps in an attribute, of the region's other values (statistics of the ids) is computed
   on demand, by then executing the calls that it needs.
5. A call that is not the recorded one refuses.  Where a narrow twin of the module was observed, so does one with other
   constants.

Whether the result is right for other inputs is not argued here; ``probe`` proves it for each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .body import Body
from .locate import Located
from .observe import Call, Tape, off_tape
from .owners import Owner, walk
from .shrink import constants_agree
from .steps import Refused, function_name, record, same_function
from .weights import chosen, combined


@dataclass(frozen=True)
class Guide:
    owner: Owner
    tape: Tape
    found: Located
    factor: int = 1
    """How many times as wide the module is as the twin that was observed (``shrink``)."""

    def forward(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)`` of ``module``, raised."""
        replay = _Replay(self, module, args, kwargs)
        with replay:
            out = forward(*args, **kwargs)
        return replay.finish(out)


class _Replay(TorchFunctionMode):
    def __init__(self, guide: Guide, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.owner, self.tape, self.found, self.factor = guide.owner, guide.tape, guide.found, guide.factor
        self.module = module
        self.next = 0
        self.live: dict[int, Any] = dict(zip(self.tape.inputs, walk((args, kwargs)), strict=True))
        self.skipped: dict[int, tuple[tuple, dict[str, Any]]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if off_tape(func):
            return func(*args, **kwargs)
        call = self._aligned(func)
        if call.index in self.found.region.calls:  # 2
            self.skipped[call.index] = (args, kwargs)
            if not self._like_twin(call, args, kwargs):
                raise Refused(f"at its own width {call.name} is given other constants than in the narrow twin")
            if call.index != self.found.out_call:
                return call.result
            self._emit()
            return next((self.live[v] for v in call.makes if v in self.found.outs), call.result)
        args, kwargs = self._present(call, args, kwargs)  # 1
        out = func(*args, **kwargs)
        if not call.is_query:
            self._keep(call, args, kwargs, out)
        return out

    def _aligned(self, func: Callable) -> Call:
        if self.next < len(self.tape.calls):
            call = self.tape.calls[self.next]
            if same_function(call.func, func):
                self.next += 1
                return call
            expected = call.name
        else:
            expected = "the end"
        raise Refused(  # 5
            f"its forward does something else for other inputs: call {self.next} is {function_name(func)}, "
            f"and was {expected} when it was observed"
        )

    def _present(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments as they are, except that recorded or overwritten tensors become what stands for them."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if len(tensors) != len(call.reads):
            raise Refused(f"{call.name} was called with {len(call.reads)} tensors and now with {len(tensors)}")
        for i, v in zip(tensors, call.reads, strict=True):
            leaves[i] = self._standin(v, leaves[i])
        return pytree.tree_unflatten(leaves, spec)

    def _standin(self, v: int, given: Any) -> Any:
        """What stands for value ``v`` now, ``given`` being what Python holds of it."""
        if v in self.live:
            return self.live[v]
        if v in self.found.region.tainted or v in self.found.outs:
            return self._materialise(v)
        return given

    def _keep(self, call: Call, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        made = list(walk(out))
        if len(made) != len(call.makes):
            raise Refused(f"{call.name} made {len(call.makes)} tensors and now {len(made)}")
        operands = dict(zip(call.reads, walk((args, kwargs)), strict=True))
        for old, new in call.overwrites:
            if old in operands or old in self.live:
                self.live[new] = operands.get(old, self.live.get(old))
        for v, t in zip(call.makes, made, strict=True):
            self.live[v] = t

    # 3 --------------------------------------------------------------------------------------------------------------

    def _emit(self) -> None:
        found, experts = self.found, self.owner.num_experts
        x, w = self.live_value(found.x), self.live_value(found.weights.value)
        x_TH = x.reshape(-1, x.shape[-1])
        if found.ids is None:
            w_TK = found.weights.dense(w, experts)
            ids_TK = chosen(w_TK)
        else:
            ids_TK = self.live_value(found.ids).reshape(-1, found.top_k).long()
            w_TK = found.weights.per_pair(w, ids_TK, experts)
        out_TM = combined(
            found.how, self._body(), x_TH, ids_TK, w_TK, experts, lambda role: self.owner.stack(role, self.module)
        )
        if found.base is not None:
            out_TM = self.live_value(found.base).reshape(-1, out_TM.shape[1]) + out_TM
        for v in found.outs:
            out = out_TM.reshape(self._shape(v, out_TM))
            if self._dtype(v) != out.dtype:
                out = out.to(self._dtype(v))
            self.live[v] = out

    def _like_twin(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> bool:
        return self.factor == 1 or constants_agree((call.args, call.kwargs), (args, kwargs), self.factor, sizes=True)

    def _body(self) -> Body:
        """The expert's body, with the constants of the module itself."""
        body = self.found.body
        return body if self.factor == 1 else body.widened(self._own, self.factor)

    def _own(self, step: Call) -> Call:
        given = self.skipped.get(step.index)
        if given is None or not constants_agree((step.args, step.kwargs), given, self.factor, sizes=False):
            raise Refused(f"at its own width {step.name} is not what it is in the narrow twin")
        return replace(step, args=given[0], kwargs=given[1])

    def live_value(self, v: int) -> Tensor:
        if v not in self.live and v in self.tape.params:
            name = self.tape.params[v]
            self.live[v] = dict(self.module.named_buffers()).get(name)
        if self.live.get(v) is None:
            raise Refused("its ids, weights or tokens come from somewhere that capture cannot follow")
        return self.live[v]

    def _shape(self, v: int, out_TM: Tensor) -> tuple[Any, ...]:
        """The recorded shape in terms of sizes that are there now: leading dims of a value that has the same ones."""
        lead = self.tape.held(v).shape[:-1]
        if len(lead) == 1:
            return (out_TM.shape[0], out_TM.shape[1])
        for u, t in self.live.items():
            seen = self.tape.values[u]
            if not isinstance(t, Tensor) or seen is None or seen.dim() <= len(lead):
                continue
            if seen.shape[: len(lead)] == lead:
                return (*t.shape[: len(lead)], out_TM.shape[1])
        raise Refused(f"the combined output has leading sizes {tuple(lead)}, which no other value of the block has")

    def _dtype(self, v: int) -> torch.dtype:
        """The recorded dtype in terms of what is there now: that of tokens, weights or parameters."""
        recorded = self.tape.held(v).dtype
        for u in (self.found.x, self.found.weights.value):
            if self.tape.held(u).dtype == recorded:
                return self.live[u].dtype
        return recorded

    # 4 --------------------------------------------------------------------------------------------------------------

    def _materialise(self, v: int) -> Any:
        if v in self.live:
            return self.live[v]
        call = self.tape.calls[self.tape.maker[v]] if self.tape.maker[v] >= 0 else None
        if call is None or call.index not in self.skipped or v in self.found.region.of_experts:
            raise Refused("a value from inside the expert loop is used outside of it")
        args, kwargs = self._present(call, *self.skipped[call.index])
        if call.overwrites:
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.clone(), (args, kwargs))
        out = call.func(*args, **kwargs)
        operands = dict(zip(call.reads, walk((args, kwargs)), strict=True))
        for old, new in call.overwrites:
            if old in operands:
                self.live[new] = operands[old]
        record_only = Call(call.index, call.func, (), {}, (), call.makes, (), None)
        record(record_only, out, self.live)
        if v not in self.live:
            raise Refused("a view that the expert loop wrote through is used outside of it")
        return self.live[v]

    def finish(self, out: Any) -> Any:
        if self.next != len(self.tape.calls):
            raise Refused(f"its forward ended after {self.next} of {len(self.tape.calls)} calls for other inputs")
        leaves, spec = pytree.tree_flatten(out)
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if len(tensors) != len(self.tape.results):
            raise Refused("it returns another number of tensors for other inputs")
        for i, v in zip(tensors, self.tape.results, strict=True):
            leaves[i] = self._standin(v, leaves[i])
        for m in self.module.modules():
            for name, t in list(vars(m).items()):
                if isinstance(t, Tensor) and id(t) in self.tape.current:
                    setattr(m, name, self._standin(self.tape.current[id(t)], t))
        return pytree.tree_unflatten(leaves, spec)
