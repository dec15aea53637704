"""What the kernels of the LoRA ops share: whose a row is, the sort by that, and how a spec is made.

Nothing here touches torch or a GPU, nor in `lora_shrink_kernels` and `lora_expand_kernels`: a
problem is what is static about one call site, a config is a choice of tiles, and the two give a
KernelSpec and a launch grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import get_target

# Run-time distances in elements; 16 divides them unless a problem's `unaligned` has them.
STEPS = ("second_distance", "third_distance", "s_plane_stride")


@dataclass(frozen=True)
class RowForm:
    """How a kernel learns which adapter a row has; see the template `lora_rows`.

    addressing: "single", "sequences", "groups", "rows" or "sorted". id_dtype None: groups are
    numbered as their adapters. one_each: an id for every row. groups, rows: the powers of two that
    the template wants.
    """

    addressing: str
    num_adapters: int
    id_dtype: str | None = None
    offset_dtype: str | None = None
    inclusive: bool = False
    one_each: bool = True
    groups: int = 1
    rows: int = 1

    def constants(self) -> dict[str, Constant]:
        return {
            "ADDRESSING": self.addressing,
            "INCLUSIVE": self.inclusive,
            "NUM_ADAPTERS": self.num_adapters,
            "GROUPS": self.groups,
        }

    def pointers(self) -> dict[str, str | None]:
        order = "*i32" if self.addressing == "sorted" else None
        ids = None if self.id_dtype is None else f"*{self.id_dtype}"
        offsets = None if self.offset_dtype is None else f"*{self.offset_dtype}"
        return {"ids_ptr": ids, "offsets_ptr": offsets, "order_ptr": order}


@dataclass(frozen=True)
class RowCounts:
    """The row counts of one call. groups: of a_offsets; rows_per_id: where ids are given alone."""

    num_rows: int
    total_rows: int
    groups: int = 0
    rows_per_id: int = 1


def tile_bound(form: RowForm, counts: RowCounts, block_m: int) -> int:
    """Tiles that cover all rows, whatever the adapters are."""
    rest = cdiv(counts.total_rows - counts.num_rows, block_m)
    if block_m == 1:
        return counts.total_rows
    if form.addressing == "single":
        return cdiv(counts.num_rows, block_m) + rest
    if form.addressing == "sequences":
        sequences = counts.num_rows // max(counts.rows_per_id, 1)
        return sequences * cdiv(counts.rows_per_id, block_m) + rest
    kinds = counts.groups if form.addressing == "groups" else form.num_adapters
    # Each kind of rows has one tile that is not full.
    partial = min(kinds + 1, counts.total_rows)
    return partial + (counts.total_rows - partial) // block_m


@dataclass(frozen=True)
class OrderConfig:
    """`lora_order`: rows that a program places, and rows that it counts at a time."""

    chunk: int = 256
    rows_per_load: int = 2048
    rows_per_step: int = 16
    num_warps: int = 8
    num_stages: int = 1


def order_spec(form: RowForm, config: OrderConfig, target: str) -> KernelSpec:
    """The sort that comes before a kernel of a "sorted" form."""
    constants: dict[str, Constant] = {
        "NUM_ADAPTERS": form.num_adapters,
        "GROUPS": form.groups,
        "CHUNK": config.chunk,
        "ROWS_PER_LOAD": config.rows_per_load,
        "ROWS_PER_STEP": config.rows_per_step,
    }
    arguments: dict[str, str | None] = {
        "ids_ptr": f"*{form.id_dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        **dict.fromkeys(("num_rows", "total_rows", "rows_per_id"), "i32"),
    }
    known = {} if not form.one_each else {"rows_per_id": 1}
    unaligned = ("ids_ptr",)
    return lora_spec(
        "lora.order", "lora_order", constants, arguments, known, unaligned, config.num_warps,
        config.num_stages, target,
    )  # fmt: skip


def order_grid(config: OrderConfig, total_rows: int) -> tuple[int]:
    return (cdiv(total_rows, config.chunk),)


def lora_spec(
    template: str,
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    known: Mapping[str, int],
    unaligned: tuple[str, ...],
    num_warps: int,
    num_stages: int,
    target: str,
) -> KernelSpec:
    """Absent tensors and known counts become constants, the rest is the signature."""
    pdl = get_target(target).has("dependent_launch")
    fixed: dict[str, Constant] = {**constants, "LAUNCH_PDL": pdl, **known}
    fixed |= {name: None for name, type_name in arguments.items() if type_name is None}
    signature = {
        name: type_name
        for name, type_name in arguments.items()
        if type_name is not None and name not in known
    }
    aligned = [
        name
        for name, type_name in signature.items()
        if (type_name.startswith("*") or name in STEPS) and name not in unaligned
    ]
    ranges = dict.fromkeys(("num_rows", "total_rows", "rows_per_id"), (1, 2**31 - 1))
    return KernelSpec.make(
        template,
        kernel,
        fixed,
        signature,
        divisible16=aligned,
        ranges={name: bounds for name, bounds in ranges.items() if name in signature},
        num_warps=num_warps,
        num_stages=num_stages,
        target=target,
        launch_pdl=pdl,
    )
