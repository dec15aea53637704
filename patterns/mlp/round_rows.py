"""Activations that are rounded to float8 codes in front of fused linears.

    x = rms_norm(x) * norm_weight, or act(gate) * up, or any x
    codes, scale = e4m3(x / scale), amax(|x|) / 448       ⇒   round_rows(x, ...)

The pattern is tried after all other patterns, and only for few tokens. At that time the other
patterns have rewritten the graph, and some linears read codes and scales, while other linears read
decoded activations. One kernel replaces the kernels that Inductor would generate. This kernel also
lets the next kernel start early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK
from tilewright.ops.mlp.round_rows import MOST_ROUNDED_TOKENS, OP
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.effects import Size
from tilewright.patterns.language import Match, Result, Sought, Stage, register, reject
from tilewright.patterns.quantised.activations import DECODED_ROWS
from tilewright.patterns.quantised.rounded_rows import (
    RoundedRows,
    decoded_from,
    is_rounded,
    match_rounded_rows,
)
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.dtypes import rows_fact
from tilewright.patterns.recognise.row_norm import (
    match_norm_before,
    row_norm_arguments,
    unread,
)

# The fused ops whose activations this pattern computes.
READERS = ("fused_qkv_paged", "linear_activation", "linear_residual", "scaled_linear")
_READERS = frozenset(f"{kind}tilewright::{name}" for kind in ("", "opaque:") for name in READERS)
# The largest number of values between codes and the op that reads them.
_REACH = 12


@dataclass(frozen=True)
class RoundRows:
    """Matches activations that are rounded to float8 codes in front of fused linears."""

    name: str = "round_rows"
    op: str = "round_rows"
    optional: ClassVar[bool] = True  # without a kernel, Inductor's kernels are good enough
    sought: ClassVar[Sought] = Sought(
        f"activations of at most {MOST_ROUNDED_TOKENS} tokens that are rounded to float8 in front "
        "of fused linears"
    )

    def asked_afterwards(self, flow: Dataflow) -> bool:
        """Whether the graph rounds a quotient to codes. The method is called before other patterns
        rewrite the graph."""
        return any(map(is_rounded, flow.values))

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields the codes for few tokens that a fused linear reads, as they are or decoded."""
        for value in flow.values:
            if is_rounded(value) and (read := _as_read(value, flow)) is not None:
                tokens, _ = read
                if isinstance(tokens, int) and OP.slower(tokens=tokens) is None:
                    yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        rows, made = match_rounded_rows(anchor), _as_read(anchor, flow)
        assert made is not None
        group = _group_of(rows, made)
        decoding = decoded_from(rows, flow)
        results = [Result.of_rows(decoding[-1] if decoding else anchor, made)]
        results += [] if decoding else _scales(rows, made, flow)
        inside = (*rows.absorbed, anchor, *decoding)
        x, absorbed = _source(rows, made, results[0].replaced, inside, flow)
        return Match(
            anchor=results[0].replaced,
            arguments={"up": None, **rows.options, "group": group, **x, "decoded": bool(decoding)},
            results=tuple(results),
            absorbed=tuple(dict.fromkeys((*inside, *absorbed, *(r.replaced for r in results)))),
            facts={
                "x": rows_fact(rows.x.value.dtype, *made),
                "scales": "given" if rows.is_given else f"{group} columns" if group else "token",
                "norm": "rms" if "rms_norm" in x else "no",
                "activation": x.get("activation", "no"),
                "result": "numbers" if decoding else "codes",
            },
            scope=common_scope(rows.x.value.scope, anchor.scope),
        )


def _as_read(codes: Value, flow: Dataflow) -> tuple[Size, Size] | None:
    """Returns (number of tokens, number of columns) of the codes, or of the decoded activation, as
    a fused linear reads them. Returns None if no fused linear reads them."""
    between = {"cast", "aten.mul", DECODED_ROWS}
    found = flow.downstream(codes, _REACH, lambda one: one.op in between or one.op in _READERS)
    for reader in (one for one in found if one.op in _READERS):
        (tokens, columns) = reader.operands[0].shape
        if reader.operands[0].value in found:
            return tokens, columns
    return None


