"""Describes the arguments of libraries' operators for varlen attention.

The graph does not show what such an operator computes, so it is recognised by its name. `FORMS`
lists the known operators. An engine adds its own operators with :func:`register_varlen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.patterns.dataflow import Value, View


@dataclass(frozen=True)
class VarlenForm:
    """The names of the arguments of an operator for varlen attention.

    The operator computes softmax(scale * q @ k^T) @ v within each sequence, with q [T, H, D], k
    [K, H, D] and v [K, H, V]. The result is its only output, or its first output.

    Attributes:
        query, key, value, scale: The names of the operator's arguments.
        row_offsets, key_offsets: The names of the arguments that are the offsets [B + 1].
        causal: The name of a boolean argument. If the argument is true, the last query of a
            sequence attends to all keys of the sequence, the query before it attends to all keys
            but one, and so on. The name is "" if the operator is always causal.
        allowed: The names of further arguments, with the values that do not change the result.
    """

    query: str
    key: str
    value: str
    row_offsets: str
    key_offsets: str
    scale: str
    causal: str = ""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


FORMS: dict[str, VarlenForm] = {
    "torch_attn::_varlen_attn": VarlenForm(
        "query", "key", "value", "cu_seq_q", "cu_seq_k", "scale", "is_causal",
        {
            "window_size": (None, (-1, -1)), "seqused_k": (None,), "block_table": (None,),
            "enable_gqa": (False,),
        },
    ),
    "flash_attn::_flash_attn_varlen_forward": VarlenForm(
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal",
        {
            "dropout_p": (0.0,), "window_size_left": (-1,), "window_size_right": (-1,),
            "softcap": (0.0,), "alibi_slopes": (None,), "block_table": (None,),
            "leftpad_k": (None,), "seqused_k": (None,), "return_softmax": (False,),
        },
    ),
}  # fmt: skip


def register_varlen(op: str, form: VarlenForm) -> None:
    """Declares what an operator `namespace::name` of an engine computes.

    Raises ValueError if the operator is already known with another form.
    """
    if FORMS.setdefault(op, form) != form:
        raise ValueError(f"op: {op!r} is known as {FORMS[op]}, got {form}")


def name_of_op(value: Value) -> str:
    """Returns `namespace::name` for an operator of a library. Returns an empty string for every
    other value."""
    name = value.op.removeprefix("opaque:")
    return name if "::" in name and not name.startswith("python::") else ""


def arguments_of(value: Value) -> dict[str, Any]:
    """Returns all arguments of an operator by their names in its schema, including defaults."""
    target: Any = value.node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    given: dict[str, Any] = {}
    for position, spec in enumerate(target._schema.arguments):
        if position < len(value.args):
            given[spec.name] = value.args[position]
        else:
            given[spec.name] = value.kwargs.get(spec.name, spec.default_value)
    return given


def obstacle(form: VarlenForm, given: Mapping[str, Any]) -> str:
    """Returns "name is value" for an argument that requests something that the op does not compute.
    Returns "" if there is no such argument."""
    causal = bool(given[form.causal]) if form.causal else True
    for name, values in form.allowed.items():
        actual = given.get(name, values[0])
        actual = tuple(actual) if isinstance(actual, (list, tuple)) else actual
        if isinstance(actual, View) or actual not in values:
            # A window that includes all earlier keys is equal to the causal mask.
            if name == "window_size" and actual == (-1, 0) and causal:
                continue
            return f"{name} is {actual}"
    return ""
