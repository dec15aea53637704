"""Triton's interpreter with corrected bf16 arithmetic. Only tests and verification use it.

Triton's interpreter stores bf16 numbers as raw 16-bit patterns and computes with them as if they
were integers, and its casts to bf16 truncate. Here, bf16 operands are widened to fp32, which is
exact, and results are rounded to nearest, ties to even, as on the hardware. All other operations
are Triton's own. The corrections apply only while a kernel runs.

This interpreter can also run kernels that were imported for compilation. It also interprets the jit
functions that kernels call, such as `tl.sum` and `tl.cdiv` of `triton.language`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from tilewright.codegen.build import interpreter_replay, interpreter_speed

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_WIDE = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}


def widen(bits: np.ndarray) -> np.ndarray:
    """Converts bf16 bit patterns (uint16) to fp32, exactly."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds floats to bf16 bit patterns (uint16), to nearest with ties to even. A NaN becomes a
    quiet NaN."""
    wide = np.array(values, dtype=np.float32, order="C")
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x0040
    return np.where(np.isnan(wide), quiet, rounded).astype(np.uint16)


def round_to_fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounds floats to the bit patterns (uint8) of an 8-bit float dtype. Triton's own conversion is
    wrong if the rounding carries into the exponent."""
    wide = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    return wide.to(dtype).view(torch.uint8).numpy()


