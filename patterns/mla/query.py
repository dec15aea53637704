"""The query of latent attention. If the projection of the query is found, the op rotates the query.

    q = linear(x, q_b)                                    [T, H, N + R]
    q = cat(q[..., :N], rope(q[..., N:]))         ⇒       q, cos and sin

If the projection is not found, the argument of the op is the query as the graph computes it.

Dimension letters: B sequences with S queries each, T = B * S; H heads; N and R are the widths of
the two parts of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.attention.bare import by_token
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Reject, Stage
from tilewright.patterns.mla.keys import assembled
from tilewright.patterns.projection.heads import Heads, match_heads, rope_table
from tilewright.patterns.projection.rows import Rows
from tilewright.patterns.recognise.attention import Attention
from tilewright.patterns.recognise.linear import Path, holds_all_tokens

_PATH = Path("Q_PATH", Stage.Q_PATH, "attention")


@dataclass(frozen=True)
class Query:
    """The op's arguments for the query: q [T, H, N + R] and, if the op rotates q, the tables of cos
    and sin.

    absorbed: the values between the projection and the attention.
    """

    arguments: dict[str, Any]
    absorbed: tuple[Value, ...]

    @property
    def style(self) -> str:
        return str(self.arguments.get("rope_style", "none"))


def match_query(attention: Attention, nope: int, flow: Dataflow) -> Query:
    """Returns the query of an attention. nope: N, the width of the part that is not rotated."""
    try:
        found = _unrotated(attention, nope, flow)
    except (Reject, InexpressibleError):
        found = None
    if found is not None:
        return found
    return Query({"q": whole_query(attention)}, ())


def whole_query(attention: Attention) -> View | Computed:
    """Returns the query [T, H, N + R] of an attention, as the graph made it."""
    parts = tuple(by_token(q) for q, _ in attention.terms)
    return parts[0] if len(parts) == 1 else Computed("cat", (parts, -1))


def _unrotated(attention: Attention, width: int, flow: Dataflow) -> Query | None:
    """Returns the query before its rotation, if it is the whole output of one projection; else
    None."""
    made = assembled([q for q, _ in attention.terms], flow)
    if len(made.pieces) != 2 or made.scratch:
        return None
    nope, rope = (match_heads(piece.view, _PATH) for piece in made.pieces)
    heads = rope.num_heads
    both = nope.head_dim + rope.head_dim
    step = ((heads, both),) if heads > 1 else ()
    value = rope.linear.value
    plain = nope.rope is None and nope.norm is None and rope.norm is None
    plain = plain and nope.linear.value is value and nope.head_dim == width
    plain = plain and nope.rows == Rows(0, step, width)
    plain = plain and rope.rows == Rows(width, step, rope.head_dim)
    plain = plain and value.shape[-1] == heads * both
    plain = plain and rope.linear.layout == effects.identity(value.shape)
    if not plain or rope.rope is None or rope.rope.rotary_dim != rope.head_dim:
        return None
    if not all(_in_order(part) for part in (nope, rope)):
        return None
    kept = {*rope.linear.absorbed}
    between = [v for part in (nope, rope) for v in part.absorbed if v not in kept]
    absorbed = tuple(dict.fromkeys((*made.absorbed, *between)))
    inside = {*absorbed, *attention.absorbed}
    if any(not inside.issuperset(flow.users.get(v, ())) for v in absorbed):
        return None
    if any(v in flow.output_values for v in absorbed):
        return None
    tokens = effects.product(value.shape[:-1])
    q = effects.reshape(effects.identity(value.shape), (tokens, heads, both))
    arguments = {
        "q": View(value, q),
        "cos": rope_table(rope, rope.rope.cos),
        "sin": rope_table(rope, rope.rope.sin),
        "rope_style": rope.rope.style,
        "rope_on": "q",
    }
    return Query(arguments, absorbed)


def _in_order(part: Heads) -> bool:
    """Whether [B, S, H, D] has every token of the projection once and in order, head by head."""
    by_head = part.rows.dims(part.feature) == part.layout.dims[2:]
    return by_head and holds_all_tokens(part.layout, 2, part.tokens)
