"""Tests a user's own Triton kernel next to the cache writes.

torch's analysis of the kernel finds what it reads and writes, and no write is moved past it.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.agreement import flat
from tests.compiler.steps import Layer, make_args, store
from tilewright.compiler import reports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@triton.jit
def halve(pointer, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(pointer + at, mask=at < count)
    tl.store(pointer + at, values * 0.5, mask=at < count)


@triton.jit
def copy_half(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < count)
    tl.store(target + at, values * 0.5, mask=at < count)


@triton.autotune([triton.Config({"BLOCK": 128})], key=["count"], restore_value=["pointer"])
@triton.jit
def halve_tuned(pointer, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(pointer + at, mask=at < count)
    tl.store(pointer + at, values * 0.5, mask=at < count)


def halved(t):
    halve[(triton.cdiv(t.numel(), 128),)](t, t.numel(), BLOCK=128)
    return t.sum() * 0


def halved_tuned(t):
    halve_tuned[lambda meta: (triton.cdiv(t.numel(), meta["BLOCK"]),)](t, t.numel())
    return t.sum() * 0


def read(t):
    out = torch.empty_like(t)
    copy_half[(triton.cdiv(t.numel(), 128),)](t, out, t.numel(), BLOCK=128)
    return out


OPERANDS = {
    "x": lambda x, k_cache, v_cache: x,
    "k_cache": lambda x, k_cache, v_cache: k_cache,
    "v_cache": lambda x, k_cache, v_cache: v_cache,
    "half_of_k_cache": lambda x, k_cache, v_cache: k_cache[:3],
}


def step_with(statement, operand, place):
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        seen = []
        for at, store_next in enumerate(
            (lambda: store(k_cache, slots, k), lambda: store(v_cache, slots, v), lambda: None)
        ):
            if at == place:
                seen.append(statement(OPERANDS[operand](x, k_cache, v_cache)))
            store_next()
        return q * 2, seen[0]

    return step


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("place", range(3), ids=["before", "between", "after"])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("statement", [halved, halved_tuned, read])
def test_nothing_moves_past_a_users_kernel(statement, operand, place, inner):
    layer = Layer(step_with(statement, operand, place)).cuda()
    theirs, mine = ([t.cuda() for t in make_args()] for _ in range(2))
    expected = layer(*theirs)
    actual = torch.compile(layer, backend="tilewright", options={"inner": inner})(*mine)
    for a, b in zip(flat([actual, *mine]), flat([expected, *theirs]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    patterns = [site.pattern for report in reports() for site in report.matches]
    reads_x_alone = statement is read and operand == "x"
    of_a_cache_before = place == 0 and operand != "x"
    # The fused op writes K later than the graph does. A reader of V's cache between the writes
    # cannot see the difference.
    reads_v_between = statement is read and operand == "v_cache"
    may_fuse = place == 2 or of_a_cache_before or reads_x_alone or reads_v_between
    assert ("qkv_cache" in patterns) == may_fuse
