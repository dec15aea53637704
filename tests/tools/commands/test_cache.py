"""Tests the command `cache`: what it shows, prunes and refuses."""

from __future__ import annotations

import os

import pytest

from tests.tools.schemas import schema_checked
from tilewright.codegen.build.cache import KernelCache, key_of


def test_cache_shows_and_prunes(command, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    assert schema_checked("cache", command("cache", "--json").stdout)["kinds"] == []
    for name in ("one", "two", "three"):
        entry = KernelCache().get_or_make("source", key_of(name), lambda: {"a.py": bytes(100_000)})
        if name == "one":
            os.utime(entry.folder, (0, 0))
    shown = schema_checked("cache", command("cache", "--json").stdout)
    assert shown["folder"] == str(root)
    assert (shown["problem"], shown["others_trusted"], shown["pruned"]) == (None, False, None)
    assert shown["bound_bytes"] == 2 << 30
    (kind,) = shown["kinds"]
    assert (kind["kind"], kind["entries"]) == ("source", 3)
    assert kind["bytes"] == shown["bytes"] >= 300_000
    each = shown["bytes"] // 3
    old = schema_checked(
        "cache", command("cache", "--prune", "--older-than", "30d", "--json").stdout
    )
    assert old["pruned"] == {"entries": 1, "bytes": each, "stale": 0}
    text = command("cache", "--prune", "--max-size", "150kB").stdout
    assert "pruned   1 entries" in text
    assert f"folder   {root}" in text
    assert "source   1 entries" in text


def test_cache_that_is_not_used_is_not_pruned(command, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    entry = KernelCache().get_or_make("source", key_of("one"), lambda: {"a.py": b"text"})
    root.chmod(0o777)
    done = command("cache", "--json")
    assert done.exit_code == 1
    assert "other users can write" in schema_checked("cache", done.stdout)["problem"]
    done = command("cache", "--prune", "--max-size", "0")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"tilewright: --prune: {root} is not used: other users")
    assert entry.folder.is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prune", "--max-size", "plenty"), "--max-size: expected a size such as 500MB"),
        (("--prune", "--older-than", "soon"), "--older-than: expected an age such as 30d"),
        (("--max-size", "1MB"), "can be used only together with --prune"),
    ],
)
def test_cache_refuses_what_it_cannot_read(command, arguments, message):
    done = command("cache", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
