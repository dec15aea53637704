"""A pattern that fails. It is in a module of its own, as a user's pattern would be (see
test_failures.py)."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.patterns.language import register


@dataclass(frozen=True)
class Fails:
    name: str = "fails"
    op: str = "paged_kv_store"

    def anchors(self, flow):
        return [value for value in flow.values if value.op == "aten.cumsum"]

    def match(self, anchor, flow):
        raise ArithmeticError(f"at {anchor}")


PATTERN = register(Fails())
