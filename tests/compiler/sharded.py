"""Runs models that several processes share: `python -m tests.compiler.sharded FOLDER`.

It starts the ranks of each world. Each rank writes its fused ops, and the distance of its outputs
and caches from float64, to FOLDER/WORLD-RANK.json.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StaticCache,
)
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from tests.compiler import engine_ranks, sharded_parts
from tilewright.compiler import backend, reports
from tilewright.compiler.safety import ranks as agreed
from tilewright.ops.runtime import peers, watch

LENGTH = 16
# How long ranks wait in tests in which no rank ends: long, because the machine may be busy.
_PATIENCE_S = 300.0
_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel.py"
_COMPILED: dict[str, Any] = {"backend": "tilewright", "options": {"inner": "eager"}}
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2}
_LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "odd_heads": Qwen3Config(**_SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "odd_experts": MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=3),
    "llama": LlamaConfig(**_SIZES | {"num_key_value_heads": 2}),  # each of two ranks has one head
    "qwen3": Qwen3Config(**_SIZES),
    "mixtral": MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4, moe_intermediate_size=64),
    "gpt_oss": GptOssConfig(
        **_SIZES,
        **_EXPERTS,
        num_local_experts=4,
        layer_types=["full_attention"],
        rope_parameters=_ROPE,
    ),
    "deepseek_v2": DeepseekV2Config(
        **_SIZES | {"num_key_value_heads": 8},
        **_EXPERTS,
        **_LATENTS,
        q_lora_rank=None,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
    ),
}


# --- ways of sharing a model ----------------------------------------------------------------------


def loaded(folder: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def by_plan(folder: str) -> Any:
    return loaded(folder, tp_plan="auto")


def by_experts(folder: str) -> Any:
    """Shards the attention by heads, if the model has a plan for it, and the mixture by experts."""
    ranks = dist.get_world_size()
    sharing = DistributedConfig(tp_size=ranks, ep_size=ranks)
    return loaded(folder, distributed_config=sharing)


_COLUMNS = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


class _Rows(torch.nn.Module):
    """A linear with some columns of the weight. It sums its results over ranks."""

    def __init__(self, weight: torch.Tensor, in_place: bool) -> None:
        super().__init__()
        self.weight, self.in_place = torch.nn.Parameter(weight, requires_grad=False), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = F.linear(x, self.weight)
        if not self.in_place:
            return functional.all_reduce(part, "sum", dist.group.WORLD)
        dist.all_reduce(part)
        return part


def by_hand(folder: str) -> Any:
    """Shards as Megatron does: the weights are cut by hand, and a collective follows each second
    linear."""
    model = loaded(folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for layer in model.model.layers:
        for name in _COLUMNS:
            linear = layer.get_submodule(name)
            linear.weight.data = linear.weight.data.chunk(ranks, 0)[rank].contiguous()
        for name in _ROWS:
            weight = layer.get_submodule(name).weight.data.chunk(ranks, 1)[rank].contiguous()
            layer.set_submodule(name, _Rows(weight, in_place="mlp" in name))
    return model


def _columns_and_rows(**rows: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {name: ColwiseParallel() for name in _COLUMNS}
    return plan | {name: RowwiseParallel(**rows) for name in _ROWS}


def in_pairs(folder: str) -> Any:
    """Gives each pair of ranks the whole model, and a separate process group for sums."""
    model = loaded(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], _columns_and_rows())
    return model


def in_a_grid(columns: int) -> Callable[[str], Any]:
    """Shards by transformers' plans on a mesh: the attention's heads over the ranks of a row, the
    experts over the ranks of a column, with the same tokens on all ranks."""

    def share(folder: str) -> Any:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model, rows = loaded(folder), dist.get_world_size() // columns
        mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("ep", "tp"))
        both = DistributedConfig(tp_size=rows, ep_size=rows)
        heads, experts, _ = model._resolve_parallel_plans(both)
        if columns > 1:
            apply_tensor_parallelism(model, mesh["tp"], heads)
        return apply_expert_parallelism(model, mesh["ep"], mesh["ep"], experts, "all_reduce")

    return share


def by_sequence(folder: str) -> Any:
    """Shards by tokens, in DTensors, everything between attention and MLP: the norms and the
    residual."""
    model = loaded(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    by_token: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    whole = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **by_token),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    hidden = "hidden_states"
    gathered = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={hidden: Shard(1)},
            desired_input_kwarg_layouts={hidden: Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, gathered | _columns_and_rows(**by_token))
    return model


def by_weights(folder: str) -> Any:
    """Shards by FSDP2: each rank keeps a part of every weight, and computes the whole model."""
    model = loaded(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model


@dataclass(frozen=True)
class Case:
    """A model that is divided among ranks, and the sites that must be fused in it.

    steps: the number of tokens of each call.
    heads_by: the number of consecutive ranks among which the heads of a cache are divided; None if
        they are divided among all ranks.
    """

    kind: str
    share: Callable[[str], Any]
    fused: frozenset[str]
    steps: tuple[int, ...] = (5,)
    heads_by: int | None = None

    @property
    def parts(self) -> int:
        """How many parts the heads of a cache are divided into."""
        return self.heads_by or dist.get_world_size()


_ATTENTION = frozenset({"qkv_cache", "cache_attention"})
_DENSE = _ATTENTION | {"linear_activation"}
_SUMMED = {"all_reduce_residual_norm"}
_MIXTURE = _ATTENTION | {"moe", "moe_router"} | _SUMMED
_LATENT = frozenset({"mla_latent_store", "mla_prefill", "moe", "moe_router"}) | _SUMMED
# The cases by number of ranks. Each model is sharded in one way, and each way of sharding is tested
# with a dense model or with a mixture that suits it.
WORLDS = {
    2: {
        "llama by plan": Case("llama", by_plan, _DENSE | _SUMMED, (5, 1)),
        "llama by sequence": Case("llama", by_sequence, _DENSE, (6,)),
        "llama by weights": Case("llama", by_weights, _DENSE | {"linear_residual"}, (5,), 1),
        "qwen3 by hand": Case("qwen3", by_hand, _DENSE | _SUMMED),
        "gpt_oss by experts": Case("gpt_oss", by_experts, _MIXTURE, (5,), 1),
        "deepseek_v2 by plan": Case("deepseek_v2", by_plan, _LATENT, (5,), 1),
    },
    # These cases need more than two ranks: groups of some of the ranks, and one expert on each of
    # several ranks.
    4: {
        "llama in pairs": Case("llama", in_pairs, _DENSE | _SUMMED, (5,), 2),
        # These groups have the same ranks as those of the previous model, but other names.
        "mixtral in a grid": Case("mixtral", in_a_grid(2), _MIXTURE, (5,), 2),
        "qwen3_moe by experts alone": Case("qwen3_moe", in_a_grid(1), _MIXTURE, (5,), 1),
    },
}


def with_whole_values(folder: str) -> Any:
    """Shards queries and keys by heads, and keeps the whole values on every rank."""
    model = loaded(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qk"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


#: Ways in which two ranks cannot share a model, and the error that each rank gets.
REFUSED = {
    "heads": (Case("odd_heads", by_plan, frozenset()), "is invalid for input of size"),
    "experts": (Case("odd_experts", by_experts, frozenset()), "Cannot evenly shard 3 experts"),
    "whole cache": (
        Case("llama", by_plan, frozenset(), (5,), 1),
        "index_copy_",
    ),
    "mixed placements": (
        Case("llama", with_whole_values, frozenset()),
        "index_copy_",
    ),
}


# --- a rank that does other than the rest ---------------------------------------------------------


def _raises(*args: Any) -> Any:
    raise ValueError("broken on this rank")


def _fuses_nothing() -> None:
    backend.fuse = _raises  # type: ignore[assignment]


def _compiles_nothing_fused() -> None:
    inner = backend._inner

    def refuse(gm: Any, *args: Any) -> Any:
        fused = any("tilewright" in str(node.target) for node in gm.graph.nodes)
        return _raises() if fused else inner(gm, *args)

    backend._inner = refuse  # type: ignore[assignment]


def _compiles_slowly() -> None:
    """Compiles for longer than a rank may say nothing, and meanwhile tells the other ranks that it
    compiles."""
    fuse = backend.fuse

    def slow(*args: Any) -> Any:
        time.sleep(2.5 * agreed.WAIT_S)
        return fuse(*args)

    backend.fuse = slow  # type: ignore[assignment]


def _has_another_release() -> None:
    agreed.torch = SimpleNamespace(__version__="0.1")  # type: ignore[assignment]


def _nothing() -> None:
    pass


#: For each case: what happens on rank 1, and the options of rank 1. The order matters, because
#: ranks remember what was true in earlier cases.
DIFFERING: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {
    "compiles slowly": (_compiles_slowly, {}),
    "alike": (_nothing, {}),
    "fusing fails": (_fuses_nothing, {}),
    "compiling fails": (_compiles_nothing_fused, {}),
    "other options": (_nothing, {"patterns": ["-all_reduce_residual_norm"]}),
    "verify": (_nothing, {"verify": True}),
    "nothing compiles": (_fuses_nothing, {"strict": True}),
    "another release": (_has_another_release, {}),
    "says nothing": (_nothing, {}),
}
#: The cases in which both ranks use the fused op.
TOGETHER = ("alike", "compiles slowly")


def summed(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> Any:
    total = residual + functional.all_reduce(F.linear(x, weight), "sum", dist.group.WORLD)
    return total, F.rms_norm(total, total.shape[-1:], None, 1e-5)


def differing(rank: int, name: str) -> dict[str, Any]:
    """Returns what a rank fused, why it did not fuse the rest, and the distance of its result from
    eager's."""
    happens, options = DIFFERING[name]
    kept = backend.fuse, backend._inner, agreed.torch
    options = {"inner": "eager"} | (options if rank == 1 or name == "verify" else {})
    if rank == 1:
        happens()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 32, generator=generator).bfloat16()
    weight, residual = torch.ones(64, 32).bfloat16() / 8, torch.ones(3, 64).bfloat16()
    backend._REPORTS.clear()
    silent = name == "says nothing"
    agreed.WAIT_S, agreed.BEAT_S = (1.0, 0.2) if silent or "slowly" in name else (60.0, 4.0)
    step: Any = torch.compile(summed, backend="tilewright", options=options)
    try:
        made = (summed if silent and rank == 1 else step)(x, weight, residual)
    except torch._dynamo.exc.BackendCompilerFailed:
        made = summed(x, weight, residual)  # the other rank must not be left waiting
    finally:
        backend.fuse, backend._inner, agreed.torch = kept  # type: ignore[assignment]
    exact = summed(x, weight, residual)
    return {
        "fused": [site.pattern for report in reports() for site in report.matches],
        "codes": [miss.code for report in reports() for miss in report.misses],
        "error": max((a - b).abs().max().item() for a, b in zip(made, exact, strict=True)),
    }


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_survivor(rank: int, ranks: int, folder: Path, compiling: bool) -> None:
    """Kills rank 1 while it compiles, or at a later call. Returns the error that rank 0 raises."""
    start_group(rank, ranks, folder, f"killed-{compiling}")
    agreed.WAIT_S, agreed.BEAT_S = 2.0, 0.2
    x, weight = torch.ones(3, 32).bfloat16(), torch.ones(64, 32).bfloat16()
    residual = torch.ones(3, 64).bfloat16()
    step: Any = torch.compile(summed, **_COMPILED)
    if compiling and rank == 1:
        backend.fuse = lambda *_: _dies()  # type: ignore[assignment]
    said, started = "", time.monotonic()
    try:
        step(x, weight, residual)
        if rank == 1:
            _dies()
        step(x, weight, residual)
    except Exception as error:
        said = str(error)
    found = {"said": said, "seconds": time.monotonic() - started}
    (folder / f"killed-{compiling}.json").write_text(json.dumps(found))


