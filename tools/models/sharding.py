"""Builds a zoo model as one of several ranks sees it, without the other ranks.

torch's fake process group gives any number of ranks in one process and transfers nothing.
transformers shards the model by its own plan, on the meta device. Every rank has an equal part, so
the work of rank 0 equals the work of every other rank. Only the leading dense layers and one layer
of each following kind are built; the other layers are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tilewright.codegen.targets import Target
from tilewright.compiler import Lowered, Site, _compat
from tilewright.compiler.model_cache import cache_in
from tilewright.tools.report.layers import layer_of
from tilewright.tools.zoo import (
    EXPERT_COUNTS,
    LORA,
    PAGED,
    PREFILL,
    ZOO,
    LoadedModel,
    ModelError,
    build_zoo_model,
    is_zoo_name,
)

# After the leading layers without experts, the layers of a zoo model are of at most this number of
# kinds, which alternate.
_KINDS = 2
_PLACED_ANEW = ("redistribute", "full_tensor")


@dataclass(frozen=True)
class Collective:
    """The data that a rank sends in one collective.

    kind: the name of the collective, such as `all_reduce` or `all_gather`.
    bytes: the bytes of the whole tensor, before or after the collective, whichever is larger.
    count: the number of times that a step of the whole model runs it.
    """

    kind: str
    bytes: int
    count: int

    def seconds(self, target: Target, ranks: int) -> float:
        """Returns the shortest time of all `count` collectives over the target's links, including
        the time to start each.

        A ring sends (ranks - 1) / ranks of the bytes, and twice that for an all-reduce.
        """
        rounds = 2 if self.kind == "all_reduce" else 1
        sent = rounds * (ranks - 1) / ranks * self.bytes
        return self.count * (target.collective_s + sent / target.link_bytes_per_s)


@dataclass(frozen=True)
class Rank:
    """The work of one rank in a step.

    layers: a dictionary from each layer that is built to the number of the model's layers for
        which it stands.
    fused: for each pattern, the number of its sites in the whole model.
    weight_bytes: the bytes of weights that a step reads. Only the experts that the tokens can reach
        are counted.
    cache_bytes: the bytes of caches that a step reads.
    flops: the FLOPs of the products with weights.
    """

    tp: int
    ep: int
    layers: dict[str, int]
    fused: dict[str, int]
    collectives: tuple[Collective, ...]
    weight_bytes: int
    cache_bytes: int
    flops: int

    def floor_s(self, target: Target) -> float:
        """Returns the shortest time of a step without communication. It is the longer of two times:
        the time to read all bytes once, and the time of all products."""
        moved = (self.weight_bytes + self.cache_bytes) / target.hbm_bytes_per_s
        return max(moved, self.flops / target.flops_per_s("bf16"))

    def communication_s(self, target: Target) -> float:
        return sum(one.seconds(target, self.tp) for one in self.collectives)

    def lost_share(self, target: Target) -> float:
        """Returns the share of a step that communication takes if nothing overlaps it."""
        sent = self.communication_s(target)
        return sent / (sent + self.floor_s(target))

    def as_dict(self, target: Target) -> dict[str, Any]:
        return {
            "tp": self.tp,
            "ep": self.ep,
            "layers": self.layers,
            "fused": self.fused,
            "collectives": [vars(one) for one in self.collectives],
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "flops": self.flops,
            "floor_us": 1e6 * self.floor_s(target),
            "communication_us": 1e6 * self.communication_s(target),
            "communication_share": self.lost_share(target),
        }


# --- building -------------------------------------------------------------------------------------


@contextmanager
def one_rank_of(ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of a fake process group while the block runs. Raises ModelError."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ModelError("--tp: this process already belongs to a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_sharding(name: str, tp: int, ep: int) -> None:
    """Raises ModelError for a model that cannot be sharded over this many ranks."""
    form = name.removesuffix(PREFILL)
    if not is_zoo_name(name) or form.endswith((PAGED, LORA)):
        known = f"one of the zoo's models, {', '.join(ZOO)}, with or without {PREFILL}"
        raise ModelError(f"--tp: expected {known}, got {name!r}")
    if ep not in (1, tp):
        raise ModelError(f"--ep: expected 1 or the number of ranks of --tp, {tp}, got {ep}")
    fields = ZOO[form].fields
    shared = [("--tp", tp, name) for name in ("num_attention_heads", "num_key_value_heads")]
    shared += [("--ep", ep, name) for name in EXPERT_COUNTS if name in fields]
    for option, ranks, field in shared:
        if fields[field] % ranks:
            raise ModelError(f"{option}: {ranks} ranks do not divide {field} = {fields[field]}")


def load_sharded(name: str, tp: int, ep: int) -> tuple[LoadedModel, dict[str, int]]:
    """Returns a zoo model as rank 0 has it, and for each layer that is built, the number of the
    model's layers for which it stands. Call it within :func:`one_rank_of`. Raises ModelError."""
    check_sharding(name, tp, ep)
    fields = ZOO[name.removesuffix(PREFILL)].fields
    whole = fields["num_hidden_layers"]
    built = min(whole, fields.get("first_k_dense_replace", 0) + _KINDS)
    loaded = build_zoo_model(name, layers=built)
    try:
        model = _cut(loaded.model, tp, ep)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        message = f"transformers cannot shard it: {error}"
        raise ModelError(f"{name} --tp {tp} --ep {ep}: {message}") from error
    name_of_cache, whole_cache = cache_in(loaded.kwargs)
    kwargs = {**loaded.kwargs, name_of_cache: _cache(model, whole_cache, tp)}
    alike = (i if i < built else built - _KINDS + (i - built) % _KINDS for i in range(whole))
    count = Counter(alike)
    layers = {f"model.layers.{i}": count[i] for i in range(built)}
    return loaded._replace(model=model, kwargs=kwargs), layers


