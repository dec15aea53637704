"""Places of a model by name, for reports that are made here and for those that were saved."""

from __future__ import annotations

import re


def collapse_scope(scope: str) -> str:
    """`model.layers.13.self_attn` as `model.layers.*.self_attn`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", scope)


_LAYER = re.compile(r"^((?:[A-Za-z_]\w*\.)*)(\d+)(?=\.|$)")


def layer_of(scope: str) -> str:
    """The layer that a module path belongs to: `model.layers.3` of `model.layers.3.mlp`."""
    found = _LAYER.match(scope)
    return found[0] if found else ""
