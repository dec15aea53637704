"""Shows tilewright on any Linux machine. It needs no GPU, and downloads nothing.

    make demo

1. Llama-3-8B at its true size, on the meta device: tilewright finds and fuses the QKV projection,
   the rotation and the cache write of every layer.
2. The kernels that this model would run on a B200 are emitted and cross-compiled, and their machine
   code is checked against the chip's limits.
3. A small Llama runs with `torch.compile(model, backend="tilewright")`, on an NVIDIA GPU if there
   is one. The errors of its logits and caches against a float64 run are compared with those of the
   eager model. On a CPU, the option `everywhere` makes the ops run as their PyTorch references.
   Without this option, tilewright leaves a graph unchanged if the device has no kernels.

The exit status is 1 if any check fails.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from tilewright import cache_argument
from tilewright.codegen.build import emitted_path
from tilewright.codegen.targets import get_target
from tilewright.compiler import Kernel, lower, reports
from tilewright.compiler.report import collapse_sites
from tilewright.tools.console import make_console
from tilewright.tools.kernel_audit import audit_kernels
from tilewright.tools.report.text_report import kernel_table
from tilewright.tools.zoo import load_model

TARGET = "sm100"
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
BATCH, PROMPT_TOKENS, DECODE_STEPS, CACHE_LENGTH = 2, 9, 6, 64
# The fused model's error may exceed the eager model's error by this much, which is one rounding of
# bfloat16 (8 bits).
ALLOWANCE = 2.0**-8


@dataclass
class Checks:
    """Prints the outcome of each check, and remembers the failures."""

    made: int = 0
    failed: list[str] = field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        self.made += 1
        print(f"  {'ok  ' if good else 'FAIL'} {what}")
        if not good:
            self.failed.append(what)


# --- 1 and 2: the real configuration, and its kernels -------------------------------------------


def fuse_llama(name: str, checks: Checks) -> list[Kernel]:
    """Counts the fused layers of a zoo model, and returns its kernels."""
    model, args, kwargs = load_model(name)
    torch._dynamo.reset()
    lowered = lower(model, args, kwargs, target=TARGET)
    layers = model.config.num_hidden_layers
    places = {f"model.layers.{layer}.self_attn" for layer in range(layers)}
    fused = {m.scope for m in lowered.matches if m.op == "fused_qkv_paged"} & places
    for site, scope, count in collapse_sites(lowered.matches):
        facts = " ".join(f"{key}={value}" for key, value in site.shapes.items())
        print(f"  {scope} x{count}: {facts}\n  {site.lowering}: {site.reason}")
    checks.expect(len(fused) == layers, f"{len(fused)} of {layers} layers fused ({name})")
    checks.expect(not lowered.misses, f"{len(lowered.misses)} sites missed")
    return lowered.kernels


def audit(kernels: list[Kernel], checks: Checks) -> None:
    """Cross-compiles the kernels, and checks their machine code."""
    target = get_target(TARGET)
    outcomes = audit_kernels(kernels, TARGET)
    make_console().print(kernel_table(outcomes, target))
    for outcome in outcomes:
        name = outcome.kernel.spec.name
        found = outcome.audit
        if found is None:
            checks.expect(False, f"{name}: {outcome.error}")
            continue
        limits = f"{found.shared_bytes} of {target.max_shared_bytes} bytes shared, "
        limits += f"{found.tmem_columns} of {target.tmem_columns} TMEM columns"
        problems = "; ".join(outcome.problems)
        checks.expect(outcome.good, problems or f"{name}: {limits}, {found.spills} spills")
        for note in outcome.notes:
            print(f"       note: {note}")
        print(f"       {emitted_path(outcome.kernel.spec)}")
    mma = target.mma_opcode("bf16")
    tcgen05 = [o for o in outcomes if o.audit is not None and o.audit.count(mma)]
    checks.expect(bool(tcgen05), f"tcgen05 ({mma}) in {len(tcgen05)} of {len(outcomes)} kernels")


def emitted_loop(kernel: Kernel) -> str:
    """Returns the source of an emitted kernel's main loop."""
    loops = [node for node in ast.walk(ast.parse(kernel.source)) if isinstance(node, ast.For)]
    first = min(loops, key=lambda loop: loop.lineno)
    return "\n".join(kernel.source.splitlines()[first.lineno - 1 : first.end_lineno])


# --- 3: a small model, run for real -------------------------------------------------------------


@dataclass
class Run:
    """The results of a model that decodes: its logits, and the K and V caches of every layer before
    and after the steps."""

    logits: list[torch.Tensor]
    before: list[torch.Tensor]
    after: list[torch.Tensor]


