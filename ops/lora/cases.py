"""Sample inputs of the LoRA ops. The cases are small and random, and together they use every
option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.sampling import Sampler


@dataclass(frozen=True)
class LoraCase:
    """One case of the LoRA ops.

    Attributes:
        name: The name of the case.
        rows: How adapters are given: "single" (one adapter), "rows" (an id for each row, in any
            order), "sequences" (an id for each of num_sequences), "groups" (offsets and ids) or
            "ends" (inclusive offsets; group g has adapter g).
        num_rows: The number of rows.
        num_sequences: The number of sequences, for "sequences".
        sizes: The number of rows of each group. For "groups" and "ends", the sizes determine the
            number of rows, and num_rows is not used.
        ids: The adapter of each group.
        spare: The number of rows that belong to no group.
        base_rows: The number of rows of the batch after the M rows that may have adapters.
        num_adapters: The number of adapters, G.
        hidden: The number of columns of `a`, K.
        ranks: The ranks of q, k and v; 0 for a projection without an adapter.
        widths: The numbers of columns of q, k and v.
        layout: "stacked" (b [G, 3N, K]), "separate" or "transposed" ([G, K, R] viewed as [G, R,
            K]).
        bases: Which of q, k and v have a base: "all", "none", "q" or "packed" (they are parts of
            one tensor).
        scale: How deltas are scaled: "none", "number", "each" or "adapter".
        packed: The argument of `lora_expand_add`.
        dtype: The dtype of the values.
        index_dtype: The dtype of the offsets and ids.
        none_every: If it is not 0, a row has no adapter if this number divides the row's index.
    """

    name: str
    rows: str = "rows"
    num_rows: int = 11
    num_sequences: int = 1
    sizes: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    spare: int = 0
    base_rows: int = 0
    num_adapters: int = 4
    ranks: tuple[int, int, int] = (16, 16, 16)
    hidden: int = 96
    widths: tuple[int, int, int] = (48, 32, 32)
    layout: str = "separate"
    bases: str = "all"
    scale: str = "none"
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int32
    none_every: int = 0

    @property
    def total_rows(self) -> int:
        """M, the number of rows that may have adapters."""
        return sum(self.sizes) + self.spare if self.sizes else self.num_rows


SHRINK_CASES = (
    # First the cases of Modular MAX's tests, then cases that these tests do not have.
    LoraCase("one_group", "groups", sizes=(16,), ids=(0,), num_adapters=1, layout="stacked"),
    LoraCase("same_adapter", "groups", sizes=(8, 12, 10), ids=(1, 1, 1), layout="stacked"),
    LoraCase("four_groups", "groups", sizes=(8, 107, 72, 14), ids=(0, 1, 2, 0), num_adapters=3,
             layout="stacked", hidden=512),
    LoraCase("base_after", "groups", sizes=(8, 10, 12), ids=(0, 1, 2), base_rows=30,
             layout="stacked", ranks=(8, 8, 8), hidden=256),
    LoraCase("odd_sizes", "groups", sizes=(8, 127, 35, 14), ids=(0, 1, 1, 2), base_rows=9,
             layout="stacked", hidden=256),
    LoraCase("no_adapter", "groups", sizes=(5, 9, 0, 3), ids=(-1, 2, 1, -1), spare=2,
             index_dtype=torch.int64),
    LoraCase("empty_first", "groups", sizes=(0, 7, 0, 0), ids=(3, 2, 1, 0), dtype=torch.float16),
    LoraCase("nothing_active", "groups", sizes=(0, 0), ids=(0, 1), spare=6),
    LoraCase("ends", "ends", sizes=(3, 0, 17, 2), index_dtype=torch.int64, ranks=(24, 24, 24)),
    LoraCase("rows", none_every=3, index_dtype=torch.int64),
    LoraCase("rows_many", num_rows=70, num_adapters=9, ranks=(12, 12, 12), layout="transposed",
             none_every=7),
    LoraCase("one_row", num_rows=1, ranks=(100, 100, 100), hidden=72),
    LoraCase("high_rank", num_rows=20, ranks=(200, 136, 128), hidden=48, none_every=5),
    LoraCase("sequences", "sequences", num_rows=12, num_sequences=4, hidden=40),
    LoraCase("single", "single", num_rows=5, num_adapters=1, ranks=(8, 0, 20)),
    LoraCase("only_v", "single", num_rows=19, num_adapters=1, ranks=(0, 0, 9), hidden=33,
             layout="transposed"),
    LoraCase("no_rows", num_rows=0, layout="stacked"),
    LoraCase("single_precision", none_every=2, dtype=torch.float32, ranks=(4, 8, 2)),
    LoraCase("double", "groups", sizes=(2, 3), ids=(1, -1), dtype=torch.float64),
)  # fmt: skip

EXPAND_CASES = (
    LoraCase("groups", "groups", sizes=(8, 107, 0, 14), ids=(0, 1, 2, -1), spare=3,
             scale="adapter"),
    LoraCase("base_after", "groups", sizes=(8, 10), ids=(1, 0), base_rows=7, widths=(40, 24, 24)),
    LoraCase("ends", "ends", sizes=(3, 0, 17, 2), index_dtype=torch.int64, ranks=(24, 8, 9)),
    LoraCase("rows", none_every=3, scale="each", index_dtype=torch.int64, dtype=torch.float16),
    LoraCase("rows_many", num_rows=70, num_adapters=9, layout="transposed", none_every=7,
             scale="adapter", widths=(160, 33, 33)),
    LoraCase("one_row", num_rows=1, ranks=(100, 100, 100), bases="none"),
    LoraCase("sequences", "sequences", num_rows=12, num_sequences=4, scale="number"),
    LoraCase("single", "single", num_rows=5, num_adapters=1, ranks=(8, 0, 20), scale="number"),
    LoraCase("only_v", "single", num_rows=19, num_adapters=1, ranks=(0, 0, 9), bases="none"),
    LoraCase("packed", num_rows=13, packed=True, bases="packed", base_rows=4),
    LoraCase("packed_delta", num_rows=13, packed=True, bases="none", none_every=4),
    LoraCase("packed_q_and_v", num_rows=6, packed=True, bases="packed", ranks=(16, 0, 16)),
    LoraCase("only_q_has_a_base", num_rows=6, bases="q", none_every=4),
    LoraCase("no_rows", num_rows=0),
    LoraCase("single_precision", none_every=2, dtype=torch.float32, ranks=(4, 8, 2)),
    LoraCase("double", "groups", sizes=(2, 3), ids=(1, -1), dtype=torch.float64, scale="adapter"),
)  # fmt: skip


def sample_shrink(case: LoraCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `shrink_qkv_permute_3mn` by name."""
    sampler = Sampler(device, seed)
    total = case.total_rows + case.base_rows
    made: dict[str, Any] = {"a": sampler.normal(total, case.hidden, dtype=case.dtype)}
    if case.base_rows:
        made["num_rows"] = case.total_rows
    shapes = [(case.num_adapters, rank, case.hidden) for rank in case.ranks]
    weights = _weights(case, sampler, shapes)
    if case.layout == "stacked":
        made["b"] = torch.cat([weight for weight in weights if weight is not None], 1)
    else:
        made |= dict(zip(("q_weight", "k_weight", "v_weight"), weights, strict=True))
    return made | sample_rows(case, sampler)


