"""Mixtures that send every token through every expert, spelling by spelling.

module, args = build("bmm_output")          # one of SPELLINGS, or of NEAR_MISSES
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

T, E, S, H, INNER = 12, 4, 2, 64, 32


class Dense(nn.Module):
    """A mixture with weights gate_up [E, H, 2I] and down [E, I, H]. `step` computes it."""

    def __init__(self, step, num_slots):
        super().__init__()
        self.step, self.num_slots = step, num_slots
        generator = torch.Generator().manual_seed(0)

        def random(*shape, scale):
            values = torch.randn(shape, generator=generator) * scale
            return nn.Parameter(values.bfloat16(), requires_grad=False)

        self.router = random(E, H, scale=0.3)
        self.gate_up = random(E, H, 2 * INNER, scale=H**-0.5)
        self.down = random(E, INNER, H, scale=INNER**-0.5)
        self.gate_up_bias = random(E, 2 * INNER, scale=0.1)
        self.down_bias = random(E, H, scale=0.1)

    def forward(self, x):
        logits = F.linear(x, self.router)
        return self.step(self, x, logits, *logits.float().softmax(-1).topk(self.num_slots, -1))


def act(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def experts(m, x):
    """Computes all experts for x [T, H]. Returns [E, T, H]."""
    return torch.bmm(act(torch.bmm(x.expand(E, -1, -1), m.gate_up)), m.down)


def scattered(x, weights, ids):
    return torch.zeros(x.shape[0], E, dtype=weights.dtype).scatter(1, ids, weights)


def bmm_output(m, x, logits, weights, ids):
    scores = scattered(x, weights, ids)
    return (experts(m, x) * scores.T[:, :, None]).sum(0).to(x.dtype)


def bmm_in_place(m, x, logits, weights, ids):
    scores = torch.zeros_like(logits).scatter_(1, ids, weights.to(logits.dtype))
    return (experts(m, x) * scores.t().unsqueeze(-1)).sum(dim=0)


def bmm_biases(m, x, logits, weights, ids):
    h = act(torch.bmm(x.expand(E, -1, -1), m.gate_up) + m.gate_up_bias[:, None])
    y = torch.bmm(h, m.down) + m.down_bias[:, None, :]
    return (y * scattered(x, weights, ids).T[:, :, None]).sum(0).to(x.dtype)


def sigmoid_of_chosen(m, x, logits, weights, ids):
    top, ids = logits.topk(m.num_slots, -1)
    scores = torch.full_like(logits, float("-inf")).scatter(1, ids, top).float().sigmoid()
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def softmax_of_chosen(m, x, logits, weights, ids):
    top, ids = logits.topk(m.num_slots, -1)
    scores = torch.full_like(logits, float("-inf")).scatter(1, ids, top).float().softmax(-1)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def llama4(m, x, logits, weights, ids):
    top, ids = torch.topk(logits, m.num_slots, dim=1)
    scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, top)
    scores = torch.sigmoid(scores.float()).to(x.dtype)
    routed = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
    both = torch.bmm(routed.view(E, -1, H), m.gate_up)
    gate, up = both.chunk(2, dim=-1)
    y = torch.bmm(up * F.silu(gate), m.down).view(-1, H)
    return y.reshape(E, -1, H).sum(dim=0)


def llama4_shared(m, x, logits, weights, ids):
    out = x * 2
    out.add_(llama4(m, x, logits, weights, ids))
    return out


#: For each name: (step, slots).
SPELLINGS = {
    f.__name__: (f, S)
    for f in (
        bmm_output, bmm_in_place, bmm_biases, sigmoid_of_chosen, softmax_of_chosen,
    )
} | {"llama4": (llama4, 1), "llama4_shared": (llama4_shared, 1)}  # fmt: skip


# --- near misses ----------------------------------------------------------------------------------


def soft(m, x, logits, weights, ids):
    scores = logits.float().softmax(-1)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def not_from_zero(m, x, logits, weights, ids):
    scores = torch.full((x.shape[0], E), 0.1).scatter(1, ids, weights)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def sigmoid_of_zeros(m, x, logits, weights, ids):
    scores = scattered(x, weights, ids).sigmoid()
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def softmax_over_tokens(m, x, logits, weights, ids):
    scores = torch.full_like(logits, float("-inf")).scatter(1, ids, 1.0).float().softmax(0)
    return (experts(m, x) * (scores).T[..., None]).sum(0).to(x.dtype)


def shifted(m, x, logits, weights, ids):
    scores = scattered(x, weights, ids) + 0.01
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def maybe_twice(m, x, logits, weights, ids):
    ids = (ids * 3) % E
    scores = scattered(x, weights, ids)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def inverted(m, x, logits, weights, ids):
    chosen = F.one_hot(ids, E).sum(1) > 0
    scores = logits.float().softmax(-1).masked_fill(chosen, 0.0)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def over_tokens(m, x, logits, weights, ids):
    scores = scattered(x, weights, ids)
    return (experts(m, x) * scores.T[..., None]).sum(1).to(x.dtype)


def other_experts(m, x, logits, weights, ids):
    """Takes the experts in the second product in another order than in the first."""
    h = act(torch.bmm(x.expand(E, -1, -1), m.gate_up))
    y = torch.bmm(h.flip(0), m.down)
    return (y * scattered(x, weights, ids).T[..., None]).sum(0).to(x.dtype)


def tokens_for_experts(m, x, logits, weights, ids):
    """Exchanges the dimensions of tokens and experts between the products. Both dimensions have the
    same size."""
    x = x[:E]
    h = act(torch.bmm(x.expand(E, -1, -1), m.gate_up))
    y = torch.bmm(h.transpose(0, 1), m.down)
    return (y * scattered(x, weights[:E], ids[:E]).T[..., None]).sum(0).to(x.dtype)


def scores_not_transposed(m, x, logits, weights, ids):
    x = x[:E]
    return (experts(m, x) * scattered(x, weights[:E], ids[:E])[..., None]).sum(0).to(x.dtype)


def scattered_along_tokens(m, x, logits, weights, ids):
    scores = torch.zeros(x.shape[0], E).scatter(0, ids, weights)
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def written_again(m, x, logits, weights, ids):
    scores = torch.zeros(x.shape[0], E).scatter_(1, ids, weights)
    scores[:, 0] = 0.5
    return (experts(m, x) * scores.T[..., None]).sum(0).to(x.dtype)


def weighed_hidden(m, x, logits, weights, ids):
    h = act(torch.bmm(x.expand(E, -1, -1), m.gate_up))
    y = torch.bmm(h * scattered(x, weights, ids).T[..., None].to(x.dtype), m.down)
    return y.sum(0)


def unknown_activation(m, x, logits, weights, ids):
    h = torch.sin(torch.bmm(x.expand(E, -1, -1), m.gate_up))[..., :INNER]
    return (torch.bmm(h, m.down) * scattered(x, weights, ids).T[..., None]).sum(0).to(x.dtype)


def capacity(m, x, logits, weights, ids):
    """Uses a buffer of C places for each expert, as GShard does."""
    hits = F.one_hot(ids[:, 0], E)
    place = (hits.cumsum(0) * hits).sum(-1) - 1
    dispatch = hits[:, :, None].to(x.dtype) * F.one_hot(place, T)[:, None].to(x.dtype)
    rows = torch.einsum("tec,th->ech", dispatch, x)
    y = torch.bmm(act(torch.bmm(rows, m.gate_up)), m.down)
    return torch.einsum("tec,ech->th", dispatch * weights[:, :1, None].to(x.dtype), y)


def read_elsewhere(m, x, logits, weights, ids):
    y = experts(m, x)
    out = (y * scattered(x, weights, ids).T[..., None]).sum(0).to(x.dtype)
    return out, y[0]


def llama4_with_bias(m, x, logits, weights, ids):
    """Multiplies the input by the score. Because of the bias, a score of zero does not make the
    result zero."""
    top, ids = torch.topk(logits, m.num_slots, dim=1)
    scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, top).sigmoid()
    routed = (x.repeat(E, 1) * scores.T.reshape(-1, 1)).view(E, -1, H)
    return (torch.bmm(act(torch.bmm(routed, m.gate_up)), m.down) + m.down_bias[:, None]).sum(0)


def weights_by_a_list(m, x, logits, weights, ids):
    h = act(torch.bmm(x.expand(E, -1, -1), m.gate_up))
    y = torch.bmm(h, m.down[[1, 0, 2, 3]])
    return (y * scattered(x, weights, ids).T[..., None]).sum(0).to(x.dtype)


def bias_from_a_product(m, x, logits, weights, ids):
    """Adds a projection of the first token to the rows of all tokens."""
    first = F.linear(x[:1], m.gate_up[0].T)
    both = torch.bmm(x.expand(E, -1, -1), m.gate_up) + first[None]
    return (torch.bmm(act(both), m.down) * scattered(x, weights, ids).T[..., None]).sum(0)


#: For each function: (code, slots).
NEAR_MISSES = {
    bias_from_a_product: ("EXPERT_ACTIVATION", S),
    soft: ("EXPERT_SCORES", S),
    not_from_zero: ("EXPERT_SCORES", S),
    sigmoid_of_zeros: ("EXPERT_SCORES", S),
    softmax_over_tokens: ("EXPERT_SCORES", S),
    shifted: ("EXPERT_SCORES", S),
    maybe_twice: ("EXPERT_SCORES", S),
    inverted: ("EXPERT_SCORES", S),
    scores_not_transposed: ("EXPERT_SCORES", S),
    scattered_along_tokens: ("EXPERT_SCORES", S),
    written_again: ("EXPERT_SCORES", S),
    capacity: ("EXPERT_COMBINE", S),
    over_tokens: ("EXPERT_COMBINE", S),
    read_elsewhere: ("EXPERT_COMBINE", S),
    weighed_hidden: ("EXPERT_ACTIVATION", S),
    other_experts: (None, S),
    tokens_for_experts: ("EXPERT_ACTIVATION", S),
    unknown_activation: ("EXPERT_ACTIVATION", S),
    llama4: ("UNSUPPORTED", S),
    weights_by_a_list: ("EXPERT_WEIGHT", S),
    llama4_with_bias: ("EXPERT_SCORES", 1),
}


def build(step, num_slots):
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    return Dense(step, num_slots).eval(), (x,)