def decode(
    model: LlamaForCausalLM, step: Callable[..., Any], tokens: torch.Tensor, noise: torch.Tensor
) -> Run:
    """Runs the prompt through `model`, and then each further token through `step`.

    tokens: [B, T].
    noise: [2 * layers, B, H, S, D], the content of the caches before the prompt.
    """
    cache = StaticCache(config=model.config, max_cache_len=CACHE_LENGTH)
    heads, head_dim = SMALL["num_key_value_heads"], SMALL["head_dim"]
    cache.early_initialization(BATCH, heads, head_dim, model.dtype, tokens.device)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    for tensor, random in zip(tensors, noise, strict=True):
        tensor.copy_(random)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    takes_places = "cache_position" in inspect.signature(model.forward).parameters

    def run(call: Callable[..., Any], first: int, end: int) -> torch.Tensor:
        # If transformers 5.0 gets no position, it takes the number of slots that are not zero as
        # the position.
        given = {"cache_position": places[first:end]} if takes_places else {}
        return call(tokens[:, first:end], **cache_argument(model, cache), **given).logits

    run(model, 0, PROMPT_TOKENS)
    before = [t.clone() for t in tensors]
    logits = [run(step, i, i + 1).clone() for i in range(PROMPT_TOKENS, tokens.shape[1])]
    return Run(logits, before, tensors)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns ||actual - exact|| / ||exact||."""
    return float(torch.dist(actual.double(), exact) / torch.linalg.vector_norm(exact))


def run_small(checks: Checks) -> None:
    """Decodes with the fused, the eager and the float64 model, and compares."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval().to(device, torch.bfloat16)
    model.requires_grad_(False)
    exact_model = copy.deepcopy(model).double()
    tokens = torch.randint(SMALL["vocab_size"], (BATCH, PROMPT_TOKENS + DECODE_STEPS))
    shape = (BATCH, SMALL["num_key_value_heads"], CACHE_LENGTH, SMALL["head_dim"])
    noise = torch.randn(2 * SMALL["num_hidden_layers"], *shape).bfloat16().to(device)

    compiled = torch.compile(model, backend="tilewright", options={"everywhere": True})
    with torch.no_grad():
        start = time.perf_counter()
        fused = decode(model, compiled, tokens.to(device), noise)
        seconds = time.perf_counter() - start
        eager = decode(model, model, tokens.to(device), noise)
        exact = decode(exact_model, exact_model, tokens.to(device), noise)
    layers = SMALL["num_hidden_layers"]
    sites = [m for m in reports()[-1].matches if m.op == "fused_qkv_paged"]
    print(f"  {DECODE_STEPS} decode steps on {device}, {seconds:.0f} s with compiling")
    print(f"  the op runs as {'emitted kernels' if device == 'cuda' else 'its PyTorch reference'}")
    checks.expect(len(sites) == layers, f"{len(sites)} of {layers} layers fused")
    print("  relative error against float64      fused     eager")
    for i, trio in enumerate(zip(fused.logits, eager.logits, exact.logits, strict=True)):
        compare(f"logits of step {i + 1}", *trio, checks)
    # Only written slots are compared. The noise in the other slots would hide the error of the
    # written slots.
    last = PROMPT_TOKENS + DECODE_STEPS
    for what, part in (("K", 0), ("V", 1)):
        written = (
            torch.stack([t[:, :, PROMPT_TOKENS:last] for t in run.after[part::2]])
            for run in (fused, eager, exact)
        )
        compare(f"{what} caches, slots written", *written, checks)
    untouched = [*range(PROMPT_TOKENS), *range(last, CACHE_LENGTH)]
    same = all(
        torch.equal(now[:, :, untouched].view(torch.int16), old[:, :, untouched].view(torch.int16))
        for now, old in zip(fused.after, fused.before, strict=True)
    )
    checks.expect(same, f"the other {len(untouched)} of {CACHE_LENGTH} slots are bit-identical")


def compare(
    what: str, fused: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, checks: Checks
) -> None:
    ours, theirs = error(fused, exact), error(eager, exact)
    checks.expect(ours <= theirs + ALLOWANCE, f"{what:<28} {ours:9.2e} {theirs:9.2e}")


def main() -> int:
    start = time.perf_counter()
    checks = Checks()
    print("1. Llama-3-8B, decode and prefill, on the meta device")
    kernels = [k for name in ("llama3-8b", "llama3-8b-prefill") for k in fuse_llama(name, checks)]
    print(f"\n2. The emitted kernels for {TARGET} ({get_target(TARGET).sm_name}), cross-compiled")
    audit(kernels, checks)
    for kernel in kernels[:1]:
        print(f"\nThe main loop of {kernel.spec.name}, as emitted:\n{emitted_loop(kernel)}\n")
    print('3. A small Llama through torch.compile(model, backend="tilewright")')
    run_small(checks)
    seconds = time.perf_counter() - start
    if checks.failed:
        print(f"\nDEMO FAILED: {len(checks.failed)} of {checks.made} checks", file=sys.stderr)
        return 1
    print(f"\nDEMO PASSED: all {checks.made} checks, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
