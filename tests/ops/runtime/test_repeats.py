"""The same call again: found by addresses, launched as at first, and never where it may not be.

The implementation for CUDA runs here on CPU tensors, its launches noted instead of made, or made on
the interpreter.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.interpreted import Interpreter
from tests.ops.qkv import plain
from tilewright.codegen.qkv.plan import candidates, fused_choice
from tilewright.codegen.targets import SM90
from tilewright.ops import contract
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import FusedOp, Lowering, get_op
from tilewright.ops.qkv import lowering, operands
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime import replay
from tilewright.ops.runtime.recording import SplitK, address_key, note_launch

NAMES = ("fused_qkv_paged", "paged_kv_store")


def split_scratch(tiles, elements, device):
    """Split-K scratch of a CPU, noted as that of a GPU is."""
    made = torch.empty(tiles * elements), torch.zeros(tiles, dtype=torch.int32)
    note_launch(SplitK(tiles, elements), made)
    return made


class Noting(Interpreter):
    """Notes the values of every launch in place of making it; tensors by their addresses."""

    def __init__(self, target=SM90):
        super().__init__(target)
        self.log = []
        self.broken = None

    def launcher(self, launch):
        def run(values):
            if self.broken:
                raise self.broken
            addresses = (v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values)
            self.log.append(tuple(addresses))

        return run

    def made(self, address):
        """Whether a call allocated the memory there."""
        return any(start <= address < start + t.nbytes for start, t in self.known.items())


def on(machine, monkeypatch):
    monkeypatch.setattr(contract, "machine_of", lambda device: machine)
    monkeypatch.setattr(replay, "split_k_scratch", split_scratch)
    return machine


@pytest.fixture
def machine(monkeypatch):
    """A pretended H200 that notes launches."""
    return on(Noting(), monkeypatch)


@pytest.fixture
def log(machine):
    return machine.log


class Checked:
    """An op for CUDA that counts how often it checks values."""

    def __init__(self, name):
        self.checks = 0
        op = get_op(name)

        def validate_values(arguments):
            self.checks += 1
            op.validate_values(arguments)

        self.op = replace(op, validate_values=validate_values)
        self.run = contract._implementation(self.op, "cuda")

    def __call__(self, arguments):
        args, kwargs = self.op.split(arguments)
        with torch.no_grad():
            return self.run(*args, **kwargs)


def fused(case):
    """Arguments that a single fused kernel takes."""
    return get_op("fused_qkv_paged").sample_inputs(case)


PLAIN = AttentionCase("plain", hidden=256, head_dim=64, rope_style="half", rotary_dim=64, bias=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_launches_what_the_first_call_launched(name, machine):
    repeated = 0
    for case in get_op(name).cases:
        run = Checked(name)
        arguments = run.op.sample_inputs(case)
        if arguments.k_cache.dtype == torch.float64:
            continue
        machine.log.clear()
        first = run(arguments)
        second = run(arguments)
        if run.checks == 2:
            assert machine.log == []  # no tokens
            continue
        repeated += 1
        half = len(machine.log) // 2
        differing = [
            (a, b)
            for before, after in zip(machine.log[:half], machine.log[half:], strict=True)
            for a, b in zip(before, after, strict=True)
            if a != b
        ]
        assert all(machine.made(a) for a, _ in differing), case
        if first is None:
            assert differing == []
        else:
            assert (first.data_ptr(), second.data_ptr()) in differing
            assert (second.shape, second.dtype) == (first.shape, first.dtype)
            assert second.stride() == first.stride()
    assert repeated >= 5


def test_split_k_scratch_is_new_each_time(machine, monkeypatch):
    made = []

    def scratch(tiles, elements, device):
        made.append((tiles, elements))
        return split_scratch(tiles, elements, device)

    def split(call, target):
        configs = candidates(call.problem, 16, target)
        config = next(c for c in configs if getattr(c, "split_k", 1) > 1)
        return fused_choice(call.problem, config, target, 0.0, measured=False)

    monkeypatch.setattr(replay, "split_k_scratch", scratch)
    monkeypatch.setattr(lowering, "planned_lowering", split)
    case = replace(PLAIN, hidden=4096, head_dim=128, rotary_dim=128)
    run, arguments = Checked("fused_qkv_paged"), fused(case)
    run(arguments)
    (pair,) = [t for t in machine.known.values() if t.dtype == torch.int32]
    run(arguments)
    assert run.checks == 1
    assert [tiles for tiles, _ in made] == [pair.numel()]


def test_other_addresses_and_other_metadata_go_the_whole_way(log):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    changed = [
        a,
        replace(a, x=a.x.clone()),
        replace(a, slot_mapping=a.slot_mapping.clone()),
        replace(a, x=a.x[:4], slot_mapping=a.slot_mapping[:4], cos=a.cos[:4], sin=a.sin[:4]),
        replace(a, q_bias=None),
        replace(a, indexing="torch"),
        replace(a, norm_eps=1e-5),
        replace(a, k_window=a.v_window, v_window=a.k_window, k_cache=a.v_cache, v_cache=a.k_cache),
    ]
    for count, arguments in enumerate(changed, 1):
        run(arguments)
        assert run.checks == count
    for arguments in changed:
        run(arguments)
    assert run.checks == len(changed)
    assert len(log) == 2 * len(changed)


@pytest.mark.parametrize("name", NAMES)
def test_the_key_tells_every_argument(name):
    """Leaving any argument out of the key, or taking one for another, would show here."""
    op = get_op(name)
    a = op.sample_inputs(replace(PLAIN, qk_norm=True))
    known = address_key(*op.split(a))
    assert known == address_key(*op.split(a))
    for field in fields(a):
        value = getattr(a, field.name)
        if isinstance(value, torch.Tensor):
            others = [value.clone(), value.view(torch.uint8), value.unsqueeze(0)]
        elif isinstance(value, (list, tuple)):
            others = [[*value, 7]]
        else:
            others = ["another"]
        for other in others:
            assert address_key(*op.split(replace(a, **{field.name: other}))) != known, field.name


def test_values_are_checked_each_time_when_debugging(log, monkeypatch):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    run(a)
    a.slot_mapping[0] = 10**6
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(ArgumentError, match="slot_mapping"):
        run(a)
    assert len(log) == 1


def test_a_repeat_loses_no_gradient_silently(log):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    run(a)
    a.q_weight.requires_grad_(True)
    args, kwargs = run.op.split(a)
    with torch.enable_grad(), pytest.raises(ArgumentError, match="requires grad"):
        run.run(*args, **kwargs)
    run(a)  # without grad mode it may
    assert run.checks == 1


def test_what_is_not_measured_yet_is_not_repeated(log, monkeypatch):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    for _ in range(2):
        run(replace(a, tune=True))
    assert run.checks == 2
    run(a)
    run(a)
    assert run.checks == 3
    assert len(log) == 4


class Owning(TorchFunctionMode):
    """Tells an interpreter of the memory that a repeated call allocates."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        return self.machine.own(made) if function is torch.empty else made


