"""Lists every kernel that an audit case, an op's case or a benchmark needs, by the name of the
case.

The kernel net has short hashes of the specs that each named case gets, and of the source that is
emitted for each spec. No hash depends on the path of a file in this repository, so moving code
changes none.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch.overrides import TorchFunctionMode

# Every file of this repository whose path the net could depend on is imported here.
from tilewright.codegen.emit import emit, emitter_fingerprint
from tilewright.codegen.emit.source import fingerprint
from tilewright.codegen.qkv.plan import fused_choice, library_choice, ranked
from tilewright.codegen.spec import KernelSpec, module_of
from tilewright.codegen.targets import TARGETS
from tilewright.ops.contract import FusedOp, all_ops, get_op
from tilewright.ops.grouped.quantize_nvfp4 import QuantizeNvfp4Arguments
from tilewright.ops.mla.attention.lowering import attention_steps
from tilewright.ops.qkv.choices import specs_of
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.runtime.program import Planner, drive
from tilewright.tools.audit.families import all_cases as audit_cases

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

NET_TARGETS = ("sm90", "sm100")
DIGITS = 8
ALIGNED = 512  # bytes
# Maps the name of a case to its kernels, or to the reason why there are none.
Found = dict[str, Sequence[KernelSpec] | str]


@cache
def spec_hash(spec: KernelSpec) -> str:
    """Hashes the spec's JSON without `template`, which is the path of the kernel's source."""
    values = json.loads(spec.to_json())
    del values["template"]
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def source_hash(spec: KernelSpec) -> str:
    """Hashes the emitted file without docstrings, with the kernel named as in its template.

    The syntax tree is hashed in the form that `ast.unparse` prints, because `ast.dump` differs
    between Python's releases.
    """
    tree = ast.parse(emit(spec))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef) and node.name == spec.name:
            node.name = spec.kernel
        if isinstance(node, ast.Constant) and node.value == spec.name:
            node.value = spec.kernel
    text = ast.unparse(tree)
    assert spec.name not in text, f"{spec.name} has its name in its body"
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


@cache
def text_hash(template: str) -> str:
    """Hashes the text from which a template's sources are emitted: its own text, the text of its
    imports, and the emitter's text."""
    texts = emitter_fingerprint() + fingerprint(module_of(template))
    return hashlib.sha256(texts.encode()).hexdigest()[:DIGITS]


def own_ops() -> list[FusedOp]:
    """Returns the ops of this project. Other tests register examples of users' ops."""
    return [op for op in all_ops() if op.namespace == "tilewright"]


@cache
def quick_cases(target: str) -> Found:
    """Returns the audit cases and the ops' own cases. The result is cached: do not change it."""
    found: Found = {}
    for case in audit_cases(TARGETS[target]):
        _add(found, f"audit, {case.name}", [case.spec])
    for op in own_ops():
        for case in op.cases:
            a = placed(op.sample_inputs(case))
            _add(found, f"op, {op.name}, {case.name}", _planned(op, a, target))
    _add_all(found, forced_qkv(target))
    return found


def all_cases(target: str) -> Found:
    """Returns the cases of `quick_cases` and those with the shapes of the benchmarks."""
    found = dict(quick_cases(target))
    for label, op, arguments in benchmark_calls():
        _add(found, f"benchmark, {label}", _planned(op, arguments, target))
    _add_all(found, attention_cores(target))
    return found


def _add(found: Found, label: str, specs: Sequence[KernelSpec] | str) -> None:
    again = 1
    while (name := f"{label} ({again})" if again > 1 else label) in found:
        again += 1
    found[name] = specs


def _add_all(found: Found, more: Iterator[tuple[str, Sequence[KernelSpec]]]) -> None:
    for label, specs in more:
        _add(found, label, specs)


