"""Places of a model by name, for reports that are made here and for those that were saved."""

from __future__ import annotations

import re


def collapse_scope(scope: str) -> str:
    """`model.layers.13.self_attn` as `model.layers.*.self_attn`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", scope)
