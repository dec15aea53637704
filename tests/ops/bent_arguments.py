"""Calls every op with one wrong argument at a time, and checks what the call does.

    python tests/ops/bent_arguments.py --all              every op, every sample, every bend
    python tests/ops/bent_arguments.py --calls 3000       a seeded choice of them, every op in it

In a correct call, one argument of the op's schema is *bent*: replaced by a wrong one, of a kind
that depends on the argument's type. Such a call must work, or raise an error that names the op, the
argument, what was expected and what was given: ArgumentError, or an error of PyTorch's dispatcher
before it reaches the op. After an error, the memory of every argument must be unchanged. After a
call that works, only places that the op may write may have changed. Fake tensors must give the same
answer if only metadata is wrong. No call may take more than MEMORY or SECONDS. `main` prints the
failures and the number of calls.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._subclasses import FakeTensorMode

import tilewright.ops as functions
from tilewright.ops import ArgumentError, CacheWindow, contract

#: The address space that a call may use in addition to the address space that the process used
#: before the first call.
MEMORY = 512 * 2**20
#: The longest time that a call may take. The samples are small.
SECONDS = 10.0

ENTRIES = ("torch.ops", "function", "fake")
INTEGERS = (0, -1, 1, 3, 2**31 - 1, 2**31, 2**62, -(2**63), None, 1.5, "text")
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e308, 5e-324, None, "text", 2)
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8,
    torch.int32, torch.int64, torch.uint32, torch.bool, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip

Bend = tuple[str, Callable[[], Any]]


def integer_bends(value: Any) -> Iterator[Bend]:
    for bent in INTEGERS:
        yield repr(bent), lambda bent=bent: bent
    if isinstance(value, int):
        yield "one more", lambda: value + 1
        yield "twice", lambda: value * 2


def float_bends(value: Any) -> Iterator[Bend]:
    for bent in FLOATS:
        yield repr(bent), lambda bent=bent: bent


def bool_bends(value: Any) -> Iterator[Bend]:
    for bent in (not value, None, 2, "text"):
        yield repr(bent), lambda bent=bent: bent


def string_bends(value: Any) -> Iterator[Bend]:
    for bent in ("", "unknown", str(value).upper(), None, 7):
        yield repr(bent), lambda bent=bent: bent


def dtype_bends(value: Any) -> Iterator[Bend]:
    # A number that is no dtype is not tried, because PyTorch's dispatcher would look it up past the
    # end of its table.
    for bent in (*DTYPES, None, 5, "text"):
        yield repr(bent), lambda bent=bent: bent


def list_bends(value: Any) -> Iterator[Bend]:
    given = list(value or ())
    made = [None, [], [*given, 1], given[:-1], given * 2, 7, "text", [None], ["text"], [1.5]]
    for bent in made:
        yield repr(bent), lambda bent=bent: bent
    for place in range(len(given)):
        for item in (0, -1, 2**31, 2**62, -(2**63), given[place] * 2, given[place] + 1):
            bent = [*given[:place], item, *given[place + 1 :]]
            yield f"[{place}] = {item}", lambda bent=bent: bent


def tensor_bends(value: Any) -> Iterator[Bend]:
    for bent in (None, 3, 0.5, "text", [], True):
        yield repr(bent), lambda bent=bent: bent
    given = value
    if not isinstance(value, torch.Tensor):
        given = torch.ones(3)
        yield "a tensor", lambda: torch.ones(3)
        yield "an index", lambda: torch.zeros(3, dtype=torch.int64)
    for dtype in DTYPES:
        if dtype != given.dtype:
            yield f"{dtype}", lambda dtype=dtype: as_dtype(given, dtype)
    yield "on meta", lambda: given.to("meta")
    yield "unsqueezed first", lambda: given.unsqueeze(0)
    yield "unsqueezed last", lambda: given.unsqueeze(-1)
    yield "a number", lambda: torch.zeros((), dtype=given.dtype)
    yield "empty", lambda: torch.empty(0, dtype=given.dtype)
    yield "a list of tensors", lambda: [given]
    for axis in range(given.dim()):
        yield from axis_bends(given, axis)
    if given.dim() > 1:
        yield "flattened", lambda: given.flatten()
        yield "transposed", lambda: given.mT.contiguous().mT if given.numel() else given.mT
        yield "strided", lambda: strided(given)
    yield from content_bends(given)


def axis_bends(given: torch.Tensor, axis: int) -> Iterator[Bend]:
    yield f"first of axis {axis}", lambda: given.select(axis, 0) if given.shape[axis] else given
    yield f"axis {axis} empty", lambda: given.narrow(axis, 0, 0)
    yield f"axis {axis} shorter", lambda: given.narrow(axis, 0, max(given.shape[axis] - 1, 0))
    yield f"axis {axis} doubled", lambda: bytes_cat([given, given], axis)
    if given.shape[axis]:
        one = given.narrow(axis, 0, 1)
        yield f"axis {axis} of one", lambda: one
        yield f"axis {axis} expanded", lambda: one.expand(given.shape)


def content_bends(given: torch.Tensor) -> Iterator[Bend]:
    """Yields tensors of the same shape with other numbers. For indices, yields numbers that are no
    valid place."""
    if given.dtype in (torch.int32, torch.int64, torch.uint32):
        top = torch.iinfo(given.dtype).max
        for number in (0, 1, top) if given.dtype == torch.uint32 else (0, 1, -1, top, -top - 1):
            yield f"all {number}", lambda number=number: filled(given, number)
    elif given.is_floating_point() and given.element_size() > 1:
        for number in (0.0, float("nan"), float("inf")):
            yield f"all {number}", lambda number=number: filled(given, number)


def filled(given: torch.Tensor, number: float) -> torch.Tensor:
    return torch.full(given.shape, number, dtype=given.dtype)


def as_dtype(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return given.to(torch.float64).nan_to_num(1.0, 1.0, -1.0).clamp(-9, 9).to(dtype)


def bytes_cat(tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Computes torch.cat for every dtype. The CPU cannot join tensors of all dtypes."""
    dtype = tensors[0].dtype
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.cat([t.view(torch.uint8) for t in tensors], axis).view(dtype)
    if dtype == torch.uint32:
        return torch.cat([t.view(torch.int32) for t in tensors], axis).view(dtype)
    return torch.cat(tensors, axis)


