"""What to do about a miss, by its code where its message brings no hint of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.patterns.dataflow import scope_of

# Calls whose result has the dtype of their operands, unless autocast computes them.
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
# Nodes looked at before a miss for products that autocast computed.
_REACH = 64


def hint_for(code: str, nodes: Sequence[fx.Node]) -> str:
    """What to do about a miss of `code` at these nodes; "" for a code that has no hint."""
    hint = _HINTS.get(code, "")
    return hint if isinstance(hint, str) else hint(nodes)


def with_declare(hint: str, code: str, nodes: Sequence[fx.Node]) -> str:
    """A hint that names `declare` too, where one of the nodes calls an operator of a library."""
    if code not in _OF_UNKNOWN_OPERATORS or "compiler.declare" in hint:
        return hint
    name = next(filter(None, map(_library_operator, nodes)), "")
    if not name:
        return hint
    said = f"say what {name} computes: tilewright.compiler.declare"
    return f"{hint}; or {said}" if hint else said


def _library_operator(node: fx.Node) -> str:
    """`namespace::name` of an operator that PyTorch does not bring; "" for other nodes."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _TORCHS:
        return ""
    return str(target._schema.name)


# Namespaces of operators that PyTorch brings, and of ours.
_TORCHS = frozenset({
    "aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor", "symm_mem", "inductor",
    "quantized", "tilewright", "torch_attn",
})  # fmt: skip
# The codes of sites at which an operator may stand that is not known.
_OF_UNKNOWN_OPERATORS = frozenset({
    "ABSORBED_DECODE", "ACTIVATION", "ACTIVATION_FORMAT", "ATTENTION_FORM", "CACHE_READ",
    "CACHE_WRITE", "CAST", "ESCAPES", "EXPERT_ACTIVATION", "EXPERT_COMBINE", "EXPERT_ENDS",
    "EXPERT_KERNEL", "EXPERT_ORDER", "EXPERT_SCORES", "EXPERT_WEIGHT", "K_PATH", "LATENT_KEYS",
    "LATENT_VALUES", "LATENT_WEIGHT", "LINEAR_FORM", "LONE_WRITE", "LORA_FORM", "LORA_OPERATOR",
    "OPAQUE_WRITE", "Q_PATH", "ROPE_STYLE", "ROPE_TABLE", "ROUTER_CHOICE", "ROUTER_GROUPS",
    "ROUTER_WEIGHTS", "SLOT_INDEX", "V_PATH", "WEIGHT_FORMAT",
})  # fmt: skip


def _one_dtype(nodes: Sequence[fx.Node]) -> str:
    """Names autocast where it made the dtypes differ."""
    computed = next(filter(None, map(_autocast_dtype, _before(nodes))), None)
    if computed is None:
        return "load the model and allocate its caches in one dtype, as model.to(torch.bfloat16)"
    return (
        f"autocast computes in {computed} with weights of another dtype, and casts them in every "
        f"call: load the model and its caches with model.to({computed}), and leave autocast out"
    )