def be_watched(rank: int, ranks: int, folder: Path) -> None:
    """Kills rank 1. Then rank 0 must report that it waits for rank 1, and must be aborted."""
    start_group(rank, ranks, folder, "watched")
    told = peers._gathered(watch.this_process(rank), dist.group.WORLD, torch.device("cpu"))
    dist.barrier()
    if rank == 1:
        _dies()
    watch._watch = watch.Watch(every_s=0.05)
    (folder / "watched").write_text(str(told[1][4]))
    watch.watch([(told[1], lambda: True)], rank)
    time.sleep(_PATIENCE_S / 10)
    (folder / "watched").write_text("not aborted")


# --- one rank -------------------------------------------------------------------------------------


def cache_of(model: Any, heads: int) -> StaticCache:
    """Returns the cache of a model. `heads` is the number of heads of keys and values, if the model
    does not cache latents."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=LENGTH)
    if not hasattr(config, "kv_lora_rank"):
        cache.early_initialization(1, heads, config.head_dim, model.dtype, torch.device("cpu"))
        return cache
    widths = (config.kv_lora_rank, config.qk_rope_head_dim)
    for layer in cache.layers:
        layer.lazy_initialization(*(torch.zeros(1, 1, 0, n, dtype=model.dtype) for n in widths))
    return cache


def run(model: Any, case: Case, ranks: int, compiled: bool) -> list[torch.Tensor]:
    """Returns the logits of each step, followed by the cache. `ranks` is the number of ranks that
    share the cache's heads."""
    cache = cache_of(model, model.config.num_key_value_heads // ranks)
    step = torch.compile(model, **_COMPILED) if compiled else model
    ids = [torch.arange(tokens)[None] for tokens in case.steps]
    logits = [step(input_ids=i, past_key_values=cache, use_cache=True).logits for i in ids]
    return [*logits, cache.layers[0].keys, cache.layers[0].values]


def result_of(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    where = str(folder / case.kind)
    whole = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    whole.config._experts_implementation = "eager"  # no grouped product runs in float64
    exact = run(whole, case, 1, compiled=False)
    ranks = case.parts
    if ranks > 1:
        exact[-2:] = [t.chunk(ranks, dim=1)[rank % ranks] for t in exact[-2:]]
    shared = case.share(where).requires_grad_(False)
    eager = run(shared, case, ranks, compiled=False)
    ours = run(shared, case, ranks, compiled=True)

    def errors(made: list[torch.Tensor]) -> list[float]:
        return [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(made, exact, strict=True)
        ]

    misses = [miss for report in reports() for miss in report.misses]
    return {
        "fused": sorted({site.pattern for report in reports() for site in report.matches}),
        "lost": sorted({f"{miss.pattern} {miss.code}" for miss in misses if miss.is_lost}),
        "advice": sorted({f"{miss.pattern} {miss.code}" for miss in misses if not miss.is_lost}),
        "eager": errors(eager),
        "ours": errors(ours),
    }


def error_of(case: Case, folder: Path, compiled: bool) -> str:
    """Returns the error that a rank gets if the model cannot run, or "" if it runs."""
    try:
        shared = case.share(str(folder / case.kind)).requires_grad_(False)
        run(shared, case, case.parts, compiled)
    except Exception as error:
        return str(error)
    return ""


def start_group(rank: int, ranks: int, folder: Path, world: str) -> None:
    # torchrun sets these variables, and transformers reads them.
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{world}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_PATIENCE_S),
    )


