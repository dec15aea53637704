"""Tests repeated calls: a call is found by its addresses, and its launches are repeated unless this
is not allowed.

The implementation for CUDA runs here on CPU tensors. Its kernels run on Triton's interpreter, or
they are recorded but not run.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.interpreted import Interpreter, steps_of
from tests.ops.qkv import plain
from tilewright.codegen.targets import SM90
from tilewright.ops import calls
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import FusedOp, all_ops, emitted_kernel, get_op, register
from tilewright.ops.lora.cases import LoraCase
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import Buffer, Library, Outcome, SplitK, drive
from tilewright.ops.runtime.recording import CallKeys
from tilewright.ops.runtime.replay import repeat


class Recorder(Interpreter):
    """A machine that runs no kernel and records the launches.

    launches: the name and the values of each kernel, with addresses in place of tensors.
    own: the new memory by address.
    """

    def __init__(self):
        super().__init__(SM90, runs=False)
        self.launches = []
        self.own = {}

    def perform(self, step):
        answer = super().perform(step)
        if isinstance(step, (Buffer, SplitK)) or (isinstance(step, Library) and step.makes):
            for tensor in answer if isinstance(answer, tuple) else (answer,):
                self.own[tensor.data_ptr()] = tensor
        return answer

    def launcher(self, launch):
        def note(values):
            addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            self.launches.append((launch.spec.kernel, addresses))

        return note


class NoWaiting(TorchDispatchMode):
    """Refuses operations that would make the CPU wait for a GPU, or read from it."""

    BANNED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        moves = name == "_to_copy" and (kwargs or {}).get("device") is not None
        if moves or any(name.startswith(banned) for banned in self.BANNED):
            raise AssertionError(f"{name} would wait for the GPU")
        return function(*args, **(kwargs or {}))


def test_waiting_would_be_noticed():
    with NoWaiting(), pytest.raises(AssertionError, match="would wait"):
        torch.ones(1).item()
    with NoWaiting(), pytest.raises(AssertionError, match="would wait"):
        torch.ones(1).to("meta")


BUILT = [
    op
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
]


@pytest.mark.parametrize("op", BUILT, ids=lambda op: op.name)
def test_a_repeat_launches_what_the_first_call_launched(op):
    """Tests that the second call makes the same launches, with other memory for its results.

    If two launches of the first call share an address in memory that the call allocated, the same
    launches of the second call share an address in the new memory. The addresses of arguments stay
    the same. Neither call waits for the GPU.
    """
    repeated = [case for case in cases_here(op) if is_repeated(op, op.sample_inputs(case))]
    assert len(repeated) >= 3


def cases_here(op):
    """Returns the cases without products that PyTorch's library has only on GPUs."""
    by_blocks = op.name == "scaled_linear"
    return [case for case in op.cases if not by_blocks or case.scale_block != (128, 128)]


def is_repeated(op, a, moved=None):
    """Whether a call is repeated. With the arguments `moved`, the result must equal that of a first
    call with them."""
    if op.choose("cuda", a).lowering.build is None:
        return False
    machine, (args, kwargs) = Recorder(), op.split(a)
    moving = frozenset(n for n, name in enumerate(op.parameters) if name in op.moving)
    with NoWaiting():
        program = drive(steps_of(op, a, machine.target), machine)
        again = repeat(program, args, kwargs, machine, moving)
        if again is None:
            return False
        if moved is not None:
            args, kwargs = op.split(moved)
            machine.launches.clear()
            program = drive(steps_of(op, moved, machine.target), machine)
        first, before = machine.launches.copy(), list(machine.own)
        machine.launches.clear()
        result = again(*args, **kwargs)
    assert [kernel for kernel, _ in first] == [kernel for kernel, _ in machine.launches]
    places = {}
    for (_, old), (_, new) in zip(first, machine.launches, strict=True):
        for one, other in zip(old, new, strict=True):
            if one != other:
                assert places.setdefault(one, other) == other
                assert any(0 <= one - start < machine.own[start].nbytes for start in before)
    pairs = zip(results_of(program.outcome.result), results_of(result), strict=True)
    for old, new in pairs:
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        if old.numel():
            assert new.data_ptr() != old.data_ptr()
            assert places.get(old.data_ptr(), new.data_ptr()) == new.data_ptr()
    return True


