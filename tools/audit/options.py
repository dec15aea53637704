"""A published model's projection with one option at a time, as kernels for the audits."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.qkv.specs import Norm, PageTable, QkvProblem, WeightStrides


def option_problems(plain: QkvProblem) -> dict[str, QkvProblem]:
    """`plain`, which has heads in a row, a rope and no norm, with each option, by its name."""
    finish = plain.finish
    dim, dtype = finish.head_dim, finish.dtype
    assert finish.rope is not None
    rope = replace(finish.rope, style="interleaved_to_half", rotary_dim=dim // 2)
    ragged = PageTable(True, "u32", "u32", 1, 1, search_steps=7)
    finishes = {
        "fp8 cache": {"cache_dtype": "fp8e4nv", "cache_scales": (1, 1)},
        "fp8 cache, multiplied": {
            "cache_dtype": "fp8e5",
            "cache_scales": (0, 0),
            "scale_multiplies": True,
        },
        "ragged": {"table": ragged, "slot_dtype": "u32"},
        "ragged, many sequences": {"table": replace(ragged, search_steps=10), "slot_dtype": "u32"},
        "block table": {
            "table": PageTable(False, "i32", "i64", 1, 1),
            "slot_dtype": "i32",
            "wrap_negative": True,
        },
        "layer norm": {"norms": (dtype, dtype), "norm": Norm(kind="layer")},
        "norm after rope": {"norms": (dtype, dtype), "norm": Norm(after_rope=True, offset=1.0)},
        "norm of rows": {"norms": (dtype, dtype), "norm": Norm(row=True, strides=(dim, dim))},
        "delta": {"delta": (plain.num_rows, dtype)},
        "kv heads repeated": {"kv_repeat": 4, "clip": 8.0},
        "interleaved to half": {"rope": rope},
    }
    problems = {
        name: replace(plain, finish=replace(finish, **changes))  # type: ignore[arg-type]
        for name, changes in finishes.items()
    }
    n_major = WeightStrides(dim, 1, plain.num_rows)
    problems["n-major"] = replace(plain, weight_strides=(n_major,) * 3)
    return problems | {"grouped q": _grouped(plain)}


def _grouped(plain: QkvProblem) -> QkvProblem:
    """The q heads of each kv head beside its k and v, in one tensor."""
    finish, hidden = plain.finish, plain.hidden
    group = finish.num_heads // finish.num_kv_heads
    head = finish.head_dim * hidden
    q = WeightStrides(head, hidden, group=(group + 2) * head)
    kv = WeightStrides((group + 2) * head, hidden)
    return replace(plain, weight_strides=(q, kv, kv), finish=replace(finish, group=group))