def strided(given: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers as every other column of a tensor that is twice as wide."""
    wide = torch.empty(*given.shape[:-1], 2 * given.shape[-1], dtype=given.dtype)
    half = wide[..., ::2]
    half.copy_(given)
    return half


BENDS: dict[str, Callable[[Any], Iterator[Bend]]] = {
    "Tensor": tensor_bends,
    "int": integer_bends,
    "SymInt": integer_bends,
    "float": float_bends,
    "bool": bool_bends,
    "str": string_bends,
    "ScalarType": dtype_bends,
    "int[]": list_bends,
    "SymInt[]": list_bends,
    "float[]": list_bends,
}


def kinds(op: contract.FusedOp) -> dict[str, str]:
    """Returns the schema's name of each argument's type, without alias marks and `?`."""
    schema = op.declaration
    found = re.findall(r"(\w+)(?:\(\w!\))?(\[\])?\??(?:\(\w!\))? (\w+)(?=[=,)])", schema)
    return {name: kind + brackets for kind, brackets, name in found}


@dataclass(frozen=True)
class Bent:
    """A call to make, with `value()` in place of one argument."""

    op: contract.FusedOp
    case: Any
    entry: str
    argument: str
    label: str
    value: Callable[[], Any]

    @property
    def text(self) -> str:
        return f"{self.entry} {self.op.name} {self.case.name}: {self.argument} = {self.label}"


def given_arguments(op: contract.FusedOp, arguments: Any, entry: str) -> dict[str, Any]:
    """Returns a sample as keyword arguments of a way to call the op."""
    values = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    if entry != "function":
        return values
    if op.name == "lora_expand_add":
        for joint, suffix in (("bases", ""), ("weights", "_weight")):
            values[joint] = [values.pop(letter + suffix) for letter in "qkv"]
    if op.name in ("fused_qkv_paged", "paged_kv_store"):
        for name in ("k_window", "v_window"):
            values[name] = CacheWindow(*values[name]) if len(values[name]) else None
    return values


def function_of(op: contract.FusedOp) -> Callable[..., Any] | None:
    """Returns the function by which users call the op. Returns None if only graphs call the op."""
    return getattr(functions, op.name.removesuffix("_dense"), None)


def bent_calls(op: contract.FusedOp, case: Any, arguments: Any) -> Iterator[Bent]:
    types = kinds(op)
    for entry in ENTRIES:
        if entry == "function" and function_of(op) is None:
            continue
        for name, value in given_arguments(op, arguments, entry).items():
            kind = types.get(name, "Tensor")
            bends = list_bends if name in ("bases", "weights") else BENDS[kind]
            if isinstance(value, CacheWindow):
                value = value.to_ints()
            if name in ("bases", "weights"):
                made = (None, [], value[:2], [*value, None], 3, "text", value[0], [1, 2, 3])
                bends_of: Iterator[Bend] = ((repr(b)[:30], lambda b=b: b) for b in made)
            else:
                bends_of = bends(value)
            for label, thunk in bends_of:
                yield Bent(op, case, entry, name, label, thunk)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def snapshot(values: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns each storage among the values once, with a copy of it."""
    known = {}
    for tensor in tensors_in(values):
        if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes():
            known.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return [(raw(tensor), raw(tensor).clone()) for tensor in known.values()]


def changed(before: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the storages that have changed, after restoring them."""
    found = []
    for now, then in before:
        if not torch.equal(now, then):
            found.append((now.data_ptr(), now != then))
            now.copy_(then)
    return found


def writable(op: contract.FusedOp, values: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Returns, for each storage that the call may write, a mask of the bytes that it may write."""
    places: dict[int, torch.Tensor] = {}
    for name in op.mutated:
        base = values.get(name)
        if not isinstance(base, torch.Tensor) or base.device.type != "cpu":
            continue
        storage = base.untyped_storage()
        size = base.element_size()
        mask = torch.zeros(storage.nbytes() // size, dtype=torch.uint8)
        view = mask.as_strided(base.shape, base.stride(), base.storage_offset())
        if name == "blocks":
            view[:, :, values["layer_idx"]] = 1
        for window in windows_on(name, values):
            # A function may leave the window out, which stands for the whole cache.
            if window is None:
                view.fill_(1)
            else:
                window.view(view).fill_(1)
        bytes_ = mask.bool().repeat_interleave(size)
        known = places.get(storage.data_ptr())
        places[storage.data_ptr()] = bytes_ if known is None else known | bytes_
    return places


def windows_on(name: str, values: dict[str, Any]) -> Iterator[CacheWindow | None]:
    """Yields the windows of a call that lie on the cache called `name`."""
    pairs = {"k_cache": ("k", "v", "v_cache"), "latent_cache": ("latent", "rope", "rope_cache")}
    if name in pairs:
        first, second, other = pairs[name]
        letters = [first] if values.get(other) is not None else [first, second]
    else:
        letters = [name.removesuffix("_cache")]
    for letter in letters:
        window = values.get(f"{letter}_window")
        if window is None or isinstance(window, CacheWindow):
            yield window
        elif len(window) == 9:  # a window of another length is ignored or refused
            yield CacheWindow(*window)


class TooSlow(BaseException):
    """Raised if a call did not end within SECONDS."""


def alarmed(signum: int, frame: Any) -> None:
    raise TooSlow


@dataclass
class Outcome:
    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def frames(self) -> list[traceback.FrameSummary]:
        assert self.error is not None
        return traceback.extract_tb(self.error.__traceback__)


def attempt(call: Callable[[], Any]) -> Outcome:
    start = time.perf_counter()
    outcome = Outcome()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        outcome.result = call()
    except (Exception, TooSlow) as error:
        outcome.error = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.seconds = time.perf_counter() - start
    return outcome


def no_tensors(error: BaseException | None) -> bool:
    """Whether all tensors are None, so that PyTorch's dispatcher has no device by which to choose a
    kernel."""
    return isinstance(error, NotImplementedError) and "no tensor arguments" in str(error)


def unclear(bent: Bent, outcome: Outcome, names: set[str]) -> str | None:
    """Returns what an error does not name: the op, the argument, the expected value or the given
    value. Returns None if it names them all."""
    error = outcome.error
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, ArgumentError):
        ours = {bent.op.name, bent.op.name.removesuffix("_dense")}
        if error.op not in ours and bent.op.name not in error.op:
            return f"names another op: {text}"
        return None if error.argument in names else f"names no argument: {text}"
    # Users call an op by a function of its own, or as its record.
    wrappers = (getattr(function_of(bent.op), "__name__", None), "__call__")
    inside = any(
        "/ops/" in frame.filename and "/tests/" not in frame.filename and frame.name not in wrappers
        for frame in outcome.frames
    )
    dispatcher = (
        r"Expected a value of type '[^']+' for argument '\w+' but instead found type"
        r"|expected .*for argument|Unable to cast|missing value for argument|missing \d+ required"
    )
    if no_tensors(error) and bent.op.name in str(error):
        return None
    named = bent.argument in str(error) and bent.op.name in str(error)
    if not inside and isinstance(error, (TypeError, RuntimeError)) and named:
        return None if re.search(dispatcher, str(error)) else f"{text}"
    where = outcome.frames[-1]
    return f"{text[:300]} ({Path(where.filename).name}:{where.lineno})"


@dataclass
class Tally:
    """The counts and failures of a run."""

    calls: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[str]] = field(default_factory=dict)
    slowest: float = 0.0

    def fail(self, kind: str, text: str) -> None:
        self.failures.setdefault(kind, []).append(text)


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list):
        return [as_fake(mode, item) for item in value]
    return value