def _cut(model: Any, tp: int, ep: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    axes = ("pp", "dp_replicate", "fsdp", "tp")
    dense = init_device_mesh("cpu", (1, 1, 1, tp), mesh_dim_names=axes)
    experts = init_device_mesh(
        "cpu", (1, 1, tp // ep, ep), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
    )
    sharing = DistributedConfig(tp_size=tp, ep_size=ep)
    mesh = TransformersDeviceMesh(dense, experts)
    return type(model).maybe_distribute_model(model, sharing, mesh).requires_grad_(False)


def _cache(model: Any, cache: Any, tp: int) -> Any:
    """Returns the cache with only the heads of this rank."""
    if hasattr(model.config, "kv_lora_rank"):
        return cache
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    config, layer = model.config, cache.layers[0]
    heads = get_kv_heads_per_rank(model.tp_plan, config.num_key_value_heads, tp)
    batch = layer.keys.shape[0]
    made = type(cache)(config=config, max_cache_len=layer.keys.shape[2])
    made.early_initialization(batch, heads, config.head_dim, layer.keys.dtype, torch.device("meta"))
    return made


# --- counting -------------------------------------------------------------------------------------


def rank_of(
    loaded: LoadedModel, lowered: Lowered, layers: dict[str, int], tp: int, ep: int
) -> Rank:
    """Returns the work of rank 0 in a step of the whole model."""
    tokens = loaded.args[0].numel()
    sizes = [_work_of(n, p, loaded.model, tokens, layers) for n, p in _weights(loaded.model)]
    _, whole_cache = cache_in(loaded.kwargs)
    built = zip(whole_cache.layers, layers.values(), strict=True)
    cache = sum(count * _bytes(*_compat.tensors_in([c.keys, c.values])) for c, count in built)
    fused = Counter[str]()
    for site in lowered.matches:
        fused[site.pattern] += _count(site, layers)
    return Rank(
        tp=tp,
        ep=ep,
        layers=layers,
        fused=dict(sorted(fused.items())),
        collectives=_collectives(lowered, layers),
        weight_bytes=sum(size for size, _ in sizes),
        cache_bytes=cache,
        flops=sum(flops for _, flops in sizes),
    )


def _count(site: Site, layers: dict[str, int]) -> int:
    return layers.get(layer_of(site.scope), 1)


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the rank's own part of each parameter. Leaves out embeddings, because a step reads few
    rows of them."""
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            (local,) = _compat.parts_of(parameter)
            yield name, local


def _work_of(
    name: str, weight: torch.Tensor, model: Any, tokens: int, layers: dict[str, int]
) -> tuple[int, int]:
    """Returns (bytes read, FLOPs) of one weight, summed over all layers that are equal to its
    layer."""
    count = layers.get(layer_of(name), 1)
    size, rows = _bytes(weight), tokens if weight.dim() > 1 else 0
    products = weight.numel()
    if weight.dim() == 3:  # [experts, N, K]: each token is routed to some experts
        own, every = weight.shape[0], _num_experts(model.config)
        rows = tokens * model.config.num_experts_per_tok * own // every
        reached = min(1.0, max(rows, 1) / own)
        size, products = int(size * reached), products // own
    return count * size, count * 2 * rows * products


def _num_experts(config: Any) -> int:
    found = (getattr(config, field, None) for field in EXPERT_COUNTS)
    return next(int(n) for n in found if n is not None)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _collectives(lowered: Lowered, layers: dict[str, int]) -> tuple[Collective, ...]:
    from tilewright.patterns.dataflow import scope_of

    found: Counter[tuple[str, int]] = Counter()
    for graph in lowered.graphs:
        for node in graph.before.graph.nodes:
            sent = _sent(node)
            if sent is not None:
                found[sent] += layers.get(layer_of(scope_of(node)), 1)
    return tuple(Collective(kind, size, count) for (kind, size), count in sorted(found.items()))


_NAME = re.compile(r"c10d_functional\.(all_reduce|all_gather|reduce_scatter|all_to_all)")


def _sent(node: fx.Node) -> tuple[str, int] | None:
    """Returns (kind, bytes) of a collective. Returns None for any other node."""
    given = _compat.tensors_of(*node.all_input_nodes[:1])
    made = _compat.tensors_of(node)
    if not given or not made:
        return None
    called = _NAME.search(str(node.target))
    kind = called[1] if called else _placed_anew(node, given, made)
    if kind is None:
        return None
    parts = [part for tensor in (given[0], made[0]) for part in _compat.parts_of(tensor)]
    return kind, max(map(_bytes, parts))


def _placed_anew(
    node: fx.Node, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> str | None:
    """Returns the name of the collective that moves a DTensor to another placement. Returns None if
    the node moves none."""
    if node.target not in _PLACED_ANEW:
        return None
    (before,) = getattr(given[0], "placements", (None,))
    (after,) = getattr(made[0], "placements", (None,))
    if before is None or before == after or before.is_replicate():
        return None
    if before.is_partial():
        return "reduce_scatter" if after is not None and after.is_shard() else "all_reduce"
    return "all_to_all" if after is not None and after.is_shard() else "all_gather"
