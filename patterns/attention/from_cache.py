"""Distinguishes attention to a cache from outside of the graph from attention to new keys.

A miss of the former is lost: the graph reads the whole cache where the op would read a part.
"""

from __future__ import annotations

from tilewright.patterns.attention.bare import bare
from tilewright.patterns.attention.decoded import decoded
from tilewright.patterns.attention.pages import pages_of
from tilewright.patterns.attention.shared_heads import group_of, once
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.recognise.attention import factors_of, sketch_of


def reads_a_cache(value: Value) -> bool:
    """Whether the keys of an attention are a cache from outside: memory that the graph writes,
    pages, or an input while the queries are projected."""
    sketch = sketch_of(value)
    if sketch is None:
        factors = factors_of(value)
        return any(_is_outside(_stored(view).value) for view in factors)
    keys = _stored(sketch.k)
    pages = pages_of(once(keys, group_of(keys)))
    if pages is not None:
        return pages.pool.value.op == "input" or _is_outside(pages.pool.value)
    return _is_outside(keys.value) or (_is_given(keys) and sketch.q.value.projected)


def _stored(view: View) -> View:
    """Returns keys as stored in memory, before casts and scales."""
    keys, _ = bare(view)
    codes = decoded(keys)
    return keys if codes is None else codes.codes


def _is_outside(value: Value) -> bool:
    """Whether a value is memory from outside after a write of keys."""
    store = value.store
    return store is not None and store.memory.is_input and len(store.memory.shape) > 2


def _is_given(keys: View) -> bool:
    """Whether keys are an input with a dimension of heads; an input of fewer dimensions may be a
    layer's own."""
    return keys.value.op == "input" and len(keys.value.shape) > 3
