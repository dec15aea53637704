"""Tests that hold for every registered op, including users' ops."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import pytest
import torch

from tests.ops.opcheck_samples import eight_bits, failures
from tests.ops.qkv import plain
from tilewright.ops import ArgumentError, contract
from tilewright.ops.fused_op import loaded
from tilewright.ops.mlp.arguments import LinearActivationArguments, LinearResidualArguments
from tilewright.ops.mlp.mixed import decodes_many
from tilewright.ops.runtime.device import target_of

OPS = {op.name: op for op in contract.all_ops()}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS.values() for case in op.cases
]


def clone(arguments):
    values = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    return replace(
        arguments,
        **{
            name: value.clone(memory_format=torch.preserve_format)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        },
    )


def as_double(arguments):
    tensors = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    return replace(
        arguments,
        **{
            name: value.double()
            for name, value in tensors.items()
            # Codes of eight bits stay as they are.
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.element_size() > 1
        },
    )


def outputs(op, arguments, result):
    named = {f"result {i}": tensor for i, tensor in enumerate(results_of(result))}
    named |= {name: getattr(arguments, name) for name in op.mutated}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def results_of(result):
    return result if isinstance(result, tuple) else (result,)


def meta_text(tensor):
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def test_the_attention_ops_are_registered():
    assert {
        "fused_qkv_matmul_kv_cache_paged_ragged",
        "fused_qkv_paged",
        "paged_kv_store",
    } <= OPS.keys()
    assert contract.get_op("fused_qkv_paged") is OPS["fused_qkv_paged"]


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
# Hopper's tensor cores keep about 14 bits of a sum of products of 8-bit numbers.
EIGHT_BIT_SUMS = 2.0**-10
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_error_against_float64_stays_within_the_declared_tolerance(op, case, device, chosen):
    exact_arguments = op.sample_inputs(case)
    if any(dtype.is_floating_point for dtype in op.tolerances):
        # Whole numbers are exact, and they may depend on the lowest number of a dtype.
        exact_arguments = as_double(exact_arguments)
    exact = outputs(op, exact_arguments, op.reference(exact_arguments))
    arguments = op.sample_inputs(case, device)
    actual = outputs(op, arguments, op.call(arguments))
    rounded = "library" in chosen or plain.rounds_operands(arguments)
    tolerances = plain.LIBRARY if rounded else op.tolerances
    x = getattr(arguments, "x", None)
    narrow = device == "cuda" and x is not None and x.dtype.itemsize == 1
    is_linear = isinstance(arguments, LinearActivationArguments | LinearResidualArguments)
    decoded = device == "cuda" and is_linear and decodes_many(arguments, target_of(x.device))
    for name, tensor in actual.items():
        tolerance = tolerances[tensor.dtype]
        if narrow:
            tolerance = replace(tolerance, of_rms=tolerance.of_rms + EIGHT_BIT_SUMS)
        if decoded:
            # The weight is rounded, too.
            tolerance = replace(tolerance, of_rms=2 * tolerance.of_rms)
        problem = tolerance.problem(tensor, exact[name])
        assert problem is None, f"{name}: {problem}"


@pytest.mark.parametrize(("op", "case"), CASES)
def test_what_every_call_promises(op, case):
    """Tests what every call promises: it refuses tensors of another kind, it changes only declared
    arguments, its results are new memory, the same call gives the same bits, and fake results have
    the metadata of real ones."""
    arguments = op.sample_inputs(case)
    check_that_other_tensors_are_refused(op, arguments)
    before = clone(arguments)
    results = results_of(op.call(arguments))
    check_that_only_declared_arguments_changed(op, arguments, before, results)
    first = {name: t.clone() for name, t in outputs(op, arguments, results).items()}
    second = outputs(op, arguments, op.call(arguments))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = op.call(arguments)
    for made, expected in zip(results_of(fake), results, strict=True):
        assert (made is None) == (expected is None)
        if expected is not None:
            assert meta_text(made) == meta_text(expected)


def check_that_only_declared_arguments_changed(op, arguments, before, results):
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if isinstance(value, torch.Tensor) and field.name not in op.mutated:
            assert torch.equal(value, getattr(before, field.name)), field.name
            for result in results:
                if result is not None and result.numel():
                    assert result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [on_meta(v) for v in value] if isinstance(value, list) else value


def with_first_tensor(value, change):
    """Returns an argument with its first tensor changed; None if it has no tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    values = value if isinstance(value, list) else []
    at = next((i for i, v in enumerate(values) if isinstance(v, torch.Tensor)), None)
    return None if at is None else [*values[:at], change(values[at]), *values[at + 1 :]]


OTHERS = {
    "on another device": lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype),
    "of another dtype": lambda t: t.to(torch.complex64),
    "with one more dimension": lambda t: t.unsqueeze(0),
}
# Tensors that may have one more dimension.
OF_ANY_RANK = re.compile(
    "(k|v|latent|rope)_cache|(k|v)(_cache)?_scale|(weight|up|kv_b)_factor|q_weight"
)
# The only tensors of some calls. Such a call has no other device.
MAY_BE_ALONE = ("mask_blocks.attn_mask", "quantize_nvfp4.x", "round_rows.x")


