"""``torch.nn.functional.grouped_mm`` in any dtype: the same product, one gathered weight a row.

torch's own takes bfloat16 only on fake tensors, and no float64 anywhere, so that a model that calls it could be neither
captured nor proved.  Inside ``with PlainGroupedMM():`` it is computed by ``bmm``, which takes both; slow, and only for
looking at a model: what is compiled is ``moec::grouped_mm``.

Legend: N rows in order of their experts, E experts, K and M widths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moec.runtime.torch_compat import GROUPED_MM


class PlainGroupedMM(TorchFunctionMode):
    """Rows by expert (``[N, K] x [E, K, M]`` with offsets) only; other forms go to torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is GROUPED_MM:
            given = dict(zip(("self", "mat2", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
            if given["self"].ndim == 2 and given["mat2"].ndim == 3 and given.get("bias") is None:
                out = _by_rows(given["self"], given["mat2"], given["offs"])
                dtype = given.get("out_dtype")
                return out if dtype is None else out.to(dtype)
        return func(*args, **kwargs)


def _by_rows(rows_NK: Tensor, w_EKM: Tensor, ends_E: Tensor) -> Tensor:
    position_N = torch.arange(rows_NK.shape[0], device=rows_NK.device)
    # Of rows behind the last expert's, torch promises nothing.
    expert_N = torch.searchsorted(ends_E.to(torch.int64), position_N, right=True).clamp(max=w_EKM.shape[0] - 1)
    return torch.bmm(rows_NK.unsqueeze(1), w_EKM[expert_N]).squeeze(1)
