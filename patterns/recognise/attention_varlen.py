"""Describes the arguments of libraries' operators for varlen attention.

Such an operator is opaque to the graph, so it is recognised by its name: `FORMS` holds the known
operators, and an engine adds its own with :func:`register_varlen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.patterns.dataflow import Value, View


@dataclass(frozen=True)
class VarlenForm:
    """softmax(scale * q @ k^T) @ v within each sequence, q [T, H, D], k [K, H, D], v [K, H, V].

    The fields name the operator's arguments. row_offsets and key_offsets are [B + 1]. causal is a
    bool: if true, the last query of a sequence sees all its keys, the one before it all but one,
    and so on; "" if the operator is always causal. allowed: further arguments, with the values that
    change nothing. The result is the operator's only or first output.
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

    Raises ValueError if it is already known as something else.
    """
    if FORMS.setdefault(op, form) != form:
        raise ValueError(f"op: {op!r} is known as {FORMS[op]}, got {form}")


def name_of_op(value: Value) -> str:
    """Returns `namespace::name` of a library's operator; empty for anything else."""
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
    """Returns "name is value" for an argument that requires something that the op does not do; ""
    if there is none."""
    causal = bool(given[form.causal]) if form.causal else True
    for name, values in form.allowed.items():
        actual = given.get(name, values[0])
        actual = tuple(actual) if isinstance(actual, (list, tuple)) else actual
        if isinstance(actual, View) or actual not in values:
            # A window of all earlier keys is the causal mask.
            if name == "window_size" and actual == (-1, 0) and causal:
                continue
            return f"{name} is {actual}"
    return ""