def apart(a):
    """Heads with room between them: a batched GEMM for each weight."""
    weights = {name: getattr(a, name) for name in ("q_weight", "k_weight", "v_weight")}
    wide = {name: torch.cat((w, w), dim=1)[:, : w.shape[1]] for name, w in weights.items()}
    return replace(a, **wide)


@pytest.mark.parametrize("name", ["plain", "apart", "per_head", "grouped", "int8_zeros"])
def test_a_library_is_repeated_too(name, monkeypatch):
    """On a chip without a record, whose calls go to library GEMMs: new x at the old address."""
    machine = on(Interpreter(replace(SM90, features=frozenset())), monkeypatch)
    cases = {case.name: case for case in get_op("fused_qkv_paged").cases}
    case = cases.get(name, PLAIN)
    if name in ("per_head", "grouped"):
        case = replace(PLAIN, num_kv_heads=4 if name == "per_head" else 2, projection=name)
    run, a = Checked("fused_qkv_paged"), fused(case)
    a = apart(a) if name == "apart" else a
    run(a)
    kernels = list(machine.kernels)
    assert kernels[-1] == "qkv_epilogue"
    a.x.copy_(a.x.flip(0))
    again = replace(a, k_cache=a.k_cache.clone(), v_cache=a.v_cache.clone())
    with Owning(machine):
        q = run(a)
    assert run.checks == 1
    assert machine.kernels == 2 * kernels
    want = run.op.reference(again)
    for got, right in ((q, want), (a.k_cache, again.k_cache), (a.v_cache, again.v_cache)):
        assert plain.LIBRARY[got.dtype].problem(got, right) is None