def sample_expand(case: LoraCase, device: str | torch.device, seed: int) -> dict[str, Any]:
    """Returns arguments of `lora_expand_add` by name."""
    sampler = Sampler(device, seed)
    planes = sum(rank > 0 for rank in case.ranks)
    rank = max(case.ranks)
    shapes = [
        (case.num_adapters, width, own) for width, own in zip(case.widths, case.ranks, strict=True)
    ]
    weights = _weights(case, sampler, shapes)
    made: dict[str, Any] = {
        "s": sampler.normal(planes, case.total_rows, rank, dtype=case.dtype),
        **_bases(case, sampler),
        **dict(zip(("q_weight", "k_weight", "v_weight"), weights, strict=True)),
        "packed": case.packed,
    }
    if case.scale == "adapter":
        made["scales"] = 1 + torch.arange(case.num_adapters, device=sampler.device) / 4
    elif case.scale != "none":
        made["scale"] = [2.0] if case.scale == "number" else [2.0, -0.5, 0.25]
    return made | sample_rows(case, sampler)


def _weights(
    case: LoraCase, sampler: Sampler, shapes: list[tuple[int, int, int]]
) -> list[torch.Tensor | None]:
    """Returns a weight of each shape; None if a dimension is 0."""
    made: list[torch.Tensor | None] = []
    for shape in shapes:
        weight = sampler.normal(*shape, dtype=case.dtype, scale=max(shape[2], 1) ** -0.5)
        if case.layout == "transposed":
            weight = weight.mT.contiguous().mT
        made.append(weight if 0 not in shape else None)
    return made


def _bases(case: LoraCase, sampler: Sampler) -> dict[str, torch.Tensor | None]:
    rows = case.total_rows + case.base_rows
    packed = sampler.normal(rows, sum(case.widths), dtype=case.dtype)
    given: list[torch.Tensor | None] = list(packed.split(case.widths, 1))
    if case.bases != "packed":
        given = [None if base is None else base.contiguous() for base in given]
    wanted = {"none": (), "q": (0,)}.get(case.bases, (0, 1, 2))
    return {name: given[i] if i in wanted else None for i, name in enumerate("qkv")}


def sample_rows(case: LoraCase, sampler: Sampler) -> dict[str, Any]:
    """Returns a_offsets, expert_ids and the arguments that belong to them."""
    if case.rows == "single":
        return {}
    dtype, device = case.index_dtype, sampler.device
    if case.rows in ("rows", "sequences"):
        count = case.num_sequences if case.rows == "sequences" else case.num_rows
        ids = sampler.permutation(max(count, 1))[:count] % case.num_adapters
        if case.none_every:
            ids[:: case.none_every] = -1
        return {"expert_ids": ids.to(dtype).to(device)}
    ends = torch.tensor(case.sizes).cumsum(0)
    if case.rows == "ends":
        return {"a_offsets": ends.to(dtype).to(device), "inclusive_offsets": True}
    offsets = torch.cat((ends.new_zeros(1), ends)).to(dtype).to(device)
    ids = torch.tensor(case.ids, dtype=dtype, device=device)
    return {"a_offsets": offsets, "expert_ids": ids}