def invoke(bent: Bent, values: dict[str, Any]) -> Any:
    if bent.entry == "function":
        if bent.op.name == "mla_prefill_dense":
            values = {n: v for n, v in values.items() if not n.endswith(("_cache", "_window"))
                      or n == bent.argument}  # fmt: skip
        function = function_of(bent.op)
        assert function is not None
        return function(**values)
    return bent.op.torch_op(**values)


def faked(bent: Bent, values: dict[str, Any]) -> Outcome:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {name: as_fake(mode, value) for name, value in values.items()}
        return attempt(lambda: invoke(bent, given))


def judge(bent: Bent, arguments: Any, tally: Tally) -> None:
    """Makes a call, and records what is wrong with its effects."""
    values = given_arguments(bent.op, arguments, bent.entry)
    names = {*values, *kinds(bent.op)}
    value = bent.value()
    if isinstance(value, torch.Tensor) and value is values[bent.argument]:
        return
    values[bent.argument] = value
    before = snapshot(values.values())
    outcome = attempt(lambda: invoke(bent, values))
    tally.calls += 1
    tally.slowest = max(tally.slowest, outcome.seconds)
    written = changed(before)
    if isinstance(outcome.error, TooSlow):
        tally.fail("took too long", bent.text)
    elif outcome.error is not None:
        tally.outcomes["refused"] += 1
        problem = unclear(bent, outcome, names)
        if problem:
            tally.fail("unclear error", f"{bent.text}: {problem}")
        if written:
            tally.fail("a write before the error", f"{bent.text}: {first_line(outcome.error)}")
    else:
        tally.outcomes["accepted"] += 1
        places = writable(bent.op, values)
        for storage, bytes_ in written:
            allowed = places.get(storage)
            if allowed is None or bool((bytes_[: allowed.numel()] & ~allowed).any()):
                tally.fail("a write to another place", bent.text)
    if bent.entry == "fake":
        compare(bent, values, outcome, names, tally)