def _group_of(rows: RoundedRows, made: tuple[Size, Size]) -> int:
    """Returns the number of columns that share a scale, or 0 if all columns share one. Raises
    Reject (ACTIVATION_FORMAT) for a number that the op does not support."""
    if rows.is_given or rows.width == made[1]:
        return 0
    if rows.width == ACTIVATION_BLOCK and isinstance(made[1], int) and made[1] % rows.width == 0:
        return ACTIVATION_BLOCK
    message = f"{rows.width} of {made[1]} columns of rounded activations share a scale"
    reject("ACTIVATION_FORMAT", Stage.GUARDS, message, rows.codes, weight="advice")


def _scales(rows: RoundedRows, made: Sequence[Any], flow: Dataflow) -> Iterator[Result]:
    """Yields the results that are float32 scales. Raises Reject (ESCAPES) if other values read the
    scales."""
    tokens, columns = made
    own = {rows.codes, *rows.absorbed}
    if rows.is_given:
        wide = [one for one in flow.users.get(rows.scale, ()) if _widens(one)]
        one = effects.identity((1, 1))
        yield from (Result(v, effects.reshape(one, v.shape), output=1) for v in wide)
        return
    others = [user for user in flow.users.get(rows.scale, ()) if user not in own]
    wide = [rows.scale] if rows.scale.dtype == torch.float32 and others else others
    scales = effects.permute(effects.identity((columns // rows.width, tokens)), (1, 0))
    returned = rows.scale in flow.output_values and rows.scale.dtype != torch.float32
    for value in dict.fromkeys(wide):
        if (value is not rows.scale and not _widens(value)) or returned:
            message = f"{value} reads scales of rounded activations"
            reject("ESCAPES", Stage.HAZARDS, message, value, weight="advice")
        yield Result(value, effects.reshape(scales, value.shape), output=1)


def _widens(value: Value) -> bool:
    """Whether a value is the scales, cast to float32 and reshaped in any way."""
    cast = value.op == "cast" and value.dtype == torch.float32
    return cast and value.operands[0].is_regrouped


def _source(
    rows: RoundedRows,
    made: tuple[Size, Size],
    end: Value,
    inside: Sequence[Value],
    flow: Dataflow,
) -> tuple[dict[str, Any], tuple[Value, ...]]:
    """Returns the op's arguments for the numbers that are rounded, and the values that the op
    replaces with them."""
    numbers, place = rows.x.reshape(*made), flow.positions[end.node]
    norm = match_norm_before(numbers, inside, place, flow, OP)
    if norm is not None and norm.kind == "rms":
        return {"x": norm.x, **row_norm_arguments(norm)}, norm.absorbed
    found = match_activation(rows.x.value.whole)
    if found is None or found.name not in ACTIVATIONS or found.limit:
        return {"x": numbers}, ()
    views = [view for view in (found.gate, found.up) if view is not None]
    alone = set(found.absorbed) == set(unread(found.absorbed, inside, flow))
    if not alone or not all(_is_taken(view, rows.x.value, place, flow) for view in views):
        return {"x": numbers}, ()
    gate, up = (view and view.reshape(*made) for view in (found.gate, found.up))
    return {"x": gate, "up": up, "activation": found.name}, found.absorbed


def _is_taken(view: View, x: Value, place: int, flow: Dataflow) -> bool:
    """Whether the op can read an input of the activation at `place` in the program. x: the other
    input, whose dtype and shape the op requires."""
    same = view.value.dtype == x.dtype and view.shape == x.shape
    return same and flow.rows_are_dense(view) and not any(flow.changes(view, place))


register(RoundRows())
