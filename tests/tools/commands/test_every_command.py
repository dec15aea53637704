"""Tests every command: help, completion and bad input. Also tests `zoo`, which has no options."""

from __future__ import annotations

import pytest

from tests.tools.schemas import schema_checked


def test_zoo_lists_every_model(command):
    models = schema_checked("zoo", command("zoo", "--json").stdout)["models"]
    assert {"llama3-8b", "qwen3-30b-a3b"} <= {model["name"] for model in models}
    assert "llama3-8b" in command("zoo").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels", "llama3_8b", "-o", "x"), "is not a zoo name"),
        (("kernels", "mine.py:make", "-o", "mine.py"), "--output: cannot write to mine.py"),
        (("inspect", "mine.py:make", "--html", "no/such/page.html"), "--html: no such folder"),
        (("inspect", "mine.py:make", "--json", "--after"), "--json cannot be used together with"),
        (("verify", "mine.py:make_untraceable"), "cannot be traced: RuntimeError: boom"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(command, arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_help_of_every_command_and_completion(command):
    text = command("--help").stdout
    names = ("inspect", "kernels", "verify", "diff", "explain", "zoo", "doctor", "cache", "bench")
    for name in names:
        assert name in text
        shown = command(name, "--help")
        assert shown.exit_code == 0
        assert "\x1b[" not in shown.stdout
    assert "--install-completion" in text