def compare(
    bent: Bent, values: dict[str, Any], real: Outcome, names: set[str], tally: Tally
) -> None:
    """Checks that fake tensors give the same answer, except for faults that only memory shows."""
    fake = faked(bent, values)
    if fake.error is not None:
        problem = unclear(bent, fake, names)
        if problem:
            tally.fail("unclear error, fake", f"{bent.text}: {problem}")
        elif no_tensors(real.error):
            return  # FakeTensorMode needs no device
        elif first_line(fake.error) != first_line(real.error):
            both = f"{first_line(fake.error)} / {first_line(real.error)}"
            tally.fail("fake and real differ", f"{bent.text}: {both}")
        return
    if real.error is not None:
        by_value = any(frame.name == "validate_values" for frame in real.frames)
        on_meta = isinstance(values[bent.argument], torch.Tensor) and bent.label == "on meta"
        if not by_value and not on_meta and isinstance(real.error, ArgumentError):
            tally.fail("fake and real differ", f"{bent.text}: accepted / {real.error}")
        return
    for made, expected in zip(results(fake), results(real), strict=True):
        if (made.dtype, made.shape, made.stride()) != (
            expected.dtype, expected.shape, expected.stride(),
        ):  # fmt: skip
            tally.fail("fake and real differ", f"{bent.text}: {made} / {list(expected.shape)}")


