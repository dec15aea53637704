"""A user's op that writes into an argument, and its pattern, in one file outside the package.

    table.index_copy_(0, rows, x * scale)   ⇒   tests_extension::scaled_store(x, scale, table, rows)

Dimension letters: R rows written, N rows of the table, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewright.ops import contract
from tilewright.ops.checks import check_dtype, check_shape
from tilewright.ops.contract import FusedOp, Tolerance
from tilewright.ops.schema import Written
from tilewright.patterns import effects, language
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Match, Stage, reject

NAME = "scaled_store"


@dataclass(frozen=True)
class ScaledStoreArguments:
    """The arguments of `scaled_store`: x [R, W], scale [W], and table [N, W], which is written at
    rows [R]. All are float32."""

    x: torch.Tensor
    scale: torch.Tensor
    table: Written
    rows: torch.Tensor


def validate(a: ScaledStoreArguments) -> None:
    for name in ("x", "scale", "table"):
        check_dtype(NAME, name, getattr(a, name), (torch.float32,))
    check_shape(NAME, "x", a.x, "[R, W]", (None, None))
    check_shape(NAME, "scale", a.scale, "[W]", (a.x.shape[1],))
    check_shape(NAME, "table", a.table, "[N, W]", (None, a.x.shape[1]))


def reference(a: ScaledStoreArguments) -> None:
    a.table.index_copy_(0, a.rows, a.x * a.scale)


def sample_inputs(case: str, device: str = "cpu", seed: int = 0) -> ScaledStoreArguments:
    generator = torch.Generator().manual_seed(seed)
    x, scale, table = (torch.randn(s, generator=generator) for s in ((3, 8), (8,), (6, 8)))
    return ScaledStoreArguments(x, scale, table, torch.tensor([5, 0, 2]))


OP = contract.register(
    FusedOp(
        namespace="tests_extension",
        name=NAME,
        arguments=ScaledStoreArguments,
        returns="()",
        validate=validate,
        reference=reference,
        lowerings=(),
        cases=("small",),
        sample_inputs=sample_inputs,
        tolerances={torch.float32: Tolerance(relative=0.0, of_rms=0.0)},
        error_model="the same product, rounded once",
    )
)

language.register_code("SCALED_STORE_SOURCE", "what is written is not a product with a scale [W]")


@dataclass(frozen=True)
class ScaledStore:
    """Matches a write of whole rows into an input of rank two."""

    name: str = NAME
    op: str = OP.qualified_name

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        return (v for v in flow.stores if v.store.memory.is_input and v.store.source is not None)

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        store = anchor.store
        whole = effects.is_identity(store.target, store.memory.shape)
        if not whole or len(store.memory.shape) != 2 or list(store.index) != [0]:
            reject("SLOT_INDEX", Stage.ANCHORED, "whole rows are written by one index", anchor)
        if store.accumulate:
            reject("ACCUMULATED_WRITE", Stage.ANCHORED, "the write adds", anchor)
        product = store.source.value
        if product.op != "aten.mul" or len(product.operands) != 2 or not store.source.is_whole:
            reject(
                "SCALED_STORE_SOURCE",
                Stage.K_PATH,
                f"{product.op} is written, expected a product with a scale",
                product,
                hint="multiply right before the write",
            )
        x, scale = sorted(product.operands, key=lambda view: -len(view.shape))
        if len(scale.shape) != 1:
            reject("SCALED_STORE_SOURCE", Stage.K_PATH, f"the scale is {scale.shape}", product)
        rows = store.index[0]
        return Match(
            anchor=anchor,
            arguments={"x": x, "scale": scale, "table": store.memory.root, "rows": rows},
            results=(),
            absorbed=(product,),
            stores=(anchor,),
            facts={"rows": rows.shape[0], "table": "x".join(map(str, store.memory.shape))},
            scope=anchor.scope,
        )


PATTERN = ScaledStore()
