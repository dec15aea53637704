"""Tests the commands `diff`, on saved reports, and `explain`, on the codes in them."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.tools.schemas import schema_checked
from tilewright.patterns.language import CODES
from tilewright.tools.report.miss_guide import miss_guide


def test_diff_of_saved_reports_names_what_was_lost(command, tmp_path):
    for name, model in (("a", "mine.py:make"), ("b", "mine.py:make_missed")):
        torch._dynamo.reset()
        report = command("inspect", model, "--json", "--no-kernels").stdout
        (tmp_path / f"{name}.json").write_text(report)
    assert command("diff", "a.json", "a.json").exit_code == 0
    done = command("diff", "a.json", "b.json", "--json")
    assert done.exit_code == 1
    changes = schema_checked("diff", done.stdout)["changes"]
    assert [(c["before"], c["after"]) for c in changes] == [(2, 0), (0, 2)]
    assert "ACCUMULATED_WRITE" in changes[1]["what"]
    text = command("diff", "a.json", "b.json").stdout
    assert text.startswith("- layers.*  qkv_cache -> fused_qkv_paged")


@pytest.mark.parametrize("content", ["", "{", '{"matches": 3}', "onlyoneword\n", "\x00\x01"])
def test_diff_of_a_corrupt_file_is_one_line(command, tmp_path, content):
    (tmp_path / "bad").write_text(content)
    done = command("diff", "bad", "bad")
    assert done.exit_code == 2
    assert done.stderr.startswith("tilewright: bad: ")
    assert len(done.stderr.splitlines()) == 1


def test_explain_knows_every_code_with_a_text(command):
    done = command("explain", "--json")
    codes = schema_checked("explain", done.stdout)["codes"]
    assert {entry["code"] for entry in codes} == set(CODES)
    assert all(guide.text for guide in miss_guide(CODES).values())
    one = command("explain", "growing-cache").stdout
    assert one.startswith("GROWING_CACHE: ")
    assert "static cache" in one


def test_explain_of_an_unknown_code_suggests_one(command):
    done = command("explain", "GROWING_CASH")
    assert done.exit_code == 2
    assert "did you mean 'GROWING_CACHE'?" in done.stderr


@pytest.mark.parametrize("place", ["codes.py", "codes.py:make", "codes"])
def test_explain_knows_the_codes_of_a_user_s_file(command, tmp_path, monkeypatch, place):
    (tmp_path / "codes.py").write_text(
        "from tilewright.patterns.language import register_code\n"
        "print('a line of its own')\nregister_code('MY_CODE', 'what it means')\n"
    )
    monkeypatch.delitem(sys.modules, "codes", raising=False)
    assert command("explain", "MY_CODE").exit_code == 2
    try:
        done = command("explain", "my-code", "--from", place)
        listed = schema_checked("explain", command("explain", "--from", place, "--json").stdout)
    finally:
        CODES.pop("MY_CODE", None)
    assert done.stdout.splitlines()[0] == "MY_CODE: what it means"
    assert "MY_CODE" in {entry["code"] for entry in listed["codes"]}
    missing = command("explain", "MY_CODE", "--from", "absent.py")
    assert missing.exit_code == 2
    assert missing.stderr.startswith("tilewright: absent.py: no such file")