def check_that_other_tensors_are_refused(op, arguments):
    """Checks that the op refuses each tensor on another device, of another dtype or with another
    number of dimensions. Metadata is enough for these checks."""
    given = replace(arguments, **{k: on_meta(value) for k, value in vars(arguments).items()})
    op.validate(given)
    for name, value in vars(given).items():
        for what, change in OTHERS.items():
            other = with_first_tensor(value, change)
            any_rank = "dimension" in what and OF_ANY_RANK.fullmatch(name)
            alone = "device" in what and f"{op.name}.{name}" in MAY_BE_ALONE
            if other is not None and not any_rank and not alone:
                assert refuses(op, replace(given, **{name: other})), f"{name} {what}"


def refuses(op, arguments):
    try:
        op.validate(arguments)
    except ArgumentError:
        return True
    return False


INDEX_DTYPES = (torch.uint32, torch.int32, torch.int64)


def indices_of(op):
    """Yields (arguments, name) of each index tensor, from the first sample that has it."""
    found = {}
    for case in op.cases:
        a = op.sample_inputs(case)
        for name, value in vars(a).items():
            indices = getattr(value, "dtype", None) in INDEX_DTYPES and name not in op.mutated
            # uint32 cannot represent -1, which stands for no place.
            if indices and not bool((value.to(torch.int64) < 0).any()):
                found.setdefault(name, (a, name))
    return found.values()


@contextmanager
def suppress_dtype_of(name):
    """Ignores an error which says that the op does not support an argument's dtype."""
    try:
        yield
    except ArgumentError as error:
        if error.argument != name or "dtype" not in str(error):
            raise


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_indices_mean_the_same_in_every_dtype_that_is_taken(op):
    """Indices have the same meaning in every supported dtype. PyTorch can neither compare nor add
    uint32, which MAX's ops have."""
    for a, name in indices_of(op):
        before = clone(a)
        expected = outputs(op, before, op.call(before))
        for dtype in INDEX_DTYPES:
            other = clone(replace(a, **{name: getattr(a, name).to(dtype)}))
            with suppress_dtype_of(name):
                for output, tensor in outputs(op, other, op.call(other)).items():
                    assert torch.equal(tensor, expected[output]), (name, dtype, output)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_torch_opcheck(op):
    """One sample of each op is tested, and one sample with 8-bit floats. `opcheck_samples.py` tests
    all samples."""
    narrow = [c for c in op.cases if any(map(eight_bits, vars(op.sample_inputs(c)).values()))]
    chosen = random.Random(op.name)
    wide = [case for case in op.cases if case not in narrow]
    for cases in filter(None, (wide, narrow)):
        case = chosen.choice(cases)
        assert not failures(op, case), case.name


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_call_off_the_gpu_says_why_the_kernel_was_not_taken(op):
    choice = op.choose("cpu", op.sample_inputs(op.cases[0]))
    assert choice.lowering.name == "reference"
    assert choice.rejected == tuple((way.name, "runs on cuda only") for way in op.lowerings)


def test_ops_that_take_tune_say_what_they_measure():
    tuned = {n for n, op in OPS.items() if op.tuning is not None}
    takes_tune = {
        n for n, op in OPS.items() if "tune" in {a.name for a in op.torch_op._schema.arguments}
    }
    assert tuned == takes_tune != set()
    for name in tuned:
        assert "sm90" in loaded(OPS[name].tuning)("sm90")


DOUBLE = {n: op for n, op in OPS.items() if any(c.dtype == torch.float64 for c in op.cases)}


@pytest.mark.parametrize("op", DOUBLE.values(), ids=DOUBLE)
def test_the_kernel_declines_float64(op):
    case = next(case for case in op.cases if case.dtype == torch.float64)
    choice = op.choose("cuda", op.sample_inputs(case))
    assert choice.lowering.name == "reference"
    assert "torch.float64" in choice.rejected[0][1]


FLOATING = {n: op for n, op in OPS.items() if "mla_prefill_plan" not in n}


@pytest.mark.parametrize("op", FLOATING.values(), ids=FLOATING)
def test_a_gradient_is_refused_not_lost(op):
    arguments = op.sample_inputs(op.cases[0])
    name = next(
        f.name
        for f in fields(arguments)
        if isinstance(t := getattr(arguments, f.name), torch.Tensor)
        and t.is_floating_point()
        and t.element_size() > 1
    )
    learned = replace(arguments, **{name: getattr(arguments, name).clone().requires_grad_()})
    caches = [cache for n in op.mutated if (cache := getattr(arguments, n)) is not None]
    before = [cache.clone() for cache in caches]
    with pytest.raises(
        ArgumentError, match=rf"{name}: .*inference only \(call it under torch.no_grad"
    ):
        op.call(learned)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    with torch.no_grad():
        result = op.call(learned)
    assert not any(cache.requires_grad for cache in caches)
    assert not any(r is not None and r.requires_grad for r in results_of(result))


