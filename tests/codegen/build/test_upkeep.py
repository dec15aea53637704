"""Tests the size of the cache: what it holds, the leftovers of killed processes, and which entries
are removed first."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.another_user import in_a_child
from tilewright.codegen.build.cache import KernelCache, key_of
from tilewright.codegen.build.cache import folder as cache_folder
from tilewright.codegen.build.cache.folder import new_folder, private_folder, sweep_private
from tilewright.codegen.build.cache.upkeep import parse_size, prune, survey

HOUR = 3600
BIG = {"a.bin": bytes(100_000)}


def store_with(root, ages):
    """Returns a cache with entries of 100 kB. The `ages` say how many hours ago each was last
    used."""
    store = KernelCache(root)
    for name, hours in ages.items():
        place = store.get_or_make("binary", key_of(name), lambda: BIG).folder
        os.utime(place, (time.time() - hours * HOUR,) * 2)
    return store


def names(store):
    """Returns the names of the entries that are left."""
    known = {key_of(name): name for name in ("aa", "bb", "cc", "dd", *map(str, range(30)))}
    return sorted(known[entry.path.name] for entry in survey(store.root).entries)


def test_the_entries_used_longest_ago_go_first(tmp_path):
    store = store_with(tmp_path, {"aa": 30, "bb": 10, "cc": 20, "dd": 1})
    each = survey(tmp_path).size // 4
    assert each >= 100_000
    pruned = prune(tmp_path, 2 * each)
    assert (pruned.entries, pruned.size) == (2, 2 * each)
    assert names(store) == ["bb", "dd"]
    assert prune(tmp_path, 2 * each).entries == 0
    assert prune(tmp_path, 2 * each, older_than=5 * HOUR).entries == 1
    assert names(store) == ["dd"]
    assert store.get_or_make("binary", key_of("aa"), lambda: BIG).files == BIG


def test_reading_an_entry_counts_as_use(tmp_path):
    store = store_with(tmp_path, {"aa": 30, "bb": 20})
    assert store.find("binary", key_of("aa")).files == BIG
    prune(tmp_path, survey(tmp_path).size // 2)
    assert names(store) == ["aa"]


def test_a_growing_cache_stays_within_its_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "1MB")
    store = KernelCache(tmp_path)
    for number in range(30):
        store.get_or_make("binary", key_of(str(number)), lambda: BIG)
        (tmp_path / "last-prune").unlink(missing_ok=True)  # as if an hour had passed
    assert survey(tmp_path).size <= 1_000_000
    assert 5 <= len(names(store)) <= 10
    assert "29" in names(store)


def test_it_looks_once_an_hour(tmp_path, monkeypatch):
    store = store_with(tmp_path, {"aa": 0})
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "0")
    store_with(tmp_path, {"bb": 0})
    assert names(store) == ["aa", "bb"]  # the first store pruned the cache; this store did not
    old = time.time() - 2 * HOUR
    os.utime(tmp_path / "last-prune", (old, old))
    store.get_or_make("binary", key_of("cc"), lambda: BIG)
    assert names(store) == []


def test_a_bad_bound_is_said_and_the_default_holds(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, "_said", set())
    caplog.set_level(logging.WARNING, logger="tilewright")
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "plenty")
    assert KernelCache(tmp_path).get_or_make("binary", key_of("aa"), lambda: BIG).files == BIG
    assert "TILEWRIGHT_CACHE_SIZE: expected a size such as 500MB" in caplog.text
    assert names(KernelCache(tmp_path)) == ["aa"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("1.5 k", 1500),
        ("0", 0),
        ("10B", 10),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "MB", "1XB", "1e9", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(text)


def test_files_that_are_not_the_caches_are_left_alone(tmp_path):
    """TILEWRIGHT_CACHE_DIR may name a folder that holds other files, too."""
    store = store_with(tmp_path, {"aa": 30})
    mine = [tmp_path / "notes.txt", tmp_path / "photos" / "ab" / "abc.tmp"]
    mine += [tmp_path / "binary" / name for name in ("notes.txt", "ab/abstract.md", "ab/my.lock")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    prune(tmp_path, 0, older_than=0)
    assert names(store) == []
    assert all(path.exists() for path in mine)


def hold_a_folder(parent, ready):
    with new_folder(parent, "c" * 16) as (path, _):
        (path / "half.txt").write_text("half")
        ready.put(path)
        time.sleep(60)


def one_of_two_killed(make, *given):
    """Runs `make(*given, queue)` in two processes and kills the second. Returns the first process,
    and the folder that each process put into its queue."""
    context = multiprocessing.get_context("fork")
    ready = context.Queue()
    live, dead = (context.Process(target=make, args=(*given, ready)) for _ in "ab")
    live.start()
    live_folder = ready.get(timeout=30)
    dead.start()
    dead_folder = ready.get(timeout=30)
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    return live, live_folder, dead_folder


def test_leftovers_of_killed_makers_are_swept_and_those_of_live_ones_not(tmp_path):
    parent = tmp_path / "binary" / "cc"
    parent.mkdir(parents=True)
    live, live_folder, dead_folder = one_of_two_killed(hold_a_folder, parent)
    lock = parent / ("c" * 64 + ".lock")
    lock.touch()
    try:
        assert survey(tmp_path).stale == ()  # the folders are too young to count as leftovers
        for path in (live_folder, dead_folder, lock):
            os.utime(path, (0, 0))
        assert set(survey(tmp_path).stale) == {dead_folder, lock}
        assert prune(tmp_path, 1 << 30).stale == 2
        assert list(parent.iterdir()) == [live_folder]
        assert (live_folder / "half.txt").exists()
    finally:
        live.terminate()
        live.join()


def private_twice():
    return private_folder(), private_folder()


def test_a_private_folder_ends_with_its_process(tmp_path, monkeypatch):
    """A forked child has a private folder of its own, and does not remove any other folder when it
    ends."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cache_folder, "_private", {})
    own = private_folder()
    first, second = in_a_child(private_twice)
    assert first == second != own
    assert list(tmp_path.iterdir()) == [own]
    code = "from tilewright.codegen.build.cache.folder import *; print(private_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not os.path.exists(done.stdout.strip())
    assert cache_folder._private_prefix() in done.stdout


def make_private(ready):
    cache_folder._private.clear()
    ready.put(private_folder())
    time.sleep(60)


def test_private_folders_of_killed_processes_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live, live_folder, dead_folder = one_of_two_killed(make_private)
    try:
        assert sweep_private() == 0
        for path in (live_folder, dead_folder):
            os.utime(path, (0, 0))
        assert sweep_private() == 1
        assert list(tmp_path.iterdir()) == [live_folder]
    finally:
        live.terminate()
        live.join()
