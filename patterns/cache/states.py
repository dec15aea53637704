"""Recognises writes to the states of layers that are not attention. The memory of such a state
looks like a cache, but is not a cache.

A state is either the inputs that a convolution still needs, or the state of a recurrence. A write
replaces the whole state. The state of a recurrence may also be replaced head by head.
"""

from __future__ import annotations

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Memory, Store, Value, upstream
from tilewright.patterns.recognise.gemm import match_gemm

# Operations of a recurrence: a decay, and products of two activations. The computation of keys and
# values has neither.
_RECURRENT = frozenset(f"aten.{name}" for name in ("exp", "cumsum", "matmul", "bmm", "einsum"))
# Operations that `_walk_tokens` follows back from a value.
_BY_ELEMENT = frozenset(f"aten.{name}" for name in ("add", "sub", "mul", "silu", "cat", "pad"))
_BY_ELEMENT |= {"cast"}
_REACH = 64


def replaces_state(store: Store) -> bool:
    """Whether a write replaces the state of a convolution or of a recurrence."""
    source = store.source
    if source is None or store.index:
        return False
    if effects.product(store.target.shape) != effects.product(store.memory.shape):
        return continues(source.value, store.memory) and made_by_recurrence(source.value)
    if made_by_recurrence(source.value):
        return True
    axes = {atom.axis for atom in source.effect.dims[-1]}
    return len(store.memory.shape) == 3 and _walk_tokens(source.value, axes)


def continues(value: Value, memory: Memory) -> bool:
    """Whether a value is computed from the old contents of a memory. New keys are not computed from
    the old contents of the cache."""
    before = upstream(value, _REACH, lambda v: match_gemm(v) is None)
    return any(v.node is memory.root or (v.store and v.store.memory is memory) for v in before)


def _walk_tokens(value: Value, axes: set[int | None]) -> bool:
    """Whether `axes` is a single axis of a value, and this axis runs over tokens, like the last
    axis of a convolution's state [batch, channels, width].

    An axis runs over tokens if the value is concatenated with earlier tokens along this axis, or if
    the value is a projection and the axis is not the axis of the features.
    """
    for _ in range(_REACH):
        if len(axes) != 1 or value.op not in _BY_ELEMENT:
            break
        (axis,) = axes
        if axis is None or (value.op == "aten.cat" and axis == value.args[1]):
            break
        operand = next((v for v in value.operands if v.value.projected), None)
        dim = axis - len(value.shape) + (0 if operand is None else len(operand.shape))
        if operand is None or dim < 0:
            return False
        value, axes = operand.value, {atom.axis for atom in operand.effect.dims[dim]}
    gemm = match_gemm(value)
    joined = value.op == "aten.cat" and axes == {value.args[1]}
    return joined or (gemm is not None and len(axes) == 1 and axes.isdisjoint({gemm.feature, None}))


def made_by_recurrence(value: Value) -> bool:
    """Whether a decay, or a product of two activations, is a part of the computation of a value."""
    before = upstream(value, _REACH, lambda v: match_gemm(v) is None)
    return any(v.op in _RECURRENT and v.projected and match_gemm(v) is None for v in before)
