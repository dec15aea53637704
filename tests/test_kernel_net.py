"""Compares the kernels of all cases of `tests/kernel_net.py` with snapshots, so that none changes
unnoticed.

`pytest tests/test_kernel_net.py --tilewright-update` writes the snapshots; read the diff. Each
family has a folder. In it, `OP.snapshot` has a line for each case of an op, with the specs of its
kernels on each target. `TEMPLATE.kernels.snapshot` has a hash of the text that the template's
sources are emitted from; for each spec the kernel's name, the hash of the spec, and the hash of the
emitted source; and the audit and benchmark cases whose first kernel uses the template. An update
emits kernels that are new or whose text has changed (all kernels after a change of the emitter,
which takes minutes). The tests compare all specs, and the sources of a part of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests import kernel_net, test_kernel_net
from tests.kernel_net import NET_TARGETS, Found, source_hash, spec_hash, text_hash
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.contract import get_op

FOLDER = Path(__file__).parent / "tilewright_snapshots" / "test_kernel_net"
UPDATE = "--tilewright-update"
MEANT = f"if this change is intended: pytest tests/test_kernel_net.py {UPDATE}"
# The tests emit one of this many specs of audits and ops, and at least one of each kernel.
ONE_IN = 96
SHOWN = 5


def case_lines(found: dict[str, Found]) -> dict[str, str]:
    """Returns, for the name of each case, the hashes of its specs on each target."""
    lines: dict[str, list[str]] = {}
    for target, cases in found.items():
        for label, specs in cases.items():
            text = specs if isinstance(specs, str) else " ".join(map(spec_hash, specs))
            lines.setdefault(label, []).append(f"{target}: {text}")
    return {label: " | ".join(parts) for label, parts in lines.items()}


def by_hash(found: Iterable[Found]) -> dict[str, KernelSpec]:
    """Returns every spec by its hash. No two specs have the same hash."""
    specs: dict[str, KernelSpec] = {}
    for cases in found:
        for asked in cases.values():
            for spec in () if isinstance(asked, str) else asked:
                other = specs.setdefault(spec_hash(spec), spec)
                assert other == spec, f"{other} and {spec} differ in nothing but their template"
    return specs


@cache
def stored() -> tuple[dict[str, str], dict[str, tuple[str, str]], dict[str, str]]:
    """Reads the snapshots. Returns three dictionaries: from the name of a case to its specs, from a
    spec to (kernel, source), and from a template to the hash of the text from which its sources
    were emitted."""
    cases: dict[str, str] = {}
    kernels: dict[str, tuple[str, str]] = {}
    templates: dict[str, str] = {}
    for path in FOLDER.rglob("*.snapshot"):
        for line in path.read_text("utf-8").splitlines():
            label, is_case, got = line.partition(" => ")
            words = line.split()
            if is_case:
                cases[label] = got
            elif len(words) == 3:
                kernels[words[1]] = (words[0], words[2])
            else:
                templates[words[0]] = words[1]
    return cases, kernels, templates


def write_anew(found: dict[str, Found]) -> None:
    specs = by_hash(found.values())
    texts = {name: text_hash(name) for name in {spec.template for spec in specs.values()}}
    sources = known_sources(specs, texts)
    new = {key: spec for key, spec in specs.items() if key not in sources}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        sources |= zip(new, pool.map(source_hash, new.values(), chunksize=16), strict=True)
    lines: dict[Path, list[str]] = {}
    for name, text in sorted(texts.items()):
        lines[kernels_of(name)] = [f"{name} {text}"]
    for key, spec in sorted(specs.items(), key=lambda item: (item[1].kernel, item[0])):
        lines[kernels_of(spec.template)].append(f"{spec.kernel} {key} {sources[key]}")
    for label, text in sorted(case_lines(found).items()):
        lines.setdefault(place_of(label, found), []).append(f"{label} => {text}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path, several in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in several), "utf-8")


def kernels_of(template: str) -> Path:
    family, _, name = template.rpartition(".")
    return FOLDER / family / f"{name}.kernels.snapshot"


def place_of(label: str, found: dict[str, Found]) -> Path:
    """Returns the file of a case, which is the file of its op or of its first kernel."""
    kind, _, rest = label.partition(", ")
    if kind == "op":
        op = get_op(rest.partition(",")[0])
        return FOLDER / op.family / f"{op.name}.snapshot"
    asked = next((c[label] for c in found.values() if c.get(label) and c[label][0]), None)
    if asked is None or isinstance(asked, str):
        return FOLDER / "without.snapshot"
    return kernels_of(asked[0].template)


def known_sources(specs: dict[str, KernelSpec], texts: dict[str, str]) -> dict[str, str]:
    """Returns the stored sources of specs whose template has not changed since they were
    emitted."""
    _, kernels, before = stored()
    return {
        key: kernels[key][1]
        for key, spec in specs.items()
        if key in kernels and before.get(spec.template) == texts[spec.template]
    }


def changes(stored: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    for label in sorted(stored.keys() | now.keys()):
        before, after = stored.get(label), now.get(label)
        if before is None:
            yield f"new: {label} => {after}"
        elif after is None:
            yield f"gone: {label}"
        elif before != after:
            yield f"{label}\n    was {before}\n    is  {after}"


def test_every_case_gets_the_kernels_that_it_got(request):
    found = {target: kernel_net.all_cases(target) for target in NET_TARGETS}
    if request.config.getoption(UPDATE):
        write_anew(found)
        return
    cases, known, _ = stored()
    differing = list(changes(cases, case_lines(found)))
    specs = by_hash(found.values())
    shown = [f"{key}: {specs[key].to_json()}" for key in specs if key not in known][:SHOWN]
    if differing:
        text = "\n".join([*differing[:SHOWN], "new specs:", *shown])
        pytest.fail(f"{len(differing)} cases differ; {MEANT}\n{text}", pytrace=False)
    assert specs.keys() == known.keys()


def drawn(found: Found) -> dict[str, KernelSpec]:
    """Returns the specs whose sources are compared. They are the same in every run."""
    specs = by_hash([found])
    firsts = {specs[key].kernel: key for key in sorted(specs, reverse=True)}.values()
    return {k: s for k, s in specs.items() if k in firsts or int(k, 16) % ONE_IN == 0}


@pytest.mark.parametrize("target", NET_TARGETS)
def test_the_source_of_a_kernel_is_what_it_was(target, request):
    if request.config.getoption(UPDATE):
        pytest.skip("written anew with the specs")
    found, (_, known, _) = kernel_net.quick_cases(target), stored()
    # An unknown spec belongs to a case that has changed, which the other test names.
    specs = {key: spec for key, spec in drawn(found).items() if key in known}
    assert len(specs) > len({spec.kernel for spec in specs.values()}) > 20
    changed = [key for key, spec in specs.items() if known[key][1] != source_hash(spec)]
    users = {
        key: next(label for label, asked in found.items() if specs[key] in asked)
        for key in changed[:SHOWN]
    }
    if changed:
        text = "\n".join(f"{known[key][0]} {key}: {label}" for key, label in users.items())
        head = f"{len(changed)} of {len(specs)} sources differ; {MEANT}"
        pytest.fail(f"{head}\n{text}", pytrace=False)


SPEC = KernelSpec.make("rows", "copy", {"BLOCK": 64}, {"x_ptr": "*bf16", "n": "i32"})
TEXT = '''"""Copies rows."""

KERNEL = "NAME"


def NAME(x_ptr, n):
    """What it does."""
    tl.store(x_ptr, n)  # why
'''


def hashed(monkeypatch, spec: KernelSpec, text: str = TEXT) -> str:
    monkeypatch.setattr(kernel_net, "emit", lambda spec: text.replace("NAME", spec.name))
    return source_hash(spec)


def test_a_template_that_moves_changes_no_hash(monkeypatch):
    moved = replace(SPEC, template="families.rows")
    assert moved.name != SPEC.name
    assert spec_hash(moved) == spec_hash(SPEC)
    assert hashed(monkeypatch, moved) == hashed(monkeypatch, SPEC)


@pytest.mark.parametrize(
    "change",
    [{"constants": (("BLOCK", 32),)}, {"num_warps": 8}, {"grid": (7,)}, {"divisible16": ("n",)},
     {"kernel": "move"}, {"target": "sm90"}],
    ids=str,
)  # fmt: skip
def test_a_change_of_a_spec_changes_its_hash(change):
    assert spec_hash(replace(SPEC, **change)) != spec_hash(SPEC)


def test_a_change_of_the_code_alone_changes_the_sources_hash(monkeypatch):
    same = TEXT.replace("Copies", "Moves").replace("What", "How").replace("# why", "# for what")
    assert hashed(monkeypatch, SPEC, same) == hashed(monkeypatch, SPEC)
    other = TEXT.replace("(x_ptr, n)  #", "(x_ptr, n + 1)  #")
    assert hashed(monkeypatch, SPEC, other) != hashed(monkeypatch, SPEC)


def test_an_update_emits_what_is_new_and_what_has_another_text(monkeypatch):
    other = replace(SPEC, template="columns")
    specs = {spec_hash(spec): spec for spec in (SPEC, replace(SPEC, num_warps=8))}
    specs["of another template"] = other
    known = {key: (spec.kernel, key[::-1]) for key, spec in specs.items() if spec.num_warps != 8}
    before = {"rows": "1", "columns": "2"}
    monkeypatch.setattr(test_kernel_net, "stored", lambda: ({}, known, before))
    same = known_sources(specs, {"rows": "1", "columns": "3"})
    assert same == {spec_hash(SPEC): spec_hash(SPEC)[::-1]}


def test_a_case_that_changes_is_named():
    now = {"a": "sm90: 11", "b": "sm90: 33"}
    assert list(changes({"a": "sm90: 11", "c": "sm90: 22"}, now)) == [
        "new: b => sm90: 33",
        "gone: c",
    ]
    assert list(changes({"a": "sm90: 12", "b": "sm90: 33"}, now)) == [
        "a\n    was sm90: 12\n    is  sm90: 11"
    ]
