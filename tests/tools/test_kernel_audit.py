"""Tests the audit of a report's kernels: its outcomes are in order, and a failed compilation is an
outcome, too."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from tilewright.codegen.audit import Audit
from tilewright.codegen.build import BuildError
from tilewright.codegen.targets import SM90, SM100
from tilewright.tools.kernel_audit import audit_kernels, expectations
from tilewright.tools.report.text_report import kernel_table, render, render_kernels

FACTS = {
    "kernel": "k",
    "sm_target": "sm_100a",
    "triton": "3.7.1",
    "ptxas": "12.9",
    "instructions": 500,
    "registers": 90,
    "stack_bytes": 0,
    "shared_bytes": 1024,
    "tmem_columns": 64,
    "num_warps": 4,
    "warp_specialized": False,
    "global_scratch_bytes": 0,
    "opcodes": {"UTCHMMA": 4, "LDTM": 1},
    "main_loop": {"UTCHMMA": 4},
    "looped_spills": 0,
    "mma_kinds": ("kind::f16",),
    "staged_bytes": 1024,
    "dead_barriers": 0,
    "repeating_products": 0,
    "is_trap": False,
}


@dataclass(frozen=True)
class FakeKernel:
    """Stands for a report's Kernel. `changes` are facts that differ from FACTS."""

    name: str
    changes: tuple = ()
    error: str = ""
    source: str = "acc = tl.dot(a, b, acc)"
    dtype: str = "bf16"
    constants: tuple = ()

    @property
    def spec(self):
        return SimpleNamespace(
            constants=self.constants,
            name=self.name,
            signature=(("n", "i32"), ("x_ptr", f"*{self.dtype}")),
        )

    def build(self, target):
        if self.error:
            raise BuildError(self.error)
        return SimpleNamespace(audit=Audit(**{**FACTS, **dict(self.changes)}))


GOOD = FakeKernel("good")
SPILLS = FakeKernel("spills", (("stack_bytes", 64), ("main_loop", {"UTCHMMA": 4, "STL": 2})))
SLOW = FakeKernel("slow", (("opcodes", {"HMMA": 8}), ("main_loop", {"HMMA": 8})))
BROKEN = FakeKernel("broken", error="Triton did not compile the kernel:\nline 7: no such layout")


def test_outcomes_keep_the_order_and_name_every_broken_rule():
    calls = []
    kernels = [SPILLS, GOOD, BROKEN, SLOW]
    outcomes = audit_kernels(kernels, "sm100", done=lambda: calls.append(1))
    assert [o.kernel for o in outcomes] == kernels
    assert len(calls) == 4
    assert [o.good for o in outcomes] == [False, True, False, False]
    assert [p.split(":")[0] for p in outcomes[0].problems] == ["stack", "spills"]
    assert [p.split(":")[0] for p in outcomes[3].problems] == [
        "tensor core",
        "no legacy tensor core",
    ]


def test_a_kernel_that_does_not_compile_is_an_outcome():
    (outcome,) = audit_kernels([BROKEN], "sm100")
    assert outcome.as_dict() == {
        "audit": None,
        "problems": [],
        "notes": [],
        "error": BROKEN.error,
    }


def test_json_of_an_outcome_has_the_facts():
    (outcome,) = audit_kernels([SPILLS], "sm100")
    facts = outcome.as_dict()["audit"]
    assert facts["registers"] == 90
    assert facts["mma"] == {"UTCHMMA": 4}
    assert len(outcome.as_dict()["problems"]) == 2


def test_nvfp4_that_falls_back_to_bf16_is_no_nvfp4():
    """NVFP4 that is multiplied as bf16 does not count as NVFP4. Both SLOW and GOOD multiply bf16. A
    compiler may do so for block scales that it cannot place."""
    codes = {"dtype": "u8", "constants": (("BLOCK_SCALED", False), ("SWAPPED", False))}
    for kernel in (GOOD, SLOW):
        (outcome,) = audit_kernels([replace(kernel, **codes)], "sm100")
        assert "tensor core: expected UTCOMMA for nvfp4" in outcome.problems[0]
    assert expectations(replace(GOOD, **codes), SM90).mma == "bf16"


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="target: expected one of"):
        audit_kernels([GOOD], "sm70")


@pytest.mark.parametrize(
    ("kernel", "mma"),
    [
        (GOOD, "bf16"),
        (FakeKernel("stores", source="tl.store(p, x)"), None),
        (FakeKernel("fp32", dtype="fp32"), None),  # no tensor-core path is meant for this dtype
    ],
)
def test_only_a_kernel_that_multiplies_must_use_the_tensor_cores(kernel, mma):
    assert expectations(kernel, SM100).mma == mma
    assert expectations(kernel, SM90).mma == mma


def test_a_short_tile_may_use_the_older_tensor_core():
    kernels = [replace(SLOW, constants=(("BLOCK_P", rows),)) for rows in (16, 32)]
    short, tall = audit_kernels(kernels, "sm100")
    assert short.problems == ()
    assert len(tall.problems) == 2


def test_a_router_may_have_short_tiles_and_a_float32_weight():
    for rows, widened, problems in ((16, False, 0), (128, False, 2), (128, True, 0)):
        router = replace(SLOW, constants=(("BLOCK_T", rows), ("WIDENED", widened)))
        (outcome,) = audit_kernels([router], "sm100")
        assert len(outcome.problems) == problems


def test_warp_specialisation_keeps_a_little_on_the_stack():
    small = FakeKernel("small", (("stack_bytes", 8),))
    specialised = replace(small, constants=(("WARP_SPECIALIZE", True),))
    outcomes = audit_kernels([small, specialised], "sm100")
    assert [o.good for o in outcomes] == [False, True]


def printed(renderable) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_table_shows_limits_and_what_does_not_compile():
    text = printed(kernel_table(audit_kernels([GOOD, BROKEN], "sm100"), SM100))
    assert "of 232448" in text
    good = next(line for line in text.splitlines() if line.startswith("good"))
    assert good.split() == ["good", "UTCHMMA", "x4", "90", "0", "0", "1024", "64", "4", "kept"]
    assert "does not compile" in next(x for x in text.splitlines() if x.startswith("broken"))


def test_a_note_stands_in_the_table_under_it_and_in_the_json():
    spills = (("stack_bytes", 8), ("opcodes", {"UTCHMMA": 4, "STL": 2, "LDL": 2}))
    (outcome,) = audit_kernels([FakeKernel("noted", spills)], "sm100")
    assert outcome.good
    assert outcome.as_dict()["notes"] == list(outcome.notes)
    row, note = printed(render_kernels([outcome], "sm100")).splitlines()[2:4]
    assert row.split()[-1] == "note"
    assert note.strip().startswith("noted: note: stack: 8 bytes of registers are spilled")


def test_problems_stand_under_the_table():
    lowered = SimpleNamespace(graphs=(), matches=[], misses=[], notes=["a note"], target="sm100")
    text = printed(render("mine", lowered, audit_kernels([SLOW, BROKEN], "sm100"), 100))
    assert "slow: no legacy tensor core: older tensor-core opcodes in the main loop" in text
    assert "broken: line 7: no such layout" in text
    assert "note: a note" in text