def first_line(error: BaseException | None) -> str:
    """Returns the first line of an error. PyTorch's errors continue with the value itself."""
    return str(error).splitlines()[0] if str(error) else ""


def results(outcome: Outcome) -> tuple[torch.Tensor, ...]:
    if outcome.result is None:
        return ()
    return outcome.result if isinstance(outcome.result, tuple) else (outcome.result,)


def chosen(calls: int | None, seed: int, only: str) -> Iterator[tuple[Any, list[Bent]]]:
    """Yields samples with the calls to make for each.

    `calls`: the number of calls for all ops together. An op's calls are drawn from as many of its
    cases. If it is None, every call of every case is made.
    """
    ops = [op for op in contract.all_ops() if op.namespace == "tilewright" and only in op.name]
    for op in ops:
        share = len(op.cases) if calls is None else -(-calls // len(ops))
        draw = random.Random(f"{seed} {op.name}")
        cases = draw.sample(op.cases, min(share, len(op.cases)))
        for place, case in enumerate(cases):
            arguments = op.sample_inputs(case)
            bents = list(bent_calls(op, case, arguments))
            if calls is not None:
                count = len(range(place, share, len(cases)))
                bents = draw.sample(bents, min(count, len(bents)))
            yield arguments, bents


def limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def run(calls: int | None, seed: int, only: str = "") -> Tally:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, alarmed)
    tally = Tally()
    with torch.no_grad():
        # A correct call comes first, so that its imports do not count for a bent call.
        faked_once(contract.get_op("paged_kv_store"))
        limit_memory()
        for arguments, bents in chosen(calls, seed, only):
            for bent in bents:
                judge(bent, arguments, tally)
    return tally


def faked_once(op: contract.FusedOp) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        op.call(op.sample_inputs(op.cases[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every bend of every sample")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="ops whose name has this")
    parser.add_argument("--show", type=int, default=20, help="failures printed of each kind")
    given = parser.parse_args()
    start = time.perf_counter()
    tally = run(None if given.all else given.calls, given.seed, given.only)
    for kind, texts in tally.failures.items():
        for text in texts[: given.show]:
            print(f"{kind}: {text}", file=sys.stderr)
    summary = {
        "calls": tally.calls,
        **tally.outcomes,
        "failures": {kind: len(texts) for kind, texts in tally.failures.items()},
        "slowest_seconds": round(tally.slowest, 2),
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(summary))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