def placed(a: Any) -> Any:
    """Returns the arguments at addresses that have the same distances in every process.

    Storages follow each other, and are aligned as by a GPU's allocator, because kernels depend on
    the alignment of addresses.
    """
    given = {name: t for name, t in vars(a).items() if isinstance(t, torch.Tensor) and t.numel()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in given.values()}
    sizes = {key: -(-storage.nbytes() // ALIGNED) * ALIGNED for key, storage in storages.items()}
    memory = numpy.zeros(sum(sizes.values()) + ALIGNED, dtype=numpy.uint8)
    first = -memory.ctypes.data % ALIGNED
    places: dict[int, torch.UntypedStorage] = {}
    for key, storage in storages.items():
        part = torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=first)
        places[key] = part.untyped_storage().copy_(storage)
        first += sizes[key]
    moved = {
        name: torch.empty(0, dtype=t.dtype).set_(
            places[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride()
        )
        for name, t in given.items()
    }
    return replace(a, **moved)


def _planned(op: FusedOp, arguments: Any, target: str) -> Sequence[KernelSpec] | str:
    try:
        return op.plan_for(arguments, target).specs
    except Exception as error:  # records that the case has no plan
        return type(error).__name__  # messages differ between Python's releases


def forced_qkv(target: str) -> Iterator[tuple[str, Sequence[KernelSpec]]]:
    """Yields each lowering that a QKV projection could use, with the best config of its kind."""
    op, chip = get_op("fused_qkv_paged"), TARGETS[target]
    for case in op.cases:
        a = placed(op.sample_inputs(case))
        if a.x.shape[0] == 0 or op.choose("cuda", a).lowering.name == "reference":
            continue
        call, tokens = prepare(a), a.x.shape[0]
        problem = call.problem
        kinds: dict[str, Any] = {}
        for seconds, config in ranked(problem, tokens, chip):
            choice = fused_choice(problem, config, seconds)
            kinds.setdefault(choice.name, choice)
        packed = call.rows is not None
        kinds["library"] = library_choice(problem, tokens, chip, packed, None)
        for name, choice in kinds.items():
            *before, last = specs_of(call, choice, chip)
            yield f"op, {op.name}, {case.name}, forced {name}", [last, *before]


class _OnMeta(TorchFunctionMode):
    """Makes tensors for a GPU on the meta device, because benchmarks make their arguments on the
    GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.bincount:  # the length of its result depends on values
            return args[0].new_zeros(kwargs["minlength"] if kwargs else 0)
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.device:
            return _off_gpu(func(*args, **(kwargs or {})))
        args = tuple(_off_gpu(value) for value in args)
        return func(*args, **{name: _off_gpu(value) for name, value in (kwargs or {}).items()})


def _off_gpu(value: Any) -> Any:
    if isinstance(value, (str, torch.device)) and str(value).startswith("cuda"):
        return torch.device("meta")
    return value


@contextmanager
def _benchmark_imports() -> Iterator[None]:
    """Lets the benchmarks import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
                del sys.modules[name]


@cache
def benchmark_calls() -> list[tuple[str, FusedOp, Any]]:
    """Yields (label, op, arguments on the meta device) of every shape in the benchmarks' tables."""
    families = (_qkv, _quantized, _lora, _moe, _grouped, _quantizer, _mla)
    with _benchmark_imports(), _OnMeta():
        return [call for family in families for call in family()]


Calls = Iterator[tuple[str, FusedOp, Any]]


def _at_counts(label: str, op: FusedOp, make: Callable[[int], Any], counts: Sequence[int]) -> Calls:
    """Yields one call with any number of tokens, then one call for each static number."""
    yield f"{label}, any T", op, make(counts[0])
    for tokens in counts:
        yield f"{label}, T={tokens}", op, replace(make(tokens), static_tokens=True)


def _qkv() -> Calls:
    import qkv_cache
    import qkv_shapes
    import tune_qkv

    op = get_op("fused_qkv_paged")
    for shape in qkv_cache.SHAPES:
        for layout in ("paged", "static"):

            def make(tokens: int, shape: Any = shape, layout: str = layout) -> Any:
                cache = (
                    qkv_shapes.paged_cache(shape)
                    if layout == "paged"
                    else qkv_shapes.static_cache(shape, tokens)
                )
                layer = qkv_shapes.make_layer(shape, tokens)
                return qkv_shapes.fused_arguments(shape, layer, cache)

            label = f"qkv_cache {shape.name} {layout}"
            yield from _at_counts(label, op, make, qkv_cache.TOKENS)
    for shape in tune_qkv.SHAPES:
        for packed in (False, True):
            layer = qkv_shapes.make_layer(shape, tune_qkv.TOKENS[0], packed)
            a = qkv_shapes.fused_arguments(shape, layer, qkv_shapes.paged_cache(shape, 0.25))
            yield f"tune_qkv {shape.name}{', packed' if packed else ''}", op, a


def _quantized() -> Calls:
    import qkv_quantized
    import qkv_shapes
    import quantized_layers

    op = get_op("fused_qkv_paged")
    for shape in quantized_layers.SHAPES:
        cache = qkv_shapes.paged_cache(shape, 0.25)
        for form in quantized_layers.FORMATS:

            def make(tokens: int, shape: Any = shape, form: Any = form, cache: Any = cache) -> Any:
                layer = quantized_layers.make_quantized(form, shape, tokens)
                return quantized_layers.quantized_arguments(form, shape, layer, cache)

            kept = form.name in qkv_quantized.FORMATS
            counts = qkv_quantized.TOKENS if kept else qkv_quantized.TOKENS[:1]
            yield from _at_counts(f"qkv_quantized {shape.name} {form.name}", op, make, counts)


def _lora() -> Calls:
    import lora
    import lora_delta
    from lora_shapes import LoraShape

    options = SimpleNamespace(
        hidden=[4096, 8192],
        ranks=[8, 16, 64, 128],
        adapters=[1, 8, 32, 64],
        tokens=list(lora.TOKENS),
        skewed=[],
    )
    with patch.object(FusedOp, "plan_for", _Noting()) as noting:
        for shape in lora.shapes_of(options):
            lora.kernels_of([shape], [])
            yield from noting.taken(f"lora {shape}")
        for rank in (16, 64):
            for tokens in lora.TOKENS:
                shape = LoraShape(4096, rank, 8, tokens)
                lora.kernels_of([], [shape])
                yield from noting.taken(f"lora expand {shape}")
                shape = LoraShape(4096, rank, 1, tokens)
                lora_delta.delta_specs([shape])
                yield from noting.taken(f"lora delta {shape}")


class _Noting:
    """Replaces `FusedOp.plan_for` in benchmarks that ask for one target only, and records the
    calls."""

    def __init__(self) -> None:
        self._noted: list[tuple[FusedOp, Any]] = []

    def __get__(self, op: FusedOp, owner: type) -> Callable[[Any, str], Any]:
        def plan_for(arguments: Any, target: str) -> Any:
            self._noted.append((op, arguments))
            return SimpleNamespace(specs=())

        return plan_for

    def taken(self, label: str) -> Calls:
        noted, self._noted = self._noted, []
        for number, (op, arguments) in enumerate(noted):
            yield f"{label}, {op.name}{f' {number}' if number else ''}", op, arguments


def _moe() -> Calls:
    import moe
    import moe_layers

    op = get_op("fused_moe")
    counts = sorted((*moe.TOKENS, *moe.MORE_TOKENS))
    shapes = list(moe_layers.BY_NAME.values())
    rows = moe.asked_for(shapes, counts, ["dense", *moe.FORMAT_TOKENS])
    for shape, form, tokens in dict.fromkeys((s, f, t) for s, f, t, _ in rows):
        experts = moe_layers.make_experts(shape, form, "meta")
        a = moe_layers.arguments(shape, experts, tokens, device="meta")
        yield f"moe {shape.name} {form} T={tokens}", op, a


def _grouped() -> Calls:
    import grouped_matmul

    op = get_op("grouped_matmul")
    for text in grouped_matmul.KEPT:
        if text != "quantise":
            for case in grouped_matmul.cases_of(text):
                a = grouped_matmul.arguments(case, grouped_matmul.weights(case))[0]
                label = f"{case.shape.name} {case.stage} {case.form} T={case.tokens}"
                yield f"grouped_matmul {label}", op, a


def _quantizer() -> Calls:
    import grouped_matmul

    op = get_op("quantize_nvfp4")
    for rows, inner in grouped_matmul.QUANTISED:
        x = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
        ends = torch.empty(129, dtype=torch.int32, device="meta")
        scales = torch.empty(128, device="meta")
        label = f"quantize_nvfp4 {rows} x {inner}"
        yield f"{label}, groups", op, QuantizeNvfp4Arguments(x, ends, scales)
        yield label, op, QuantizeNvfp4Arguments(x)


def _mla() -> Calls:
    import mla
    import mla_helpers
    from mla_layers import Layer

    prefill, branch = get_op("mla_prefill"), get_op("mla_prefill_branch_fp8")
    for heads in (16, 128):
        for name, lengths in mla.BATCHES.items():
            layer, label = Layer(heads, lengths, "meta"), f"mla H={heads} {name}"
            yield f"{label}, bf16", prefill, layer.bf16()
            yield f"{label}, fp8", branch, layer.fp8()
            yield f"{label}, 8-bit core", branch, layer.fp8(mla.FP8)
        for rows in (1024, 4096, 16384):
            for kind in mla_helpers.KINDS:
                for new in (1, rows):
                    a = mla_helpers.arguments(heads, rows, new, kind)
                    yield f"mla_helpers H={heads} {kind} K={rows}, {new} new", prefill, a


def attention_cores(target: str) -> Iterator[tuple[str, Sequence[KernelSpec]]]:
    """Yields the cases of MLA's attention core, which is not an op by itself."""
    with _benchmark_imports(), _OnMeta():
        import mla

        for heads in (16, 128):
            for name, lengths in mla.BATCHES.items():
                if len(lengths) == 1:
                    operands = mla.core_operands(heads, lengths[0], "meta")
                    for form, call in operands.items():
                        steps = attention_steps(call, TARGETS[target])
                        specs = drive(steps, Planner(TARGETS[target])).specs
                        yield f"benchmark, mla H={heads} {name}, {form}", specs