def be_rank(rank: int, ranks: int, folder: Path) -> None:
    """Writes what a rank of a world finds, or the traceback of what it raises."""
    start_group(rank, ranks, folder, str(ranks))
    try:
        found = findings_of(rank, ranks, folder)
    except Exception:
        (folder / f"raised-{ranks}-{rank}.txt").write_text(traceback.format_exc())
        raise
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def findings_of(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Returns the results of a rank, by case."""
    # A rank reports nothing while Dynamo traces a model, which takes long on a busy machine.
    agreed.WAIT_S = _PATIENCE_S
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, case in WORLDS[ranks].items():
            torch._dynamo.reset()
            backend._REPORTS.clear()
            found[name] = result_of(case, rank, folder)
        for name, (case, _) in REFUSED.items() if ranks == 2 else ():
            torch._dynamo.reset()
            started = time.monotonic()
            told = [error_of(case, folder, compiled) for compiled in (False, True)]
            found[name] = [*told, time.monotonic() - started]
        for name in DIFFERING if ranks == 2 else ():
            torch._dynamo.reset()
            started = time.monotonic()
            found[name] = differing(rank, name) | {"seconds": time.monotonic() - started}
        for name in sharded_parts.RANKS[ranks]:
            found[name] = sharded_parts.found(name)
        for name in engine_ranks.NAMES if ranks == 2 else ():
            found[f"engine-{name}"] = engine_ranks.found(name, folder)
    return found


def be_example(rank: int, ranks: int, port: int) -> None:
    """Runs a rank of examples/tensor_parallel.py as torchrun would, with the parent's store."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    os.environ |= address | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    backend._REPORTS.clear()  # the reports of the parent process
    sys.exit(runpy.run_path(str(_EXAMPLE))["main"]())


def in_processes(function: Callable[..., None], ranks: int, *args: Any) -> bool:
    """Runs `function(rank, ranks, *args)` in forks of this process, and returns whether all
    succeed. Prints the exit code of each that fails; a negative code is the signal that killed
    it."""
    forked = multiprocessing.get_context("fork")
    running = [
        forked.Process(target=function, args=(rank, ranks, *args), daemon=True)
        for rank in range(ranks)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    for rank, process in enumerate(running):
        if process.exitcode:
            who = f"rank {rank} of {ranks} in {function.__name__}"
            print(f"{who} ended with {process.exitcode}", flush=True)
    return not any(process.exitcode for process in running)


def main(folder: Path) -> int:
    """Starts the ranks of each world as forks of this process, which has imported everything."""
    from tests.quick_dynamo import (
        quicken_dynamo,
    )  # avoids work that Dynamo would otherwise repeat in every rank

    torch.set_num_threads(1)
    disable_progress_bar()
    quicken_dynamo()
    for kind, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    with torch.no_grad():  # imports and reads what compilations need
        run(loaded(str(folder / "llama")), Case("llama", loaded, frozenset()), 1, compiled=True)
    torch._dynamo.reset()
    backend._REPORTS.clear()
    gc.collect()
    gc.freeze()
    worlds = all(in_processes(be_rank, ranks, folder) for ranks in WORLDS)
    for compiling in (True, False):
        in_processes(be_survivor, 2, folder, compiling)
    in_processes(be_watched, 2, folder)
    # This store keeps its port, so that no other process takes it before the ranks connect.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (folder / "example").write_text(str(in_processes(be_example, 2, store.port)))
    return 0 if worlds else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
