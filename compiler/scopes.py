"""Computes the names of places in a model, for new reports and for saved reports."""

from __future__ import annotations

import re


def collapse_scope(scope: str) -> str:
    """Returns `model.layers.*.self_attn` for `model.layers.13.self_attn`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", scope)


_LAYER = re.compile(r"^((?:[A-Za-z_]\w*\.)*)(\d+)(?=\.|$)")


def layer_of(scope: str) -> str:
    """Returns the layer of a module path: `model.layers.3` for `model.layers.3.mlp`."""
    found = _LAYER.match(scope)
    return found[0] if found else ""
