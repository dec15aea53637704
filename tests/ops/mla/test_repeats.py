"""MLA calls made again: every launch and library call of the first, over new memory."""

from __future__ import annotations

import pytest
import torch

from tests.mla_library import take_every_call
from tests.ops.test_contract import clone
from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import SM90
from tilewright.ops.contract import get_op
from tilewright.ops.mla import attention_lowering as mla_attention
from tilewright.ops.mla import cudnn as mla_attention_library
from tilewright.ops.mla import key_lowering as mla_key_kernels
from tilewright.ops.mla import lowering as mla_lowerings
from tilewright.ops.mla import query_lowering as mla_queries
from tilewright.ops.mla.cases import BranchCase, PrefillCase
from tilewright.ops.runtime.recording import note_launch

RUN = {
    "mla_prefill": mla_lowerings.repeatable_mla_prefill,
    "mla_prefill_dense": mla_lowerings.repeatable_mla_prefill,
    "mla_prefill_branch_fp8": mla_lowerings.repeatable_mla_branch,
    "mla_latent_store": mla_lowerings.repeatable_latent_store,
}
MODULES = (
    mla_attention, mla_attention_library, mla_key_kernels, mla_lowerings, mla_queries
)  # fmt: skip
# Keys from a static cache, whose rows past the last query are left out; from pages, ragged;
# a weight of codes made numbers; latents that are given; quantised latents.
CASES = [
    ("mla_prefill", "static_cache"),
    ("mla_prefill", "fp8_weight"),
    ("mla_prefill_dense", "codes"),
    ("mla_prefill_branch_fp8", "plain"),
]


def found(address, like, memory):
    """The tensor at an address, seen as `like`: in memory made since, or `like` itself."""
    if not isinstance(like, torch.Tensor):
        return address
    for whole in memory:
        start = whole.data_ptr()
        if start <= address < start + whole.nbytes:
            part = whole.view(-1).view(torch.uint8)[address - start :]
            part = part[: part.numel() // like.element_size() * like.element_size()]
            return part.view(like.dtype).as_strided(like.shape, like.stride(), None)
    assert address == like.data_ptr()
    return like


@pytest.fixture
def interpreted(monkeypatch):
    """Launches go to the interpreter; a repetition's addresses are found in what it allocated."""
    memory = []

    def launch(spec, grid, values, device):
        given = tuple(values[name] for name, _ in spec.signature)
        kernel = load_interpreted(spec)[grid]
        kernel(*given)

        def again(addresses):
            kernel(*(found(x, like, memory) for x, like in zip(addresses, given, strict=True)))

        note_launch(again, given)

    empty = torch.empty

    def kept(*args, **kwargs):
        memory.append(empty(*args, **kwargs))
        return memory[-1]

    monkeypatch.setattr(torch, "empty", kept)
    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
    for module in (mla_attention, mla_lowerings, mla_queries):
        monkeypatch.setattr(module, "device_target", lambda device: SM90)


def sample(op, name):
    return op.sample_inputs(next(case for case in op.cases if case.name == name))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_call_made_again_is_the_same_call_over_new_memory(name, case):
    op = get_op(name)
    check_made_again(op, sample(op, case))


ONE = {"new_tokens": (21,), "cached_tokens": (0,)}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mla_prefill", PrefillCase("joined", **ONE)),
        ("mla_prefill", PrefillCase("in a launch", **ONE, rope_on="k")),
        ("mla_prefill_branch_fp8", BranchCase("joined", **ONE, v_dim=32)),
    ],
    ids=["joined", "in a launch", "joined codes"],
)
def test_a_call_of_the_library_is_made_again(name, case, monkeypatch):
    """Joined keys are scratch: the library and a launch write them, the library reads them."""
    take_every_call(monkeypatch)
    op = get_op(name)
    check_made_again(op, op.sample_inputs(case))


def check_made_again(op, a):
    name = op.name
    args, kwargs = op.split(a)
    first, again = RUN[name](*args, **kwargs)
    assert again is not None
    kept = first.clone()
    a.q.mul_(0.5)
    if args[1].is_floating_point() and args[1].itemsize > 1:
        args[1].mul_(-1)
    second = again(*args, **kwargs)
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)
    written = {n: t.clone() for n in op.mutated if (t := getattr(a, n)) is not None}
    whole, _ = RUN[name](*args, **kwargs)
    assert torch.equal(second, whole)
    for n, tensor in written.items():
        assert torch.equal(tensor, getattr(a, n))


@pytest.mark.usefixtures("interpreted")
def test_a_store_made_again_writes_what_the_latents_are_then():
    op = get_op("mla_latent_store")
    a = op.sample_inputs(op.cases[0])
    args, kwargs = op.split(a)
    result, again = RUN[op.name](*args, **kwargs)
    assert result is None
    a.latent.mul_(0.5).add_(1.0)
    expected = clone(a)
    op.reference(expected)
    assert again(*args, **kwargs) is None
    problem = op.tolerances[a.latent_cache.dtype].problem(a.latent_cache, expected.latent_cache)
    assert problem is None, problem


@pytest.mark.usefixtures("interpreted")
def test_chunks_are_not_kept_to_be_made_again():
    op = get_op("mla_prefill_branch_fp8")
    args, kwargs = op.split(sample(op, "chunks"))
    assert RUN[op.name](*args, **kwargs)[1] is None
