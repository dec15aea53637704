"""Stacked expert weights that the graph dequantises in front of a GEMM.

    w[e, n, k] = decode(byte of (e, n, k)) * block scale * factors of an expert

The decoding is recognised by its results for all 256 bytes (:mod:`.byte_functions`). The factors
are recognised by the dimensions along which they vary. The result has the form that
`ops/formats/expert_weight.py` expects. The first and last codes of E8M0 have the meaning of that
format: 0 is 2^-127, and 255 is NaN. The scales of NVFP4 keep their sign if the decoder of the graph
keeps it.

The module also matches activations [M, K] that the graph decodes from NVFP4 codes and scales.
Dimension letters: E experts, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.formats.weight import code_numbers
from tilewright.ops.runtime.dtypes import torch_types
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.byte_functions import (
    ByteFunction,
    byte_function,
    looked_up_inputs,
)
from tilewright.patterns.quantised.expert_arguments import DequantizedExperts, blocks_of
from tilewright.patterns.quantised.factors import (
    BlockScale,
    Coded,
    Factor,
    Factors,
    match_coded,
    multiple,
    repeats,
    with_factor,
)
from tilewright.patterns.quantised.positions import every, joined
from tilewright.patterns.quantised.words import holds_codes

_EXPERTS = {name for name, form in WEIGHT_FORMATS.items() if form.expert_scales}
# The formats of experts, and the formats of linears whose codes are not themselves the numbers of
# the weight.
_CODED = {n: form for n, form in WEIGHT_FORMATS.items() if form.expert_scales or form.number}
# The kinds of scales that are not plain numbers, by their dtypes.
_STORED_SCALES = {"fp8e4nv": "e4m3", "u8": "e8m0"}


def _all_numbers(form: WeightFormat) -> torch.Tensor:
    """Returns the numbers into which the codes of a format are decoded. There are 16 or 256 of
    them."""
    (dtype,) = torch_types(form.stored)
    codes = torch.arange(2**form.bits)
    if form.packed_axis is None:
        stored = codes.to(torch.uint8).view(dtype)
    else:
        stored = pack_nibbles(codes, dtype, 0)
    return code_numbers(stored, form, torch.float64) - form.expert_zero


_NUMBERS = {name: _all_numbers(form) for name, form in _CODED.items()}
_E2M1 = _NUMBERS["nvfp4"]


def match_dequantized_experts(weight: View) -> DequantizedExperts | None:
    """Returns the codes from which a view [E, N, K] of a product's weight is dequantised. Returns
    None if the view is not dequantised.

    Raises Reject (WEIGHT_FORMAT, SCALE_BLOCK) for codes that are used in another way.
    """
    if not all(isinstance(n, int) for n in weight.shape) or not holds_codes(weight.value):
        return None
    found = _match(weight)
    if found is None or found.format not in _EXPERTS:
        _refuse(weight)
    return found


def match_dequantized_rows(rows: View) -> DequantizedExperts | None:
    """Returns the NVFP4 codes and scales from which activations [M, K] are decoded, or None.

    `data` is the packed codes [M, K/2]. If the graph keeps one code per byte, `data` is a
    `Computed` that packs the codes. `scale` is [M, K], with repetitions. The factors are one number
    for each row, or one number for all rows.
    """
    found = _match(rows)
    return found if found is not None and found.format == "nvfp4" else None


# --- codes ----------------------------------------------------------------------------------------


def _match(weight: View) -> DequantizedExperts | None:
    try:
        return _one_by_one(weight) or match_packed(weight) or _whole(weight)
    except InexpressibleError:
        return None


def _one_by_one(weight: View) -> DequantizedExperts | None:
    """Matches a stack of weights that the graph decodes expert by expert."""
    if weight.value.op != "aten.cat" or len(weight.shape) != 3 or weight.shape[0] < 2:
        return None
    parts = []
    for expert in range(weight.shape[0]):
        found = _match(weight.narrow(0, expert, 1))
        if found is None or not isinstance(found.data, View):
            return None
        parts.append(found)
    kinds = {
        (p.format, p.steps, p.unsigned, p.number, len(p.factors), len(p.divisors)) for p in parts
    }
    data = joined([p.data for p in parts if isinstance(p.data, View)], 0)
    if len(kinds) != 1 or data is None:
        return None
    stacked = replace(parts[0], data=data, shape=weight.shape)
    return replace(
        stacked,
        scale=joined([p.scale for p in parts], 0),
        factors=_joined_each([p.factors for p in parts]),
        divisors=_joined_each([p.divisors for p in parts]),
    )


def _joined_each(factors: Sequence[Sequence[View]]) -> tuple[View, ...]:
    """Joins the factors of all experts. The first view joins the first factor of each expert, the
    second view joins the second factor of each expert, and so on."""
    views = (joined(list(views), 0) for views in zip(*factors, strict=True))
    return tuple(view for view in views if view is not None)


def match_packed(weight: View) -> DequantizedExperts | None:
    """Returns the codes from which weights [E, N, K] or [N, K] are dequantised, if each byte has
    two codes along K in the order of the format; else None. Raises InexpressibleError if no view
    expresses the codes or scales."""
    axis, columns = len(weight.shape) - 1, weight.shape[-1]
    if not isinstance(columns, int) or columns % 2:
        return None
    halves: list[Coded[ByteFunction]] = []
    names = set()
    for position in range(2):
        coded = _coded(every(weight, axis, 2, position))
        known = None if coded is None else _nibble(coded.code.table, position)
        if coded is None or known is None:
            return None
        name, unit = known
        halves.append(replace(coded, number=coded.number * unit))
        names.add((name, halves[-1].number, coded.code.leaf, len(coded.factors)))
    if len(names) != 1:
        return None
    factors = []
    for one, other in zip(halves[0].factors, halves[1].factors, strict=True):
        view = joined([one.view, other.view], axis)
        if one.kind != other.kind or view is None:
            return None
        factors.append(Factor(view, one.kind))
    ((decoded, *_),) = names
    data = _as_dtype(halves[0].code.leaf, torch.uint8)
    return _scaled(weight, data, decoded, factors, halves[0].number)


def _whole(weight: View) -> DequantizedExperts | None:
    """Matches one code per byte: float8_e4m3fn codes, and for activations also E2M1 codes, which
    are then packed."""
    coded = _coded(weight)
    if coded is not None and (known := _decoded_as(coded.code.table)) is not None:
        name, factor = known
        leaf = _as_dtype(coded.code.leaf, *torch_types(WEIGHT_FORMATS[name].stored))
        return _scaled(weight, leaf, name, coded.factors, coded.number * factor)
    if len(weight.shape) != 2:
        return None
    coded = _coded(weight, 16)
    unit = None if coded is None else multiple(coded.code.table, _E2M1)
    if coded is None or unit is None or coded.code.leaf.value.dtype != torch.uint8:
        return None
    low, high = (every(coded.code.leaf, 1, 2, position) for position in range(2))
    packed = Computed("add", (low, Computed("mul", (high, 16))))
    return _scaled(weight, packed, "nvfp4", coded.factors, coded.number * unit)


def _as_dtype(leaf: View, dtype: torch.dtype) -> View | Computed:
    return leaf if leaf.value.dtype == dtype else Computed("bitcast", (leaf, dtype))


def _nibble(table: torch.Tensor, position: int) -> tuple[str, float] | None:
    """Returns (format, unit) for the first code (0) or the second code (1) of a byte, if this code
    alone determines the result; else None."""
    if table.shape[0] != 256:
        return None
    for nibble, by_nibble in enumerate((table.view(16, 16).T, table.view(16, 16))):
        if torch.equal(by_nibble, by_nibble[:, :1].expand(16, 16)):
            known = _decoded_as(by_nibble[:, 0])
            if known is not None and _CODED[known[0]].order[position] == nibble:
                return known
    return None


def _decoded_as(table: torch.Tensor) -> tuple[str, float] | None:
    """Returns (name, unit) of the first format whose numbers, multiplied by the unit, equal the
    numbers of the table; else None."""
    for name, numbers in _NUMBERS.items():
        unit = multiple(table, numbers)
        if unit is not None:
            return name, unit
    return None


def _coded(view: View, size: int = 256) -> Coded[ByteFunction] | None:
    """Returns the codes and the factors of a view if each element is computed from a separate byte;
    else None."""

    def match_code(view: View) -> ByteFunction | None:
        found = byte_function(view, size)
        return None if found is None or repeats(found.leaf.effect) else found

    return match_coded(view, match_code)


def _scaled(
    weight: View, data: View | Computed, decoded: str, given: Sequence[Factor], number: float
) -> DequantizedExperts | None:
    """Returns the weight with these codes and factors. Returns None if no format has both. decoded:
    a format that has such codes."""
    found: Factors | None = Factors(number=number)
    for factor in given:
        found = None if found is None else with_factor(found, factor)
    if found is None or found.number <= 0:
        return None
    block = found.block
    name = _format_of(decoded, None if block is None else block.kind)
    if name is None and block is not None and block.view.value.dtype == torch.float8_e8m0fnu:
        block = BlockScale(block.view, "float", (("to", torch.float32),))  # exact
        name = _format_of(decoded, block.kind)
    if name is None or found.guard not in (None, None if block is None else block.view):
        return None
    result = DequantizedExperts(
        data,
        name,
        weight.shape,
        None if block is None else block.view,
        () if block is None else block.steps,
        block is not None and block.unsigned,
        found.factors,
        found.divisors,
        found.number,
    )
    if len(weight.shape) == 3 and block is not None:
        blocks_of(result)  # raises if scales do not repeat over blocks
    return result


def _format_of(decoded: str, scales: str | None) -> str | None:
    """Returns the format that has these codes and this kind of scale, or None. scales: None if the
    weight has no scale."""
    for name, form in _CODED.items():
        kinds = {_STORED_SCALES.get(dtype, "float") for dtype in form.expert_scales or ("fp32",)}
        same = multiple(_NUMBERS[name], _NUMBERS[decoded]) == 1
        if same and (scales or "float") in kinds:
            return name
    return None


# --- refusals -------------------------------------------------------------------------------------


def _refuse(weight: View) -> NoReturn:
    table = looked_up_inputs(weight)
    if table is not None:
        message = (
            f"the expert weight is decoded by the table {table}, whose numbers are data of the "
            "model and may change"
        )
        hint = (
            "create the table where it is used, torch.tensor([0.0, 0.5, ...]), and compile the "
            "model itself, because torch.export makes such a table an input"
        )
        reject("WEIGHT_FORMAT", Stage.GUARDS, message, weight, hint=hint)
    message = f"{weight.value} is dequantised from codes, in a format that the op does not support"
    hint = (
        "the known formats are NVFP4 (a float8_e4m3fn scale per 16 columns), MXFP4 (an e8m0 "
        "scale per 32 columns), and float8_e4m3fn or nibbles from -8 to 7 with one scale per "
        "block"
    )
    reject("WEIGHT_FORMAT", Stage.GUARDS, message, weight, hint=hint)
