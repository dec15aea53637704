"""The codes of misses: what each means, and whether something is lost by it; what to do about it is
said in `hints`."""

from __future__ import annotations

from typing import Literal, get_args

#: `lost`: what the model is written for was not fused. `advice`: nothing was lost by it.
Weight = Literal["lost", "advice"]

CODES: dict[str, str] = {
    "LORA_FORM": "the delta of adapters is computed in no known form",
    "LORA_OPERATOR": "the delta of adapters is computed by a custom operator",
    "LORA_IN_PLACE": "the delta of an adapter is added in place",
    "GROWING_CACHE": "the cache grows by concatenation, so there is no memory to write into",
    "FUNCTIONAL_WRITE": "the cache is updated out of place: a new tensor is returned",
    "FRESH_CACHE": "the cache is made inside the graph: there is nothing to write into yet",
    "OPAQUE_WRITE": "the cache is written by an operator whose effect is not known",
    "OPAQUE_CALL": "it is not known what a Python function writes, so behind it all has changed",
    "DECLARED_FORM": "what an operator is declared to mean does not fit its call",
    "PART_OF_CALL": "patterns know a part of what an operator computes, and products are left",
    "MASKED_WRITE": "a boolean mask selects the slots",
    "SLICE_WRITE": "the cache is written at a slice that does not tell which dimension is slots",
    "MOVED_CACHE": "the whole cache is written anew, so that old tokens change their slots",
    "ACCUMULATED_WRITE": "the write adds to what is there",
    "LONE_WRITE": "a K write without a V write of the same tokens, or the other way round",
    "LAYOUT": "the views regroup elements in a way that has no normal form",
    "CACHE_LAYOUT": "the cache is not a window [pages, page size, heads, head dim] of its memory",
    "SLOT_INDEX": "the tokens' slots are not addressed in a known way",
    "CAST": "the dtype changes between the projection and the cache",
    "K_PATH": "the keys do not come from a projection through known operations",
    "V_PATH": "the values do not come from a projection through layout alone",
    "Q_PATH": "no query projection of the same activation was found",
    "NORM_WIDTH": "the norm runs over neither one head nor all heads of its projection",
    "NORM_AFTER_ROPE": "the heads are normalised again after the rotation",
    "ROPE_STYLE": "the rotation is neither half-split nor interleaved over the first dimensions",
    "ROPE_TABLE": "cos and sin do not vary by token alone",
    "WEIGHT_FORMAT": "the weight is computed from codes in a way that the op does not know",
    "SCALE_BLOCK": "the scales of a quantised weight do not go by blocks of rows and columns",
    "ACTIVATION": "the projections do not read the same activation",
    "DTYPE": "activation, weights and cache do not share one supported dtype",
    "HEADS": "the query heads are not a multiple of the key-value heads",
    "CACHE_READ": "the cache is read between the absorbed writes",
    "CACHE_WRITE": "another write to the cache falls between the absorbed writes",
    "CACHE_ALIAS": "an operand shares memory with the cache",
    "CACHE_OVERLAP": "K and V are on one storage and not provably apart",
    "INPUT_MUTATED": "an operand is changed in place before the fused op could read it",
    "ESCAPES": "a value inside the match is used outside of it",
    "ORDER": "a result is used before the op's place, or an operand is computed after it",
    "COLLECTIVE": "a collective lies inside the match",
    "GRADIENT": "a gradient can flow through the site, and fused ops compute none",
    "TRANSFORM": "the site is inside of vmap, grad, jvp or a level of dual tensors",
    "SUBGRAPH": "the site is in a graph of its own, which an operator such as cond is given",
    "RANKS": "not all ranks fuse the same sums over ranks, so none does",
    "GRAPH_BREAK": "Dynamo could not trace part of the model, so no pattern saw it",
    "CLAIMED": "another match already absorbs part of this one",
    "NO_KERNELS": "the device has no kernels of the op, and PyTorch computes the site faster",
    "UNSUPPORTED": "the op does not support this combination",
    "SUBCLASS": "the cache or another operand is a tensor subclass, whose memory is not seen",
    "EARLIER_GRAPH": "what is written was computed in an earlier graph",
    "NO_GRAPH": "Dynamo captured no graph of the model, so no pattern saw it",
    "UNRECOGNISED": "no pattern recognises the form in which it is computed",
    "EMPTY": "the site computes a tensor of no elements",
    "INTERNAL": "a pattern, or tilewright itself, failed at this site",
}

#: Codes whose misses are `advice` unless the miss says otherwise; all others are `lost`.
WEIGHTS: dict[str, Weight] = {
    "RANKS": "advice",  # the library's collectives compute the graph as it is
    "CLAIMED": "advice",  # the site is fused, by the other match
    "EMPTY": "advice",  # nothing is computed there
    "PART_OF_CALL": "advice",  # the operator computes it as before
    "NO_KERNELS": "advice",  # the site is at its fastest as it is
    "UNRECOGNISED": "advice",  # it may be nothing that an op computes
    "EARLIER_GRAPH": "advice",  # the break is what is lost, and is told; else it is the design
}


def register_code(code: str, meaning: str, weight: Weight | None = None) -> None:
    """Adds a miss code of a user's pattern; ValueError where it already means something else.

    weight: of its misses, `lost` (also where none is given) or `advice`, see :class:`Miss`.
    """
    if CODES.setdefault(code, meaning) != meaning:
        raise ValueError(f"code: {code!r} already means {CODES[code]!r}, got {meaning!r}")
    if weight is None:
        return
    if weight not in get_args(Weight):
        raise ValueError(f"weight: expected one of {get_args(Weight)}, got {weight!r}")
    if WEIGHTS.setdefault(code, weight) != weight:
        raise ValueError(f"weight: {code!r} already is {WEIGHTS[code]!r}, got {weight!r}")
