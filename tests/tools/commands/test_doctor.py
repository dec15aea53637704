"""Tests the command `doctor`: versions, this machine, and the cache."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from tests.tools.schemas import schema_checked
from tilewright.codegen.build.cache import KernelCache, key_of
from tilewright.codegen.targets import SM90, SM100
from tilewright.tools.commands import doctor
from tilewright.tools.matrix.releases import newest_tried


def test_doctor_checks_this_machine(command, tmp_path, monkeypatch):
    """Runs the check of this machine for two chips. tests/tools/audit/test_chips.py compiles for
    the others."""
    monkeypatch.setattr(doctor, "gpu_targets", lambda: (SM90, SM100))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    done = command("doctor", "--json")
    findings = {f["what"]: f for f in schema_checked("doctor", done.stdout)["findings"]}
    assert done.exit_code == 0, done.stdout
    assert findings["compiler for sm100"]["detail"].startswith("sm_100a")
    assert findings["torch with triton"]["detail"].startswith(("tried", "not tried"))
    assert findings["torch"]["detail"] == importlib.metadata.version("torch")


def test_doctor_says_where_a_version_is_newer_than_any_tried():
    newest = newest_tried("torch")
    assert doctor._tried("torch", f"{newest}+cu130").state == "ok"
    later = doctor._tried("torch", "99.0.0a0")
    assert later.state == "no"
    assert newest in later.detail
    assert doctor._tried("rich", "99.0").state == "ok"


@pytest.mark.parametrize(
    ("torch", "triton", "state"),
    [
        ("2.13.0+cpu", "3.7.1", "ok"),
        ("2.15.0", "3.9.0", "ok"),
        ("2.13.0+cpu", "3.9.0", "no"),  # each was tried, but with others
        ("2.12.0", "3.7.1", "no"),
    ],
)
def test_doctor_says_which_pairs_were_never_tried(torch, triton, state):
    found = doctor._together(torch, triton)
    assert found.state == state
    assert ("not tried together; tried are 2.11.0 with 3.6.0, " in found.detail) == (state == "no")


@pytest.fixture
def doctor_compiles_nothing(monkeypatch):
    """Replaces the compilation of a kernel for each target, which takes a second each."""
    monkeypatch.setattr(doctor, "gpu_targets", lambda: ())


@pytest.mark.usefixtures("doctor_compiles_nothing")
def test_doctor_reports_an_unwritable_cache(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    done = command("doctor", "--json")
    assert done.exit_code == 1
    states = {f["what"]: f["state"] for f in json.loads(done.stdout)["findings"]}
    assert states["cache folder"] == "failed"


@pytest.mark.usefixtures("doctor_compiles_nothing")
def test_doctor_says_what_the_cache_holds_and_why_it_is_not_used(command, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "3GiB")
    KernelCache().get_or_make("source", key_of("one"), lambda: {"a.py": bytes(2 << 20)})
    assert doctors_cache(command) == ("ok", f"{root}, 1 entries, 2 MiB of 3072")
    root.chmod(0o777)
    state, detail = doctors_cache(command)
    assert state == "failed"
    assert "is not used: other users can write to it" in detail


def doctors_cache(command):
    done = command("doctor", "--json")
    findings = {f["what"]: f for f in schema_checked("doctor", done.stdout)["findings"]}
    return findings["cache folder"]["state"], findings["cache folder"]["detail"]
