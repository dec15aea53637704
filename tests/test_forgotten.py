"""What a new op, pattern, kernel or family still lacks, each with the file and what to add there.

Other tests hold what is there; these say what is not. CONTRIBUTING.md has the whole list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tilewright.codegen.targets import FAMILIES
from tilewright.ops.contract import all_ops
from tilewright.patterns import language
from tilewright.patterns.hints import HINTED
from tilewright.patterns.language import CODES
from tilewright.tools.audit import families as audits
from tilewright.tools.report.miss_guide import miss_guide

ROOT = Path(__file__).resolve().parents[1]
NET = Path(__file__).parent / "tilewright_snapshots" / "test_kernel_net"
# Taken when the tests are collected: no test has added a pattern or a code by then.
OWN_CODES = dict(CODES)
OWN_PATTERNS = [
    p.name for p in language.registered() if type(p).__module__.startswith("tilewright.")
]
#: A pattern that another one's section describes.
DESCRIBED_WITH = {
    "cache_absent": "qkv_cache",
    "moe_dense": "moe",
    "grouped_gemm_nvfp4": "grouped_gemm",
}
FLOORS = ("codegen", "ops", "patterns")  # a family's kernels may be tested with its ops


def unregistered(floor: Path) -> list[str]:
    """Files of `ops/` or `patterns/` that register something and that `__init__.py` leaves out."""
    imported = _imports(floor / "__init__.py")
    said = []
    for path in sorted(floor.rglob("*.py")):
        module = ".".join(
            ("tilewright", floor.name, *path.relative_to(floor).with_suffix("").parts)
        )
        if _registers(path) and module not in imported:
            said.append(f"{floor.name}/__init__.py: import {module}, which registers itself")
    return said


def _registers(path: Path) -> bool:
    statements = ast.parse(path.read_text("utf-8")).body
    calls = (getattr(statement, "value", None) for statement in statements)
    names = (ast.unparse(call.func) for call in calls if isinstance(call, ast.Call))
    return any(name in ("register", "contract.register", "language.register") for name in names)


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def undescribed(patterns: Iterable[str], page: str) -> list[str]:
    """Patterns without a section, or an example, in docs/patterns.md."""
    said = []
    for name in (p for p in patterns if p not in DESCRIBED_WITH):
        if f"\n## {name}\n" not in page:
            said.append(f"docs/patterns.md: add a section `## {name}`: what it finds, and its op")
        if f"\n<!-- example {name} -->\n" not in page:
            said.append(
                f"docs/patterns.md: add the smallest model of {name} behind "
                f"`<!-- example {name} -->`, then its two pictures; "
                f"python docs/pattern_pictures.py {name} draws them"
            )
    return said


def untested(patterns: Iterable[str], folder: Path) -> list[str]:
    """Patterns that no file of tests/patterns names."""
    text = "\n".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    return [
        f"{folder.relative_to(ROOT)}/FAMILY/test_{name}.py: add what {name} finds, near misses "
        "with their reasons, and what it must leave alone"
        for name in patterns
        if name not in DESCRIBED_WITH and not re.search(rf"\b{name}\b", text)
    ]


def unaudited(cases: str, kernels: str) -> list[str]:
    """Kernels of the net (the two snapshots' texts) that no audit case asks for."""
    kernel_of = {spec: kernel for kernel, spec, _ in map(str.split, kernels.splitlines())}
    audited = [line for line in cases.splitlines() if line.startswith("audit, ")]
    seen = {
        kernel_of[s]
        for line in audited
        for s in re.findall(r"\b[0-9a-f]{8}\b", line)
        if s in kernel_of
    }
    return [
        f"tools/audit/: add cases of the kernel {name} to a function that is `audited`"
        for name in sorted(set(kernel_of.values()) - seen)
    ]


def unexplained(codes: Mapping[str, str], guide: Iterable[str], hinted: Iterable[str]) -> list[str]:
    """Codes of misses without a paragraph or a hint, and paragraphs without a code."""
    known, hints = set(guide), set(hinted)
    said = [
        f"docs/miss-codes.md: add `### {code}`, then `*{meaning}*`, a paragraph, and one that "
        "begins with `**What to do:**`"
        for code, meaning in codes.items()
        if code not in known
    ]
    said += [
        f"patterns/hints.py: add what to do about {code}" for code in codes if code not in hints
    ]
    gone = sorted((known | hints) - set(codes))
    return said + [
        f"{code} is no code any more: take it out of its page and hints" for code in gone
    ]


def incomplete_families(families: Iterable[str], audited: Iterable[str]) -> list[str]:
    """Families that lack a folder, tests or audits; folders with kernels that are no family."""
    said = []
    for name in sorted(families):
        places = [
            *(f"{floor}/{name}" for floor in FLOORS),
            *(f"tests/{floor}/{name}" for floor in FLOORS[1:]),
        ]
        said += [f"{place}/: add the folder" for place in places if not (ROOT / place).is_dir()]
    rooms = {room.parent.name for room in (ROOT / "codegen").glob("*/templates")}
    said += [
        f"codegen/targets.py: add {name} to FAMILIES, and to the chips on which it keeps every rule"
        for name in sorted(rooms - set(families))
    ]
    # The audits of mixtures have those of their grouped GEMMs.
    missing = sorted(set(families) - set(audited) - {"grouped"})
    return said + [f"tools/audit/{name}.py: add an `audited` function of cases" for name in missing]


def test_everything_that_registers_itself_is_imported():
    assert [*unregistered(ROOT / "ops"), *unregistered(ROOT / "patterns")] == []


def test_every_pattern_is_described_and_tested():
    page = (ROOT / "docs" / "patterns.md").read_text("utf-8")
    assert [
        *undescribed(OWN_PATTERNS, page),
        *untested(OWN_PATTERNS, ROOT / "tests" / "patterns"),
    ] == []


def test_every_kernel_is_audited():
    cases, kernels = (NET / f"{name}.snapshot" for name in ("cases", "kernels"))
    assert unaudited(cases.read_text("utf-8"), kernels.read_text("utf-8")) == []


def test_every_code_is_explained():
    assert unexplained(OWN_CODES, miss_guide({}), HINTED) == []


def test_every_family_is_whole():
    assert incomplete_families(FAMILIES, audits.FAMILIES) == []


def test_every_op_has_cases():
    without = [op.name for op in all_ops() if op.namespace == "tilewright" and not op.cases]
    assert [f"{name}: give its record `cases` and `sample_inputs`" for name in without] == []


NEW_OP = "from tilewright.ops.contract import register\n\nOP = register(None)\n"


@pytest.mark.parametrize("floor", ["ops", "patterns"])
def test_a_file_that_is_not_imported_is_named(tmp_path, floor):
    room = tmp_path / floor / "mlp"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").write_text("")
    (room / "gated.py").write_text(NEW_OP)
    module = f"tilewright.{floor}.mlp.gated"
    said = f"{floor}/__init__.py: import {module}, which registers itself"
    assert unregistered(room.parent) == [said]
    (room.parent / "__init__.py").write_text(f"from {module} import OP\n")
    assert unregistered(room.parent) == []


def test_what_a_pattern_lacks_is_named():
    section, example = undescribed(["gated"], "# Patterns\n\n## other\n")
    assert section.startswith("docs/patterns.md: add a section `## gated`")
    assert "python docs/pattern_pictures.py gated" in example
    assert undescribed(["gated"], "\n## gated\n\n<!-- example gated -->\n") == []
    (test,) = untested(["no_such_" + "pattern"], ROOT / "tests" / "patterns")
    assert "near misses" in test


def test_a_kernel_without_an_audit_is_named():
    kernels = "rows 0a1b2c3d ffffffff\ncopy 4e5f6a7b ffffffff\n"
    cases = "audit, a => sm90: 0a1b2c3d\nop, b => sm90: 4e5f6a7b\n"
    (said,) = unaudited(cases, kernels)
    assert "the kernel copy " in said
    assert unaudited(cases.replace("op, b", "audit, b"), kernels) == []


def test_what_a_code_lacks_is_named():
    paragraph, hint = unexplained({"NEW": "it is new"}, [], [])
    assert paragraph.startswith("docs/miss-codes.md: add `### NEW`, then `*it is new*`")
    assert hint == "patterns/hints.py: add what to do about NEW"
    assert unexplained({}, ["OLD"], ["OLD"]) == [
        "OLD is no code any more: take it out of its page and hints"
    ]


def test_what_a_family_lacks_is_named():
    said = incomplete_families([*FAMILIES, "gated"], audits.FAMILIES)
    assert "ops/gated/: add the folder" in said
    assert "tests/patterns/gated/: add the folder" in said
    assert said[-1].startswith("tools/audit/gated.py:")
    (less,) = incomplete_families(FAMILIES - {"mlp"}, audits.FAMILIES)
    assert less.startswith("codegen/targets.py: add mlp to FAMILIES")