def test_an_op_that_may_write_nothing_names_one_that_never_does():
    """Functionalisation cannot represent a call whose written arguments are all None. An op that
    may be called so names another op that never writes."""
    for op in OPS.values():
        schema = torch._C.parse_schema(op.declaration)
        given = {a.name: a for a in schema.arguments if a.name in op.mutated}
        may_be_none = bool(given) and all("Optional" in str(a.type) for a in given.values())
        assert bool(op.without_writes) == may_be_none, op.name
        if may_be_none:
            other = OPS[op.without_writes]
            assert other.parameters == op.parameters
            assert not other.mutated


def test_a_call_that_writes_nothing_is_functionalised():
    """torch.export and AOTInductor do this."""
    op = OPS["mla_prefill"]
    arguments = next(a for a in map(op.sample_inputs, op.cases) if a.latent_cache is None)
    values = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    others = {name: v for name, v in values.items() if name not in tensors}

    class Call(torch.nn.Module):
        def forward(self, **tensors):
            return op.torch_op(**tensors, **others)

    exported = torch.export.export(Call(), (), tensors).run_decompositions({})
    called = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert called == ["tilewright.mla_prefill_dense.default"]
    assert torch.equal(exported.module()(**tensors), op.torch_op(**values))


def test_registering_the_same_op_again_changes_nothing():
    op = OPS["paged_kv_store"]
    assert contract.register(op) is op
    assert contract.register(replace(op)) is op


def test_another_op_under_the_same_name_is_refused():
    op = OPS["paged_kv_store"]
    other = replace(op, reference=OPS["fused_qkv_paged"].reference)
    with pytest.raises(contract.OpConflictError, match="tilewright::paged_kv_store is already"):
        contract.register(other)
    assert contract.get_op("paged_kv_store") is op


def test_a_name_of_torch_is_refused():
    op = replace(OPS["paged_kv_store"], namespace="aten", name="linear")
    with pytest.raises(contract.OpConflictError, match="aten::linear is already defined"):
        contract.register(op)


def test_arguments_that_do_not_follow_the_schema_are_refused():
    op = replace(OPS["paged_kv_store"], name="wrong", schema="(Tensor k, Tensor? v) -> ()")
    with pytest.raises(ValueError, match="are not the arguments of its schema"):
        contract.register(op)


def test_an_unknown_op_is_answered_with_the_known_ones():
    with pytest.raises(KeyError, match=r"registered: .*tilewright::paged_kv_store"):
        contract.get_op("no_such_op")


USER_FILE = """
    from dataclasses import dataclass
    import torch
    from tilewright.ops.contract import FusedOp, Tolerance, register

    @dataclass(frozen=True)
    class Arguments:
        x: torch.Tensor
        scale: float = 2.0

    OP = register(FusedOp(
        name="scaled", namespace="user_file", arguments=Arguments,
        validate=lambda a: None, validate_values=lambda a: None,
        fake=lambda a: torch.empty_like(a.x), reference=lambda a: a.x * a.scale, lowerings=(),
        cases=(3,), sample_inputs=lambda case, device="cpu", seed=0: Arguments(torch.ones(case)),
        tolerances={torch.float32: Tolerance(1e-6, 0.0)}, error_model="one product",
    ))
    model = lambda x: torch.ops.user_file.scaled(x) + 1
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    print(compiled(torch.ones(3)).tolist())
"""


def test_a_users_op_registers_from_one_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(USER_FILE))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[3.0, 3.0, 3.0]", done.stderr


def test_tolerance_names_the_worst_element():
    tolerance = contract.Tolerance(relative=0.01, of_rms=0.0)
    exact = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    actual = exact.clone()
    actual[1, 0] = 3.5
    assert tolerance.problem(exact, exact) is None
    assert "1 of 4 elements are off; the worst is at [1, 0]" in tolerance.problem(actual, exact)
    actual[1, 0] = float("nan")
    assert "worst is at [1, 0]" in tolerance.problem(actual, exact)
    assert "shape [2]" in tolerance.problem(torch.ones(2), exact)


def test_a_lowering_that_fails_gives_way_to_the_reference(monkeypatch, caplog):
    """If a lowering fails, the reference runs: a kernel that cannot be built or launched must not
    stop a model."""
    calls = []

    def broken(*args, **kwargs):
        calls.append("broken")
        raise RuntimeError("no such instruction")

    @dataclass
    class Arguments:
        x: torch.Tensor

    op = contract.register(
        replace(
            contract.get_op("paged_kv_store"),
            name="doubled",
            namespace="tilewright_tests",
            schema="(Tensor x) -> Tensor",
            arguments=Arguments,
            validate=lambda a: None,
            validate_values=lambda a: None,
            fake=lambda a: torch.empty_like(a.x),
            reference=lambda a: a.x * 2,
            lowerings=(contract.Lowering("broken", broken, frozenset({"cpu"}), lambda a: None),),
        )
    )
    x = torch.arange(3.0)
    assert torch.equal(op.torch_op(x), 2 * x)
    assert torch.equal(op.torch_op(x), 2 * x)
    assert calls == ["broken"]
    assert "doubled: broken failed; using the reference" in caplog.text
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(RuntimeError, match="no such instruction"):
        op.torch_op(torch.arange(4.0))