def fp8_numbers(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Converts bit patterns (uint8) of an 8-bit float dtype to fp32, exactly. Triton's own
    conversion turns a NaN into a number."""
    patterns = torch.from_numpy(np.array(bits, order="C").view(np.uint8))
    return patterns.view(dtype).float().numpy()


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name == "bf16"


def _widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _rounded(handle: TensorHandle) -> TensorHandle:
    if handle.data.dtype == np.bool_:  # a comparison
        return handle
    return TensorHandle(round_to_bf16(handle.data), tl.bfloat16)


def _in_fp32(original: Callable, operands: int) -> Callable:
    """Wraps a builder method. The wrapper widens bf16 tensors among the first `operands` arguments
    to fp32, and rounds the result to bf16."""

    @functools.wraps(original)
    def method(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> TensorHandle:
        # This is a loop, because `any` with a generator would take longer than an addition does.
        for arg in args[:operands]:
            if _is_bf16(arg):
                break
        else:
            return original(self, *args, **kwargs)
        wide = [_widened(arg) for arg in args[:operands]]
        return _rounded(original(self, *wide, *args[operands:], **kwargs))

    return method


def _comparing(original: Callable) -> Callable:
    """Wraps a builder method so that comparisons return int1.

    In Triton's interpreter, the result of a comparison has the type of the operands. If the result
    of a comparison of scalars is broadcast to a block, it becomes int32, and triton 3.9 and later
    refuse an int32 mask.
    """

    @functools.wraps(original)
    def method(self: InterpreterBuilder, lhs: Any, rhs: Any, op: Any) -> TensorHandle:
        result = original(self, lhs, rhs, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    return method


def _dot(original: Callable) -> Callable:
    """Wraps `create_dot`. The wrapper widens the operands to fp32. The accumulator keeps its
    type."""

    @functools.wraps(original)
    def method(self: InterpreterBuilder, a: Any, b: Any, d: Any, *args: Any) -> TensorHandle:
        return original(self, _widened(a), _widened(b), d, *args)

    return method


class _Format(str):
    """The name of a format of `tl.dot_scaled`, usable both as a string and as a Triton constant
    (`.value`)."""

    @property
    def value(self) -> str:
        return str(self)


def _formats_both_ways(original: Callable) -> Callable:
    """Wraps `dot_scaled` so that every release of Triton can read its formats. Some releases read
    `.value`, and others accept only strings."""

    @functools.wraps(original)
    def method(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any,
               *args: Any) -> Any:  # fmt: skip
        formats = [_Format(getattr(f, "value", f)) for f in (a_format, b_format)]
        return original(self, a, a_scale, formats[0], b, b_scale, formats[1], *args)

    return method


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _nvfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes NVFP4 to fp32 [R, K]. codes: bytes [R, K / 2], low nibble first. scales: e4m3 bit
    patterns [R, K / 16]."""
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
    values = np.where(nibbles & 8, -_E2M1[nibbles & 7], _E2M1[nibbles & 7])
    magnitude = torch.from_numpy(scales.astype(np.uint8) & 127).view(torch.float8_e4m3fn)
    return values * np.repeat(magnitude.float().numpy(), 16, axis=1)


def _dot_scaled(
    self: InterpreterBuilder, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any,
    b_format: Any, fast_math: bool, a_k_pack: bool, b_k_pack: bool, acc: Any,
) -> TensorHandle:  # fmt: skip
    """Multiplies two NVFP4 operands that are packed along K. The products are exact and are summed
    in fp32. Raises NotImplementedError for other formats."""
    scales = (a_scale, b_scale)
    if not (a_k_pack and b_k_pack) or any(s.dtype.scalar != tl.float8e4nv for s in scales):
        raise NotImplementedError("dot_scaled: expected NVFP4 with e4m3 scales, packed along K")
    left = _nvfp4(a.data.view(np.uint8), a_scale.data)
    right = _nvfp4(b.data.view(np.uint8).T, b_scale.data)
    return TensorHandle(left @ right.T + acc.data, acc.dtype.scalar)


def _cast(original: Callable) -> Callable:
    """Wraps a cast. Casts to and from bf16 are computed in fp32, and PyTorch computes fp8
    conversions."""

    @functools.wraps(original)
    def method(self: InterpreterBuilder, src: Any, dst_type: Any, *args: Any) -> TensorHandle:
        target = dst_type.scalar
        if target in _FP8 and not src.dtype.scalar.is_fp8():
            return TensorHandle(round_to_fp8(_widened(src).data, _FP8[target]), target)
        if target == tl.bfloat16 and not _is_bf16(src) and not src.dtype.scalar.is_fp8():
            return TensorHandle(round_to_bf16(src.data), tl.bfloat16)
        if src.dtype.scalar in _FP8 and target in _WIDE:
            numbers = fp8_numbers(src.data, _FP8[src.dtype.scalar])
            return TensorHandle(numbers.astype(_WIDE[target]), target)
        if not _is_bf16(src):
            return original(self, src, dst_type, *args)
        wide = _widened(src)
        if target in _WIDE:
            return TensorHandle(wide.data.astype(_WIDE[target]), target)
        if target == tl.bfloat16:
            return src
        return original(self, wide, dst_type, *args)

    return method


def _get_bf16(self: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(round_to_bf16(np.array([value])), tl.bfloat16)


def _reduction(original: Callable) -> Callable:
    """Wraps reductions and scans, such as tl.sum. bf16 tensors are reduced in fp32, and the result
    is rounded once."""

    @functools.wraps(original)
    def method(self: Any, operands: Any) -> Any:
        if isinstance(operands, tuple) or operands.dtype != tl.bfloat16:
            return original(self, operands)
        wide = tl.core.tensor(_widened(operands.handle), _retyped(operands.type, tl.float32))
        result = original(self, wide)
        return tl.core.tensor(_rounded(result.handle), _retyped(result.type, tl.bfloat16))

    return method


def _retyped(type_: Any, element: tl.dtype) -> Any:
    return tl.block_type(element, list(type_.shape)) if type_.is_block() else element


def _index_and_transpose(original: Callable) -> Callable:
    """Wraps the function that patches a tensor, so that `range(tensor)` and `tensor.T` work.

    A scalar of the interpreter is an array of one element, and numpy 2.4 cannot convert such an
    array to an integer. A matrix is transposed by a call of the builder, because
    `interpreter_replay` can record such calls.
    """

    @functools.wraps(original)
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(tensor, "T", property(_transposed))

    return patch


def _transposed(matrix: Any) -> Any:
    return interpreter.interpreter_semantic.permute(matrix, (1, 0))


def _call_helper(self: JITFunction | InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    rewritten = InterpretedFunction.rewritten_fn.get(self.fn)
    if rewritten is None:
        interpreter_speed.remember_lines(self)
        rewritten = InterpretedFunction(self.fn).rewrite()
    return rewritten(*args, **kwargs)


def _bind_method(self: JITFunction, instance: Any, owner: Any = None) -> Any:
    return self if instance is None else functools.partial(self, instance)


def _nothing_to_wait_for() -> None:
    """Replaces `gdc_wait` and `gdc_launch_dependents`, because interpreted kernels run in
    sequence."""


class _Outputs(list[TensorHandle]):
    """The results of an inline instruction. `triton.language` reads them by `get_result`."""

    def get_result(self, index: int) -> TensorHandle:
        return self[index]


def _chosen_bytes(low: np.ndarray, high: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """Interprets `prmt`. Each nibble of a selector chooses one of eight bytes. If the top bit of
    the nibble is set, all bits of the result are equal to the sign bit of that byte."""
    low, high, selectors = (
        part.view(np.uint32).astype(np.uint64) for part in (low, high, selectors)
    )
    both = low | high << np.uint64(32)
    chosen = np.zeros_like(both)
    for place in range(4):
        nibble = selectors >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> np.uint64(8) * (nibble & np.uint64(7)) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), sign, byte)
        chosen = chosen | byte << np.uint64(8 * place)
    return chosen.astype(np.uint32).view(np.int32)


def _halves_of_fp8(words: np.ndarray, second: bool) -> np.ndarray:
    """Interprets `cvt.rn.f16x2.e4m3x2` for the low half of each word, or for the high half if
    `second`."""
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    chosen = torch.from_numpy(codes[..., 2:] if second else codes[..., :2]).contiguous()
    halves = chosen.view(torch.float8_e4m3fn).to(torch.float16)
    return halves.view(torch.int32).squeeze(-1).numpy()


def _byte_dots(kinds: str, words: np.ndarray, x: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Interprets `dp4a`, which adds the products of four bytes to sums. kinds: the types of the
    bytes of `words` and `x`, such as "u32.s32"."""
    first, second = (
        np.ascontiguousarray(part).view(np.int8 if kind == "s32" else np.uint8).astype(np.int64)
        for part, kind in zip((words, x), kinds.split("."), strict=True)
    )
    products = (first * second).reshape(*words.shape, 4).sum(-1)
    return (sums + products).astype(np.int32)


def _inline(
    self: InterpreterBuilder, asm: str, constraints: str, values: Any, types: Any, pure: bool,
    pack: int,
) -> _Outputs:  # fmt: skip
    """Interprets the inline instructions that the templates use. Raises NotImplementedError for
    other instructions."""
    if asm.startswith("prefetch."):  # a prefetch is only a hint
        return _Outputs([TensorHandle(np.zeros(values[0].data.shape, np.int32), tl.int32)])
    if asm == "mov.b32 $0, $1;":
        return _Outputs([values[0]])
    if asm == "prmt.b32 $0, $1, $2, $3;":
        return _Outputs([TensorHandle(_chosen_bytes(*(v.data for v in values)), tl.int32)])
    if "cvt.rn.f16x2.e4m3x2" in asm:
        return _Outputs(
            [TensorHandle(_halves_of_fp8(values[0].data, asm.endswith("b;}")), tl.int32)]
        )
    if "cvt.f32.f16" in asm:
        halves = np.ascontiguousarray(values[0].data).view(np.float16).astype(np.float32)
        pairs = halves.reshape(*values[0].data.shape, 2)
        return _Outputs([TensorHandle(pairs[..., i], tl.float32) for i in range(2)])
    if asm.startswith("dp4a."):
        kinds = asm.split()[0].removeprefix("dp4a.")
        return _Outputs([TensorHandle(_byte_dots(kinds, *(v.data for v in values)), tl.int32)])
    if asm != "mul.rn.bf16x2 $0, $1, $2;":
        raise NotImplementedError(f"the interpreter does not support the instruction {asm}")
    first, second = (np.ascontiguousarray(value.data).view(np.uint16) for value in values)
    product = round_to_bf16(widen(first) * widen(second))
    return _Outputs([TensorHandle(product.view(np.int32), tl.int32)])


def _replacements() -> list[tuple[Any, str, Any]]:
    builder, reductions = InterpreterBuilder, interpreter.ReduceScanOpInterface
    changes = [
        (builder, "create_dot", _dot(builder.create_dot)),
        (builder, "create_dot_scaled", _dot_scaled),
        (TritonSemantic, "dot_scaled", _formats_both_ways(TritonSemantic.dot_scaled)),
        (builder, "cast_impl", _cast(builder.cast_impl)),
        (builder, "create_fp_to_fp", _cast(builder.create_fp_to_fp)),
        (builder, "binary_op", _comparing(_in_fp32(builder.binary_op, 2))),
        (builder, "unary_op", _in_fp32(builder.unary_op, 1)),
        (builder, "create_fma", _in_fp32(builder.create_fma, 3)),
        (builder, "create_rsqrt", _in_fp32(builder.create_rsqrt, 1)),
        (builder, "create_clampf", _in_fp32(builder.create_clampf, 3)),
        (builder, "get_bf16", _get_bf16),
        (builder, "create_inline_asm", _inline),
        (reductions, "apply", _reduction(reductions.apply)),
        (
            interpreter,
            "_patch_lang_tensor",
            _index_and_transpose(interpreter._patch_lang_tensor),
        ),
        (cuda, "gdc_wait", _nothing_to_wait_for),
        (cuda, "gdc_launch_dependents", _nothing_to_wait_for),
        (JITFunction, "__call__", _call_helper),
        (JITFunction, "__get__", _bind_method),
        (InterpretedFunction, "__call__", _call_helper),
        (interpreter, "GridExecutor", interpreter_replay.Replaying),
        *interpreter_speed.replacements(),
    ]
    return changes


@contextmanager
def corrected() -> Iterator[None]:
    """Applies the corrections, and interprets the jit functions that a kernel calls, while the body
    of the `with` statement runs."""
    with ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.callback(_restore, owner, name, owner.__dict__.get(name))
            setattr(owner, name, value)
        # Patch the language once for all called functions. Otherwise, each call would patch the
        # language again and would not restore it.
        everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        stack.callback(interpreter._patch_lang(everything).restore)
        # Prevent a launch from patching the language a second time. Otherwise, each operation would
        # pass through two replacements.
        stack.callback(_restore, interpreter, "_patch_lang", interpreter._patch_lang)
        interpreter._patch_lang = _is_patched
        yield


def _is_patched(function: Callable) -> SimpleNamespace:
    """Replaces the interpreter's `_patch_lang` while the language is already patched."""
    return SimpleNamespace(restore=_nothing_to_wait_for)


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is None:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@dataclass(frozen=True)
class InterpretedKernel:
    """A kernel that runs on the CPU: `kernel[grid](*args)`, with CPU tensors."""

    function: Callable

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.run, grid)

    def run(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """Runs every program of the grid in turn. Ignores options such as num_warps."""
        with corrected():
            InterpretedFunction(self.function)[grid](*args, **kwargs)


def interpret(kernel: JITFunction | InterpretedFunction) -> InterpretedKernel:
    """Returns a form of a `@triton.jit` function that runs on the CPU. The function may come from a
    template or from an emitted file."""
    interpreter_speed.remember_lines(kernel)
    return InterpretedKernel(kernel.fn)
