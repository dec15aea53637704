"""Says what a new op, pattern, kernel or family still lacks: the file, and what to add there.

Other tests check the existing parts, and these tests find missing parts. CONTRIBUTING.md has the
whole list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tilewright.codegen.targets import FAMILIES
from tilewright.ops.contract import all_ops
from tilewright.patterns import language
from tilewright.patterns.language import CODES
from tilewright.tools.audit import families as audits

ROOT = Path(__file__).resolve().parents[1]
NET = Path(__file__).parent / "tilewright_snapshots" / "test_kernel_net"
# This runs when the tests are collected. By then, no test has added a pattern or a code.
OWN_CODES = dict(CODES)
OWN_PATTERNS = [
    p.name for p in language.registered() if type(p).__module__.startswith("tilewright.")
]
#: Patterns that are described in the section of another pattern.
DESCRIBED_WITH = {
    "cache_absent": "qkv_cache",
    "moe_dense": "moe",
    "grouped_gemm_nvfp4": "grouped_gemm",
}
LAYERS = ("codegen", "ops", "patterns")  # a family's kernels may be tested with its ops


def undescribed(patterns: Iterable[str], page: str) -> list[str]:
    """Returns a line for each pattern without a section or an example in docs/patterns.md."""
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
    """Returns a line for each pattern that no file of tests/patterns names."""
    text = "\n".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    return [
        f"{folder.relative_to(ROOT)}/FAMILY/test_{name}.py: add what {name} finds, near misses "
        "with their reasons, and what it must leave alone"
        for name in patterns
        if name not in DESCRIBED_WITH and not re.search(rf"\b{name}\b", text)
    ]


def unaudited(net: str) -> list[str]:
    """Returns a line for each kernel of the net (the texts of its snapshots) that no audit case
    has."""
    lines = net.splitlines()
    kernels = (line.split() for line in lines if " => " not in line and line.count(" ") == 2)
    kernel_of = {spec: kernel for kernel, spec, _ in kernels}
    audited = [line for line in lines if line.startswith("audit, ")]
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


def unexplained(code: str, page: str, known: Iterable[str]) -> list[str]:
    """Returns a line for each code that the source uses but the page lacks, for each entry that
    nothing uses, and for each entry that the program does not read."""
    known = set(known)
    used = set(re.findall(r'(?:reject|miss_at)\(\s*"([A-Z0-9_]+)"', code))
    said = [
        f"docs/miss-codes.md: add `### {name}`, then `*what it means*`, a line with `> its hint`, "
        "a paragraph, and one that begins with `**What to do:**`"
        for name in sorted(used - known)
    ]
    headings = set(re.findall(r"^### ([A-Z0-9_]+)$", page, re.MULTILINE))
    said += [f"docs/miss-codes.md: {name}: begin as others do" for name in sorted(headings - known)]
    gone = sorted(name for name in known if f'"{name}"' not in code)
    return said + [f"docs/miss-codes.md: nothing uses {name}" for name in gone]


def incomplete_families(families: Iterable[str], audited: Iterable[str]) -> list[str]:
    """Returns a line for each family without a folder, tests or audits, and for each folder with
    kernels that is no family."""
    said = []
    for name in sorted(families):
        places = [
            *(f"{layer}/{name}" for layer in LAYERS),
            *(f"tests/{layer}/{name}" for layer in LAYERS[1:]),
        ]
        said += [f"{place}/: add the folder" for place in places if not (ROOT / place).is_dir()]
    rooms = {room.parent.name for room in (ROOT / "codegen").glob("*/templates")}
    said += [
        f"codegen/targets.py: add {name} to FAMILIES, and to the chips on which it keeps every rule"
        for name in sorted(rooms - set(families))
    ]
    # The audits of mixtures include the audits of their grouped GEMMs.
    missing = sorted(set(families) - set(audited) - {"grouped"})
    return said + [f"tools/audit/{name}.py: add an `audited` function of cases" for name in missing]


def test_what_a_pattern_is_asked_before_exists():
    named = {name for p in language.registered() for name in getattr(p, "asked_before", ())}
    assert named <= {p.name for p in language.registered()}


def test_every_pattern_is_described_and_tested():
    page = (ROOT / "docs" / "patterns.md").read_text("utf-8")
    assert [
        *undescribed(OWN_PATTERNS, page),
        *untested(OWN_PATTERNS, ROOT / "tests" / "patterns"),
    ] == []


def test_every_kernel_is_audited():
    net = "".join(path.read_text("utf-8") for path in NET.rglob("*.snapshot"))
    assert "audit, " in net
    assert unaudited(net) == []


def test_every_code_is_explained():
    layers = (ROOT / "patterns", ROOT / "compiler")
    code = "\n".join(path.read_text("utf-8") for layer in layers for path in layer.rglob("*.py"))
    page = (ROOT / "docs" / "miss-codes.md").read_text("utf-8")
    assert unexplained(code, page, OWN_CODES) == []


def test_every_family_is_whole():
    assert incomplete_families(FAMILIES, audits.FAMILIES) == []


def test_every_op_has_cases():
    without = [op.name for op in all_ops() if op.namespace == "tilewright" and not op.cases]
    assert [f"{name}: give its record `cases` and `sample_inputs`" for name in without] == []


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
    (said,) = unaudited(kernels + cases)
    assert "the kernel copy " in said
    assert unaudited(kernels + cases.replace("op, b", "audit, b")) == []


def test_what_a_code_lacks_is_named():
    (new,) = unexplained('reject("NEW", where)', "", [])
    assert new.startswith("docs/miss-codes.md: add `### NEW`")
    page = "### NEW\nIt is new.\n"
    assert unexplained("", page, []) == ["docs/miss-codes.md: NEW: begin as others do"]
    assert unexplained("", "", ["OLD"]) == ["docs/miss-codes.md: nothing uses OLD"]
    assert unexplained('miss_at(\n    "NEW", where)', page, ["NEW"]) == []


def test_what_a_family_lacks_is_named():
    said = incomplete_families([*FAMILIES, "gated"], audits.FAMILIES)
    assert "ops/gated/: add the folder" in said
    assert "tests/patterns/gated/: add the folder" in said
    assert said[-1].startswith("tools/audit/gated.py:")
    (less,) = incomplete_families(FAMILIES - {"mlp"}, audits.FAMILIES)
    assert less.startswith("codegen/targets.py: add mlp to FAMILIES")
