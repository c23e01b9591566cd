"""Triton's interpreter, repaired: kernels run on CPU tensors and compute what a GPU would.

Requires: ``TRITON_INTERPRET=1`` before triton is first imported (tests/conftest.py sets it).  Tested with triton 3.6
and 3.9.
Guarantees, inside ``with repaired() as traffic`` (tests/test_interpreter.py shows each, and the stock interpreter's
wrong result):

* bf16 and fp8 compute on values, not on their bits: each step in fp32, rounded once; ``tl.sum`` and ``tl.cumsum``
  once at the end (a GPU rounds at every step: kernels upcast before they reduce);
* conversions to bf16 and fp8 round to nearest even, like torch's;
* ``tl.fma`` rounds once; ``tl.dot`` of fp32 with the default precision loses the bits that tf32 loses;
* ``tl.dot_scaled`` is there: of blocks with E8M0 scales for 32 elements, both of them;
* ``tl.minimum``, ``tl.maximum``, ``tl.clamp`` drop NaN where the kernel does not ask for it, ``tl.histogram`` drops
  what lies outside of its bins;
* a load or store outside of its tensor raises, and so do two programs that race (tests/traffic.py);
* ``tl.device_assert`` fires; with ``overflow=True`` signed and unsigned integers that overflow raise as well;
* ``traffic`` knows every address that was loaded or stored.

Never: changes the stock interpreter outside of the ``with``.  Atomics raise: moec's kernels have none.

How: InterpreterBuilder is the one object that all of Triton's language goes through, a method an operation.  Its
class is exchanged for ``Builder`` below; so are the two classes that reduce, and the one that runs a grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from traffic import ADDRESS, Launch, Traffic
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

# Kept as unsigned integers by the interpreter.
NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def is_narrow(handle: TensorHandle) -> bool:
    # What compares bf16 values has bool data.
    return handle.dtype.scalar in NARROW and handle.data.dtype.kind == "u"


def wide(handle: TensorHandle) -> np.ndarray:
    """Values: fp32 for bf16 and fp8."""
    if not is_narrow(handle):
        return handle.data
    bits = torch.from_numpy(np.array(handle.data))
    return bits.view(NARROW[handle.dtype.scalar]).float().numpy()


def narrow(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values as ``dtype`` is kept: bits for bf16 and fp8."""
    if dtype not in NARROW:
        return values
    rounded = torch.from_numpy(np.array(values)).to(torch.float32).to(NARROW[dtype])
    return rounded.view(torch.uint16 if dtype == tl.bfloat16 else torch.uint8).numpy()