@pytest.mark.parametrize("op", [op for op in BUILT if op.moving], ids=lambda op: op.name)
def test_a_repeat_finds_the_arguments_that_move(op):
    repeated, keys = 0, CallKeys(op.kinds, op.moving)
    for case in cases_here(op):
        a = op.sample_inputs(case)
        moved = {name: relocated(getattr(a, name)) for name in op.moving}
        other = replace(a, **moved)
        assert keys(*op.split(a)) == keys(*op.split(other))
        repeated += is_repeated(op, a, other)
    assert repeated >= 3


def relocated(tensor):
    """Copies a tensor to other memory, with the same layout and an address that has the same
    remainder modulo 16."""
    if tensor is None:
        return None
    memory = tensor.untyped_storage().clone()
    moved = torch.empty(0, dtype=tensor.dtype)
    moved.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    assert moved.data_ptr() != tensor.data_ptr() or not tensor.numel()
    return moved


def results_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


SHRINK = get_op("shrink_qkv_permute_3mn")
ROWS = LoraCase("rows", num_rows=6, num_adapters=3, hidden=24, ranks=(2, 3, 0))


class Breakable(Interpreter):
    """An interpreter whose kernels fail on demand."""

    broken = False

    def launcher(self, launch):
        run = super().launcher(launch)

        def checked(values):
            if self.broken:
                raise RuntimeError("no such kernel any more")
            run(values)

        return checked


@pytest.fixture
def machine(monkeypatch):
    made = Breakable()
    monkeypatch.setattr(calls, "machine_of", lambda device: made)
    return made


class Checked:
    """An op for CUDA that counts how often it checks values."""

    def __init__(self, op=SHRINK):
        self.checks = 0

        def validate_values(arguments):
            self.checks += 1
            op.validate_values(arguments)

        self.op = replace(op, validate_values=validate_values)
        self.run = calls.Calls(self.op, "cuda")

    def __call__(self, arguments):
        args, kwargs = self.op.split(arguments)
        with torch.no_grad():
            return self.run(*args, **kwargs)

    def known(self, arguments):
        """Returns the result of a second call, which prepares the third call."""
        self(arguments)
        return self(arguments)


