"""Distinguishes attention to a cache, which comes from outside of the graph, from attention to new
keys.

If attention to a cache is not matched, the miss counts as lost: the graph reads the whole cache,
while the op would read only a part of the cache.
"""

from __future__ import annotations

from tilewright.patterns.attention.bare import bare
from tilewright.patterns.attention.decoded import decoded
from tilewright.patterns.attention.pages import pages_of
from tilewright.patterns.attention.shared_heads import group_of, once
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.recognise.attention import factors_of, sketch_of


def reads_a_cache(value: Value) -> bool:
    """Whether the keys of an attention are a cache from outside of the graph. Such a cache is:
    pages; memory that the graph writes; or an input, if the graph projects the queries."""
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
    """Returns keys as they are stored in memory, before casts and scales."""
    keys, _ = bare(view)
    codes = decoded(keys)
    return keys if codes is None else codes.codes


def _is_outside(value: Value) -> bool:
    """Whether a value is a write of keys to memory from outside of the graph."""
    store = value.store
    return store is not None and store.memory.is_input and len(store.memory.shape) > 2


def _is_given(keys: View) -> bool:
    """Whether keys are an input that has a dimension for heads. An input with fewer dimensions may
    be the activation of the layer."""
    return keys.value.op == "input" and len(keys.value.shape) > 3