def tf32(x: np.ndarray) -> np.ndarray:
    """10 bits of mantissa, to nearest, ties away from zero."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.where(np.isfinite(x), ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32), x)


class Builder(stock.InterpreterBuilder):
    """One method an operation of Triton's language."""

    launch: Launch

    # -- values

    def binary_op(self, lhs, rhs, op):
        if not (is_narrow(lhs) or is_narrow(rhs)):
            return super().binary_op(lhs, rhs, op)
        return self._result(op(wide(lhs), wide(rhs)), lhs.dtype.scalar)

    def unary_op(self, arg, op):  # triton 3.9 negates so
        return self._result(op(wide(arg)), arg.dtype.scalar) if is_narrow(arg) else super().unary_op(arg, op)

    @staticmethod
    def _result(values, dtype):
        return TensorHandle(values, tl.int1) if values.dtype == bool else TensorHandle(narrow(values, dtype), dtype)

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg, lo, hi, propagate_nans):
        drop = propagate_nans == ir.PROPAGATE_NAN.NONE
        return self.binary_op(
            self.binary_op(arg, lo, np.fmax if drop else np.maximum), hi, np.fmin if drop else np.minimum
        )

    def create_fma(self, x, y, z):
        # One rounding: the product of two fp32 numbers is exact in fp64.
        exact = np.float64 if wide(z).dtype == np.float32 else wide(z).dtype
        values = wide(x).astype(exact) * wide(y).astype(exact) + wide(z).astype(exact)
        return self._result(values.astype(wide(z).dtype), z.dtype.scalar)

    def create_dot(self, a, b, d, input_precision, *rest):
        a_MK, b_KN, d_MN = wide(a), wide(b), wide(d)
        if input_precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32:
            a_MK, b_KN = tf32(a_MK), tf32(b_KN)
        return self._result(np.matmul(a_MK, b_KN, dtype=d_MN.dtype) + d_MN, d.dtype.scalar)

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_pack, b_pack, d):
        # Scales [M, K / 32] and [N, K / 32] are exponents.
        power_M, power_N = (np.ldexp(np.float32(1), s.data.astype(np.int32) - 127) for s in (a_scale, b_scale))
        a_MK = wide(a).astype(np.float32) * np.repeat(power_M, 32, 1)
        b_KN = wide(b).astype(np.float32) * np.repeat(power_N, 32, 1).T
        return self._result(np.matmul(a_MK, b_KN, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def create_histogram(self, data, bins, mask):
        inside = (data.data >= 0) & (data.data < bins)
        if mask is not None:
            inside &= mask.data
        return TensorHandle(np.bincount(data.data[inside], minlength=bins).astype(np.int32), tl.int32)

    # -- conversions

    def cast_impl(self, src, dst_type):
        if is_narrow(src) and dst_type.scalar in NARROW:  # bf16 to fp8 and back
            return TensorHandle(narrow(wide(src), dst_type.scalar), dst_type.scalar)
        if is_narrow(src):
            return super().cast_impl(TensorHandle(wide(src), tl.float32), dst_type)
        if dst_type.scalar in NARROW:
            return TensorHandle(narrow(src.data, dst_type.scalar), dst_type.scalar)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        to_nearest = rounding_mode is None or rounding_mode == ir.ROUNDING_MODE.RTNE
        known = all(t.scalar in NARROW or t.scalar.is_standard_floating() for t in (src.dtype, dst_type))
        if to_nearest and known:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value):
        return TensorHandle(narrow(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    # -- memory

    def create_masked_load(self, ptrs, mask, other, *policy):
        return super().create_masked_load(*self._real(ptrs, mask, store=False), other, *policy)

    def create_masked_store(self, ptrs, value, mask, *policy):
        real, mask = self._real(ptrs, mask, store=True)
        return super().create_masked_store(real, value, mask, *policy)

    def _real(self, ptrs, mask, store):
        """Real addresses, and the mask as booleans (put together from a scalar and a block it is numbers)."""
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        x, y, z = self.grid_idx
        program = (x * self.grid_dim[1] + y) * self.grid_dim[2] + z
        used = np.array(np.broadcast_to(mask.data.astype(bool), ptrs.data.shape))
        self.launch.access(ptrs.data[used], width, program, store)
        return TensorHandle(ptrs.data & ADDRESS, ptrs.dtype), TensorHandle(used, tl.int1)

    def create_atomic_cas(self, *args):
        raise NotImplementedError("atomics: results that depend on who comes first")

    create_atomic_rmw = create_atomic_cas


class Reduce(stock.ReduceOps):
    def sum(self, input):
        return narrowed(super().sum, input)

    def min_max(self, input, val_reduce_op, idx_reduce_op=None):  # triton 3.6 gives it fp32, 3.9 bf16
        input = input[0] if isinstance(input, tuple) else input
        if not is_narrow(input.handle):
            return super().min_max(input, val_reduce_op, idx_reduce_op)
        values = wide(input.handle)
        reduced = narrow(val_reduce_op(values, axis=self.axis, keepdims=self.keep_dims), input.dtype)
        value = self.to_tensor(reduced if reduced.ndim else reduced.item(), input.dtype)
        if not idx_reduce_op:
            return value
        return value, self.to_tensor(idx_reduce_op(values, axis=self.axis, keepdims=self.keep_dims), tl.int32)


class Scan(stock.ScanOps):  # triton 3.6 gives it fp32, 3.9 bf16
    def cumsum(self, input):
        return [narrowed(lambda x: super(Scan, self).cumsum(x)[0], input)]

    def cumprod(self, input):
        return [narrowed(lambda x: super(Scan, self).cumprod(x)[0], input)]


def narrowed(op, x):
    """``op`` of the values of the tensor ``x``, rounded to its dtype."""
    if not is_narrow(x.handle):
        return op(x)
    y = op(tl.core.tensor(TensorHandle(wide(x.handle), tl.float32), tl.float32))
    bits = TensorHandle(narrow(y.handle.data, x.dtype), x.dtype)
    return tl.core.tensor(bits, tl.block_type(x.dtype, list(y.shape)) if y.shape else x.dtype)


@contextmanager
def repaired(overflow: bool = False) -> Iterator[Traffic]:
    """Kernels launched inside run repaired; ``overflow``: integers below 64 bits that overflow raise (slower)."""
    traffic, builder = Traffic(), stock.interpreter_builder
    convert, patch_tensor, patch_core = stock._implicit_cvt, stock._patch_lang_tensor, stock._patch_lang_core

    class Grid(stock.GridExecutor):
        def __call__(self, *args, **kwargs):
            builder.launch = Launch(self.fn.__name__)
            traffic.launches.append(builder.launch)
            super().__call__(*args, **kwargs)
            builder.launch.finish()

    def tagged_pointers(arg):
        converted = convert(arg)
        if hasattr(arg, "data_ptr"):
            tensor = arg.base if isinstance(arg, triton.runtime.jit.TensorWrapper) else arg
            converted.handle.data = builder.launch.pointer(tensor)
        return converted

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        # numpy 2.4 refuses int() of an array with one element.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_lang_core(lang, scope):
        patch_core(lang, scope)
        to_ir = lang.dtype.to_ir
        # The stock one does not know all of them.
        scope.set_attr(lang.dtype, "to_ir", lambda self, builder: self if self in NARROW else to_ir(self, builder))

    dot_scaled = stock.TritonSemantic.dot_scaled

    def with_formats(self, a, a_scale, a_format, b, b_scale, b_format, *rest):
        # A kernel that is interpreted names formats by strings, which a compiler would have wrapped.
        return dot_scaled(self, a, a_scale, tl.constexpr(a_format), b, b_scale, tl.constexpr(b_format), *rest)

    with ExitStack() as stack:
        for owner, name, value in (
            (stock.TritonSemantic, "dot_scaled", with_formats),
            (stock, "GridExecutor", Grid),
            (stock, "ReduceOps", Reduce),
            (stock, "ScanOps", Scan),
            (stock, "_implicit_cvt", tagged_pointers),
            (stock, "_patch_lang_tensor", patch_lang_tensor),
            (stock, "_patch_lang_core", patch_lang_core),
            (builder, "options", replace(builder.options, debug=True, sanitize_overflow=overflow)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.callback(setattr, builder, "__class__", type(builder))
        builder.__class__ = Builder
        yield traffic