def test_a_known_call_is_neither_checked_nor_planned_again(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    first = run.known(a)
    a.a.neg_()
    assert torch.equal(run(a), -first)
    assert run.checks == 2
    assert machine.kernels == ["lora_shrink_row"] * 3


def test_other_addresses_and_other_metadata_go_the_whole_way(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    changed = [
        a,
        replace(a, q_weight=a.q_weight.clone()),
        replace(a, expert_ids=a.expert_ids.clone()),
        replace(a, a=a.a[:3], expert_ids=a.expert_ids[:3]),
        replace(a, expert_ids=a.expert_ids[:3]),
        replace(a, num_rows=3, expert_ids=a.expert_ids[:3]),
        replace(a, q_weight=a.k_weight, k_weight=a.q_weight),
        replace(a, k_weight=None),
    ]
    for count, arguments in enumerate(changed, 1):
        run(arguments)
        assert run.checks == count
    for arguments in 2 * changed:
        run(arguments)
    assert run.checks == 2 * len(changed)
    assert len(machine.kernels) == 3 * len(changed)


def test_an_argument_that_moves_is_read_where_it_lies(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    first = run.known(a)
    for factor in (1, -1, 2):
        assert torch.equal(run(replace(a, a=factor * a.a)), factor * first)
    assert run.checks == 2
    off = torch.empty(a.a.numel() + 1, dtype=a.a.dtype)[1:].view_as(a.a).copy_(a.a)
    # This call needs another kernel, because the argument is not aligned.
    assert torch.equal(run(replace(a, a=off)), first)
    assert run.checks == 3


def test_arguments_that_move_are_told_apart(machine):
    """One call passes the same tensor for two arguments, and the other passes two tensors. Neither
    call is mistaken for the other."""
    op = get_op("all_reduce_residual_norm")
    run, a = Checked(op), op.sample_inputs(op.cases[0])
    twice = replace(a, residual=a.x)
    wanted = [Checked(op)(arguments) for arguments in (twice, a)]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    for _ in range(3):
        for arguments, want in zip((twice, a), wanted, strict=True):
            assert all(map(torch.equal, run(arguments), want))
    assert run.checks == 4


def test_what_overlaps_an_argument_that_moves_is_not_repeated(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    memory = torch.zeros(2 * a.a.numel() + a.q_weight.numel(), dtype=a.a.dtype)
    inside = memory[: a.q_weight.numel()].view_as(a.q_weight)
    beside = memory[-a.q_weight.numel() :].view_as(a.q_weight)
    x = memory[8 : 8 + a.a.numel()].view_as(a.a)
    for weight, checks in ((inside, 3), (beside, 2)):
        run.checks = 0
        for _ in range(3):
            run(replace(a, a=x, q_weight=weight))
        assert run.checks == checks


@pytest.mark.parametrize("moving", [{"k"}, {"a_offsets", "expert_ids"}, {"num_rows"}, {"nothing"}])
def test_what_may_move_is_declared_right(moving):
    op = replace(SHRINK, name="another_shrink", moving=frozenset(moving))
    with pytest.raises(ValueError, match="another_shrink: moving: expected positional"):
        register(op)


@pytest.mark.parametrize("op", BUILT, ids=lambda op: op.name)
def test_the_key_tells_every_argument(op):
    """If the key left out an argument, or confused it with another, this test would show it."""
    a, keys = op.sample_inputs(op.cases[0]), CallKeys(op.kinds, op.moving)
    known = keys(*op.split(a))
    assert known == keys(*op.split(a))
    for name, kind in op.kinds.items():
        value = getattr(a, name)
        if isinstance(value, torch.Tensor):
            others = [value.view(torch.int8), value.unsqueeze(0)]
            others += [value.transpose(0, -1)] * (value.numel() > 1)
            others = [other for other in others if value.ndim > 1] or [value.repeat(2), value[None]]
            others += [None] * ("Optional" in kind) + [value.clone()] * (name not in op.moving)
        elif "Tensor" in kind:
            others = [torch.ones(1)]
        elif isinstance(value, (list, tuple)):
            others = [[*value, 7]]
        else:
            others = ["another"]
        for other in others:
            assert keys(*op.split(replace(a, **{name: other}))) != known, name
    args, kwargs = op.split(a)
    for n in range(1, len(args)):  # a default that is left out
        assert keys(args[:n], kwargs) != known
    for name in kwargs:
        assert keys(args, {k: v for k, v in kwargs.items() if k != name}) != known


def test_values_are_checked_each_time_when_debugging(machine, monkeypatch):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    run.known(a)
    a.expert_ids[0] = 7
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(ArgumentError, match="expert_ids"):
        run(a)
    assert len(machine.kernels) == 2


def test_a_repeat_loses_no_gradient_silently(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    run.known(a)
    a.q_weight.requires_grad_(True)
    args, kwargs = run.op.split(a)
    with torch.enable_grad(), pytest.raises(ArgumentError, match="requires grad"):
        run.run(*args, **kwargs)
    run(a)  # without grad mode the call is allowed
    assert run.checks == 2


def test_a_repeat_that_fails_goes_the_whole_way(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    run.known(a)
    machine.broken = True
    want = SHRINK.reference(a)
    assert torch.equal(run(a), want)
    assert run.checks == 3


def test_what_is_remembered_keeps_no_tensor_alive(machine):
    run, a = Checked(), SHRINK.sample_inputs(ROWS)
    run.known(a)
    run(a)
    assert run.checks == 2
    watched = [
        weakref.ref(v) for f in fields(a) if isinstance(v := getattr(a, f.name), torch.Tensor)
    ]
    del a
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


QKV = get_op("fused_qkv_paged")
PLAIN = AttentionCase("plain", hidden=256, head_dim=64, rope_style="half", rotary_dim=64, bias=True)


def test_what_is_not_measured_yet_is_not_repeated(machine):
    run, a = Checked(QKV), QKV.sample_inputs(PLAIN)
    for _ in range(3):
        run(replace(a, tune=True))
    assert run.checks == 3
    run.known(a)
    run(a)
    assert run.checks == 5


@pytest.mark.parametrize("projection", ["packed", "apart", "per_head", "grouped"])
def test_a_library_is_repeated_too(projection, monkeypatch):
    """Library calls are repeated, too. Without a record of the chip, calls use library GEMMs. A new
    x is at the old address."""
    machine = Interpreter(replace(SM90, features=frozenset()))
    monkeypatch.setattr(calls, "machine_of", lambda device: machine)
    heads = {"per_head": 4, "grouped": 2}.get(projection)
    case = PLAIN if heads is None else replace(PLAIN, num_kv_heads=heads, projection=projection)
    run, a = Checked(QKV), QKV.sample_inputs(case)
    if projection == "apart":
        a = replace(a, **{name: getattr(a, name).clone() for name in ("q_weight", "k_weight")})
    run.known(a)
    a.x.copy_(a.x.flip(0))
    again = replace(a, k_cache=a.k_cache.clone(), v_cache=a.v_cache.clone())
    q = run(a)
    assert run.checks == 2
    assert machine.kernels == ["qkv_epilogue"] * 3
    want = QKV.reference(again)
    for got, right in ((q, want), (a.k_cache, again.k_cache), (a.v_cache, again.v_cache)):
        assert plain.LIBRARY[got.dtype].problem(got, right) is None


def test_on_the_cpu_nothing_is_repeated():
    """On the CPU, values are checked in every call, so no call is recognised by its addresses."""
    checks = []
    op = replace(get_op("paged_kv_store"), validate_values=checks.append)
    run = calls.Calls(op, "cpu")
    args, kwargs = op.split(op.sample_inputs(AttentionCase("plain")))
    for count in range(1, 4):
        run(*args, **kwargs)
        assert len(checks) == count


@dataclass(frozen=True)
class SumArguments:
    xs: list[torch.Tensor]


def test_a_list_of_tensors_is_neither_kept_nor_taken_for_another(machine):
    """A call with a list of tensors is neither kept alive nor mistaken for another. A key that held
    the tensors would keep them alive. The op is a user's own."""

    def steps(a, target):
        out = yield Buffer.like(a.xs[0])
        yield Library(lambda out, *xs: out.copy_(sum(xs)), (out, *a.xs))
        return Outcome(out, "")

    checked = []
    op = FusedOp(
        name="sum_of",
        arguments=SumArguments,
        validate=checked.append,
        validate_values=lambda a: None,
        fake=lambda a: a.xs[0].new_empty(()),
        reference=lambda a: sum(a.xs),
        lowerings=(emitted_kernel(steps),),
        cases=(),
        sample_inputs=lambda case: None,
        tolerances={},
        error_model="",
    )
    run_op = calls.Calls(op, "cuda")
    xs = [torch.ones(2), torch.ones(2)]
    for factor in (1, 3, 5):
        assert run_op([xs[0], factor * xs[1]]).tolist() == [1.0 + factor] * 2
    assert len(checked) == 1
    checked.clear()
    watched = [weakref.ref(x) for x in xs]
    del xs
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
