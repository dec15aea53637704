"""Tests that a product over a single column becomes an elementwise product after matching."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

from tests.compiler.running import through
from tests.found import patterns_in
from tests.generated_code import generated_code
from tests.models.hf import build_hf
from tilewright.compiler import lower
from tilewright.compiler.rewrite.single_columns import multiply_single_columns

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BATCH, ROWS, COLUMNS = 2, 8, 5
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
found: list[tuple[int, list[str]]] = []


def compiled(step):
    """Returns the step, compiled after its products were rewritten. Adds to `found` the number of
    rewritten products, and the names of the products that are left."""

    def backend(gm, inputs):
        count = through(multiply_single_columns, gm)
        targets = [str(n.target) for n in gm.graph.nodes]
        found.append((count, [t for t in targets if "matmul" in t or t.endswith("mm")]))
        return gm.forward

    found.clear()
    return torch.compile(step, backend=backend)


def factors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(BATCH, ROWS, 1, generator=generator)
    b = torch.randn(BATCH, 1, COLUMNS, generator=generator)
    return (1000 * a).to(dtype), b.to(dtype)


def by_operator(a, b):
    return a @ b


def by_function(a, b):
    return torch.matmul(a, other=b)


def by_method(a, b):
    return a.matmul(b)


def by_bmm(a, b):
    return torch.bmm(input=a, mat2=b)


def by_mm(a, b):
    return torch.mm(a[0], mat2=b[1])


def by_overload(a, b):
    return torch.ops.aten.bmm.default(a, b)


def of_a_matrix_and_a_stack(a, b):
    return a[0] @ b


def of_more_stacks(a, b):
    return a[:, None] @ b


def of_expanded_frequencies(a, b):
    """Computes the angles of a rotary embedding as transformers does."""
    frequencies = a[:1].expand(BATCH, -1, 1)
    return torch.cat(((frequencies @ b).transpose(1, 2),) * 2, -1).cos()


def of_transposed_factors(a, b):
    return b.transpose(1, 2) @ a.transpose(1, 2)


def written_afterwards(a, b):
    product = a @ b
    product[:, 0] = 3.0
    return product, a * 2


TAKEN = [by_operator, by_function, by_method, by_bmm, by_mm, by_overload, of_a_matrix_and_a_stack,
         of_more_stacks, of_expanded_frequencies, of_transposed_factors,
         written_afterwards]  # fmt: skip


def tensors(made):
    return made if isinstance(made, tuple) else (made,)


def same(ours, eager):
    for one, other in zip(tensors(ours), tensors(eager), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", TAKEN, ids=lambda step: step.__name__)
def test_bits_dtype_and_strides_stay(step, dtype):
    given = factors(dtype)
    ours = compiled(step)(*given)
    assert found == [(1, [])]
    same(ours, step(*given))


@pytest.mark.parametrize("step", TAKEN, ids=lambda step: step.__name__)
def test_sizes_that_are_symbols_stay_symbols(step):
    """One graph serves all numbers of sequences, rows and tokens, as it does without the
    rewrite."""
    forward = compiled(step)
    for rows, columns in ((8, 5), (3, 9), (6, 6)):
        a, b = torch.randn(BATCH, rows, 1), torch.randn(BATCH, 1, columns)
        torch._dynamo.mark_dynamic(a, 1)
        torch._dynamo.mark_dynamic(b, 2)
        same(forward(a, b), step(a, b))
    assert found == [(1, [])]


def of_two_columns(a, b):
    return a.view(BATCH, -1, 2) @ b.expand(-1, 2, -1)


def of_vectors(a, b):
    return a[0] @ b[0, :, 0]


def of_integers(a, b):
    return a.long() @ b.long()


def into_a_given_tensor(a, b):
    room = torch.empty(BATCH, ROWS, COLUMNS)
    return torch.bmm(a, b, out=room), room


def inside_of_vmap(a, b):
    return torch.vmap(torch.mm)(a, b)


def under_autocast(a, b):
    with torch.autocast("cpu", torch.bfloat16):
        return a @ b


STAY = [of_two_columns, of_vectors, of_integers, into_a_given_tensor, inside_of_vmap,
        under_autocast]  # fmt: skip


@pytest.mark.parametrize("step", STAY, ids=lambda step: step.__name__)
def test_other_products_stay(step):
    given = factors()
    ours = compiled(step)(*given)
    assert [count for count, _ in found] == [0]
    same(ours, step(*given))


def test_a_result_with_other_strides_stays():
    """If a stack of matrices is not contiguous, an elementwise product would have the memory order
    of its factors, so the product stays."""
    a = torch.randn(3, BATCH, ROWS, 1).transpose(0, 1)
    b = torch.randn(3, BATCH, 1, COLUMNS).transpose(0, 1)
    ours = compiled(by_operator)(a, b)
    assert [count for count, _ in found] == [int((a * b).stride() == (a @ b).stride())] == [0]
    same(ours, a @ b)


def test_a_number_of_rows_that_data_decide_stays():
    def step(a, b, mask):
        return a[0][mask] @ b[0]

    mask = torch.arange(ROWS) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compiled(step)(*factors(), mask)
    assert [count for count, _ in found] == [0]
    same(ours, step(*factors(), mask))


class OldRotaryEmbedding(nn.Module):
    """The rotary embedding of transformers 5.17, which is a product of matrices."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.register_buffer("inv_freq", own.inv_freq)

    def forward(self, x, position_ids, **others):
        frequencies = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def with_old_rotary_embedding(model):
    model.model.rotary_emb = OldRotaryEmbedding(model.model.rotary_emb)


@pytest.mark.parametrize(
    ("name", "phase", "patterns"),
    [("llama", "decode", ["qkv_cache"]), ("deepseek_v3", "prefill", ["mla_latent_store"])],
)
def test_a_rotary_embedding_is_fused_and_has_no_product_of_matrices(name, phase, patterns):
    case = build_hf(name, phase=phase, prepare=with_old_rotary_embedding, num_hidden_layers=1)
    (graph,) = lower(case.model, case.args, case.kwargs).graphs
    assert set(patterns_in(graph, "qkv", "mla")) >= set(patterns)
    before, after = (
        [n for n in module.graph.nodes if n.target is operator.matmul] for module in graph.modules
    )
    assert len(before) == 1
    assert after == []


def test_inductor_computes_the_angles_in_one_kernel_with_cosine_and_sine():
    def backend(gm, inputs):
        assert through(multiply_single_columns, gm) == 1
        return compile_fx(gm, inputs)

    rotary = OldRotaryEmbedding(SimpleNamespace(inv_freq=torch.rand(ROWS)))
    given = torch.zeros(1, dtype=torch.bfloat16), torch.arange(COLUMNS)[None]
    codes = []
    for how in ("inductor", backend):
        torch._dynamo.reset()
        codes.append(generated_code(torch.compile(rotary, backend=how), *given))
    assert ["bmm" in code for code in codes] == [True, False]