def test_what_reads_a_tensor_the_call_made_is_not_repeated(log, monkeypatch):
    def with_a_copy(a):
        call = operands.prepare(a)
        call.values["x_ptr"] = a.x.clone()  # as if it were cast first
        return call

    monkeypatch.setattr(lowering, "prepare", with_a_copy)
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    for _ in range(2):
        run(a)
    assert run.checks == 2


def test_on_the_cpu_nothing_is_repeated():
    """There values are checked at every call, so no key is made by which to know one again."""
    op, made = get_op("paged_kv_store"), []

    def repeatable(*args, **kwargs):
        made.append(args)
        return None, lambda *_, **__: pytest.fail("made again on the CPU")

    own = Lowering("own", repeatable, frozenset({"cpu"}), lambda a: None, repeatable)
    run = contract._implementation(replace(op, lowerings=(own,)), "cpu")
    args, kwargs = op.split(op.sample_inputs(AttentionCase("plain")))
    for _ in range(2):
        run(*args, **kwargs)
    assert len(made) == 2


@dataclass(frozen=True)
class SumArguments:
    xs: list[torch.Tensor]


def test_a_list_of_tensors_is_neither_kept_nor_taken_for_another():
    """Somebody's own op: a key made of the tensors themselves would keep them alive."""

    def run(xs):
        return sum(xs), lambda *_: pytest.fail("made again")

    own = Lowering("own", run, frozenset({"cuda"}), lambda a: None, run)
    checked = []
    op = FusedOp(
        name="sum_of",
        schema="(Tensor[] xs) -> Tensor",
        arguments=SumArguments,
        validate=checked.append,
        validate_values=lambda a: None,
        fake=lambda a: a.xs[0].new_empty(()),
        reference=lambda a: sum(a.xs),
        lowerings=(own,),
        cases=(),
        sample_inputs=lambda case: None,
        tolerances={},
        error_model="",
    )
    run_op = contract._implementation(op, "cuda")
    xs = [torch.ones(2), torch.ones(2)]
    assert run_op(xs).tolist() == [2.0, 2.0]
    assert run_op([xs[0], 3 * xs[1]]).tolist() == [4.0, 4.0]
    assert len(checked) == 1
    checked.clear()
    watched = [weakref.ref(x) for x in xs]
    del xs
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_a_repeat_that_fails_goes_the_whole_way(machine):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    run(a)
    machine.broken = RuntimeError("no such kernel any more")
    want = get_op("fused_qkv_paged").reference(fused(PLAIN))
    torch.testing.assert_close(run(a), want, rtol=2e-2, atol=2e-2)
    assert run.checks == 2


def test_what_is_remembered_keeps_no_tensor_alive(log):
    run, a = Checked("fused_qkv_paged"), fused(PLAIN)
    run(a)
    run(a)
    assert run.checks == 1
    watched = [
        weakref.ref(v) for f in fields(a) if isinstance(v := getattr(a, f.name), torch.Tensor)
    ]
    del a
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the CPU wait for a GPU, or read from it."""

    BANNED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_to_copy", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if any(name.startswith(banned) for banned in self.BANNED):
            raise AssertionError(f"{name} would wait for the GPU")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_a_launch_waits_for_the_gpu(name, machine):
    op = get_op(name)
    for case in op.cases:
        arguments = op.sample_inputs(case)
        if arguments.k_cache.dtype == torch.float64:
            continue
        args, kwargs = op.split(arguments)
        with NoWaiting():
            _, again = op.lowerings[0].call(arguments, args, kwargs)
            if again is not None:
                again(*args, **kwargs)
    assert machine.log


def test_waiting_would_be_noticed():
    with NoWaiting(), pytest.raises(AssertionError, match="would wait"):
        torch.ones(1).item()
