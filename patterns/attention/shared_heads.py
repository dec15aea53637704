"""Finds keys and values in the form in which a cache stores them. A cache has only one head for all
query heads that share the head.

    k = cache[:, :, None].expand(B, Hkv, Hq // Hkv, K, D).reshape(B, Hq, K, D)    ⇒   cache

Dimension letters are explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

import math

from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Atom, coalesce


def group_of(*tensors: View) -> int:
    """Returns how many adjacent heads are equal in all of these tensors [B, K, H, D]."""
    return math.gcd(*(_repeats(view) for view in tensors))


def _repeats(view: View) -> int:
    """Returns how often each head is repeated before the next head; 1 if this number is unknown."""
    heads = view.effect.dims[2]
    last = heads[-1] if heads else None
    known = last is not None and last.axis is None and isinstance(last.length, int)
    return last.length if last is not None and known else 1


def once(view: View, group: int) -> View:
    """Returns [B, K, H / group, D] from [B, K, H, D]. The result has the first of every `group`
    equal heads."""
    if group == 1:
        return view
    batch, length, heads, width = view.effect.dims
    left = Atom(None, 0, heads[-1].length // group)
    return view.with_dims(batch, length, coalesce((*heads[:-1], left)), width)


def heads_repeat(view: View) -> bool:
    """Whether heads of [B, K, H, D] are repeated, either each head several times in a row or all
    heads in turn."""
    return any(atom.axis is None for atom in view.effect.dims[2])
