"""What layers without attention keep of the past, in memory that looks like a cache's and is none:
the inputs that a convolution still needs, and the state of a recurrence. Both are replaced whole."""

from __future__ import annotations

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Store, Value, View, upstream
from tilewright.patterns.recognise.gemm import match_gemm

# A decay, and products of two activations: keys and values are made by neither.
_RECURRENT = frozenset(f"aten.{name}" for name in ("exp", "cumsum", "matmul", "bmm", "einsum"))
_REACH = 32


def replaces_state(store: Store) -> bool:
    """Whether a write replaces the state of a convolution or of a recurrence."""
    source = store.source
    size = effects.product(store.memory.shape)
    if source is None or store.index or effects.product(store.target.shape) != size:
        return False
    return _are_inputs(source, len(store.memory.shape)) or _is_recurrent(source.value)


def _are_inputs(source: View, rank: int) -> bool:
    """Whether the last dimension of [batch, channels, width] walks tokens: joined to those before,
    or another axis than a projection's features."""
    value, last = source.value, source.effect.dims[-1]
    axes = {atom.axis for atom in last}
    if rank != 3 or not axes:
        return False
    joined = value.op == "aten.cat" and axes == {value.args[1]}
    return joined or len(value.shape) - 1 not in axes


def _is_recurrent(value: Value) -> bool:
    before = upstream(value, _REACH, lambda v: match_gemm(v) is None)
    return any(v.op in _RECURRENT and v.projected and match_gemm(v) is None for v in before)