def _before(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes and those that they are computed from, nearest first."""
    found = list(nodes)
    for node in found:  # grows meanwhile
        if len(found) < _REACH:
            found += [source for source in node.all_input_nodes if source not in found]
    return found[:_REACH]


def _autocast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that autocast gave a product of tensors of another one; None for other nodes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    made = node.meta.get("example_value")
    if name not in _PRODUCTS or node.kwargs or not isinstance(made, torch.Tensor):
        return None
    held = (source.meta.get("example_value") for source in node.all_input_nodes)
    dtypes = {t.dtype for t in held if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return made.dtype if dtypes and made.dtype not in dtypes else None


_OUTSIDE = (
    "read in its place what goes into the layer or comes out of it; keys and values, from the cache"
)
_ALL_TOKENS = "keep the number of tokens fixed: give skipped tokens a spare slot, and write all"
_BY_ITSELF = "nothing need change where this is meant: the cache write is fused by itself"
_AS_IS = "nothing need change: the graph as it is computes this as well"


def _look_at_module(nodes: Sequence[fx.Node]) -> str:
    """Names the command that shows what each pattern looked for in the module of a node."""
    scope = scope_of(nodes[0]) if nodes else ""
    if not scope:
        return "`tilewright inspect MODEL --census` says what else is accounted for, and how"
    said = "says what each pattern looked for there, and where it stopped"
    return f"`tilewright inspect MODEL --at {scope}` {said}"


_HINTS: Mapping[str, str | Callable[[Sequence[fx.Node]], str]] = {
    "ABSORBED_DECODE": "write the scores as a sum of two products, of latents and of rope keys, "
    "with one scale",
    "ACTIVATION": "project one tensor, and compute a norm before it once",
    "ACTIVATION_FORMAT": "quantise to e4m3 by row and 128 columns, or leave activations in 16 bits",
    "ATTENTION_FORM": "call scaled_dot_product_attention, or register the operator",
    "CACHE_ALIAS": "clone() the operand, or keep it in memory of its own",
    "CACHE_LAYOUT": "allocate the cache as [pages, page size, heads, head dim], in any order of "
    "the axes, in the dtype that is written",
    "CACHE_OVERLAP": "give K and V a tensor each, or an axis of length two: cache[0], cache[1]",
    "CACHE_READ": "write K and V first, then read",
    "CACHE_WRITE": "write each slot once, or move the other write before or behind both",
    "CAST": "allocate the cache in the model's dtype, or scale an 8-bit one as a whole or by head",
    "CHUNKED_PREFIX": "give all keys to one attention",
    "CLAIMED": _AS_IS,
    "COLLECTIVE": "shard by heads, so that the sum over ranks comes behind attention, and sum what "
    "each rank's experts give for all tokens",
    "DECLARED_FORM": "give the meaning the operator's arguments by name, and have it return what "
    "the operator returns, and write what its schema says",
    "DTYPE": _one_dtype,
    "EARLIER_GRAPH": "remove the graph break that the report names",
    "ESCAPES": _OUTSIDE,
    "EMPTY": _AS_IS,
    "EXPERT_ACTIVATION": "take gate and up of one product, or of products of the same rows",
    "EXPERT_COMBINE": "weigh the results, put them back and sum them for each token, and read "
    "nothing in between",
    "EXPERT_ENDS": "count each expert's rows by cumsum of bincount or histc, or by searchsorted",
    "EXPERT_KERNEL": "dequantise in PyTorch in front of torch._grouped_mm",
    "EXPERT_LOOP": "keep one parameter [E, N, K] for each projection, and sort routes by expert",
    "EXPERT_ORDER": "sort the routes once, and index everything by that order",
    "EXPERT_SCORES": "scatter the chosen experts' weights into zeros",
    "EXPERT_WEIGHT": "compute the weight once, when the model is loaded",
    "FLEX_FUNCTION": "write a mask as a score_mod that fills with -inf",
    "FRESH_CACHE": "make the cache before the compiled call, and give it as an argument or buffer",
    "FUNCTIONAL_WRITE": "write in place: index_copy_, index_put_, or cache[slots] = k",
    "GRADIENT": "call the model under torch.no_grad(), and turn grad mode on for the rest alone",
    "GRAPH_BREAK": "torch.compile(..., fullgraph=True) shows where",
    "GROWING_CACHE": "allocate the cache once, for the longest sequence, outside of the compiled "
    "code; write new tokens by cache.index_copy_(dim, positions, k), and mask what is not written",
    "HEADS": "give the cache as many key-value heads as divide the query's",
    "INPUT_MUTATED": "compute a new tensor (y = x + 1), or change the old one behind the write",
    "INTERNAL": "this is a fault of tilewright, not of the model: report it",
    "K_PATH": "multiply what is constant into the weight once, when the model is loaded",
    "LATENT_KEYS": "put the rope key behind the up-projected part, one for all heads (expand)",
    "LATENT_VALUES": "up-project keys and values from the same latents, where that is meant",
    "LATENT_WEIGHT": "torch.cat the two weights, head by head, when the model is loaded",
    "LAYOUT": "select the same elements by views that divide evenly (split or chunk in place of a "
    "strided slice), or call contiguous() first",
    "LINEAR_FORM": "cast or compute the weight once, when the model is loaded, as [N, K]",
    "LONE_WRITE": "write K and V in one module, at the same slots",
    "LORA_FORM": "take each row's matrices by index, or sort the rows and use grouped_mm",
    "LORA_IN_PLACE": "write y = y + delta for each projection",
    "LORA_OPERATOR": "write the delta in PyTorch, with the stacks of all adapters and an id for "
    "each row",
    "MASKED_WRITE": _ALL_TOKENS,
    "MOVED_CACHE": "keep a ring of slots, cache[:, :, positions % window] = k",
    "ACCUMULATED_WRITE": "compute the sum first and write it: cache[slots] = old + new",
    "NORM_AFTER_ROPE": _BY_ITSELF,
    "NORM_FORM": "nothing need change: the graph computes it as written; ops have norms of whole "
    "rows in their own dtype",
    "NORM_WIDTH": _BY_ITSELF,
    "NO_GAIN": _AS_IS,
    "NO_GRAPH": "compile the module that computes, by itself",
    "NO_KERNELS": 'nothing need change; options={"everywhere": True} tries the fused ops here',
    "OPAQUE_CALL": "make it a custom operator: torch.library.custom_op says what it writes",
    "OPAQUE_WRITE": "write the cache in PyTorch: cache.view(-1, H, D)[slots] = k",
    "ORDER": "have everything that it needs computed before, and use the query behind it",
    "PART_OF_CALL": "nothing need change: the operator computes it as before",
    "Q_PATH": "project q from the input of k and v",
    "RANKS": "look in the logs and reports of the ranks that could not: they say why",
    "ROPE_STYLE": "half-split and interleaved rotations of the leading dimensions are supported",
    "ROPE_TABLE": "index cos and sin by position alone, [tokens, head dim], one row for all heads",
    "ROUTER_CHOICE": "choose the experts by one topk over all scores of a token",
    "ROUTER_GROUPS": "fill the scores of other groups with -inf before one topk",
    "ROUTER_WEIGHTS": "gather the weights from the scores that topk compared",
    "SCALE_BLOCK": "quantise by rows, by groups along a row, or by blocks of rows and columns",
    "SCALE_SIGN": "take scale.abs() where the weight is decoded",
    "SLICE_WRITE": "write through an index tensor: cache.index_copy_(1, positions, k)",
    "SLOT_INDEX": "write all tokens once, by one index tensor that K and V share",
    "SUM_PATH": "nothing need change: the graph computes it as written; the op has RMS norms of "
    "whole rows",
    "SUBCLASS": "hand over the plain tensor inside, or weights as codes and scales",
    "SUBGRAPH": "compute it outside of that, or compile the function that is given by itself",
    "TRANSFORM": "compute it outside of the transform; under vmap, give the batch as a dimension",
    "UNRECOGNISED": _look_at_module,
    "UNSUPPORTED": "change what the message names, or leave it: the graph computes it as written",
    "V_PATH": _BY_ITSELF,
    "WEIGHT_FORMAT": "apply zeros and scales in one order, as (code - zero) * scale",
}

#: The codes that have a hint of their own.
HINTED = frozenset(_HINTS)
