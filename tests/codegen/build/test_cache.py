"""Tests the cache on disk: concurrent makers, every kind of damage, other users, full disks, and
keys."""

import errno
import grp
import json
import logging
import multiprocessing
import os
import pwd
import resource
import shutil
import stat
import time
from types import SimpleNamespace

import pytest

from tests.another_user import NOBODY, give_away, in_a_child, public_folder
from tilewright.codegen import build
from tilewright.codegen.build.cache import KernelCache, cache_dir, key_of
from tilewright.codegen.build.cache import folder as cache_folder
from tilewright.codegen.emit import source as template_source
from tilewright.codegen.emit import source_fingerprint
from tilewright.codegen.spec import KernelSpec

FILES = {"a.txt": b"first half ", "b.bin": b"second half" * 1000}


def counting_make(log):
    def make():
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.05)
        return FILES

    return make


def writer(root, log, go, seen):
    go.wait()
    entry = KernelCache(root).get_or_make("binary", "k" * 64, counting_make(log))
    seen.put(entry.files == FILES)


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Returns the warnings of this test, as if the process had given none before."""
    monkeypatch.setattr(cache_folder, "_said", set())
    caplog.set_level(logging.WARNING, logger="tilewright")
    return lambda: [record.getMessage() for record in caplog.records]


def test_concurrent_makers_make_once(tmp_path):
    context = multiprocessing.get_context("fork")
    go, seen, log = context.Event(), context.Queue(), tmp_path / "log"
    arguments = (tmp_path / "cache", log, go, seen)
    workers = [context.Process(target=writer, args=arguments) for _ in range(8)]
    for worker in workers:
        worker.start()
    go.set()
    assert all(seen.get(timeout=30) for _ in workers)
    for worker in workers:
        worker.join()
    assert log.read_text() == "made\n"
    left = [path.name for path in (tmp_path / "cache" / "binary" / "kk").iterdir()]
    assert left == ["k" * 64]  # neither a lock nor a temporary folder


def truncate(entry):
    path = entry / "b.bin"
    path.write_bytes(path.read_bytes()[:100])


def flip_a_bit(entry):
    data = bytearray((entry / "b.bin").read_bytes())
    data[5000] ^= 1
    (entry / "b.bin").write_bytes(data)


def remove_file(entry):
    (entry / "a.txt").unlink()


def add_file(entry):
    (entry / "c.txt").write_text("one more")


def add_byte_code(entry):
    (entry / "__pycache__").mkdir()
    (entry / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"anything")


def damage_manifest(entry):
    (entry / "manifest.json").write_text("{")


def empty_manifest(entry):
    (entry / "manifest.json").write_text("{}")


def nested_manifest(entry):
    (entry / "manifest.json").write_text("[" * 100_000)


def empty_entry(entry):
    """Empties an entry, and writes a manifest that lists no files."""
    manifest = json.loads((entry / "manifest.json").read_text())
    for name in FILES:
        (entry / name).unlink()
    (entry / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))


def earlier_layout(entry):
    """Writes an entry with hashes only, as entries were written before manifests contained the
    key."""
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps(manifest["files"]))


def folder_for_file(entry):
    (entry / "a.txt").unlink()
    (entry / "a.txt").mkdir()


def pipe_for_file(entry):
    (entry / "a.txt").unlink()
    os.mkfifo(entry / "a.txt")


def link_out(entry):
    outside = entry.parents[2] / "outside.txt"
    (entry / "a.txt").rename(outside)
    (entry / "a.txt").symlink_to(outside)


def entry_is_a_link(entry):
    outside = entry.parents[2] / "outside"
    entry.rename(outside)
    entry.symlink_to(outside)


def entry_is_a_file(entry):
    shutil.rmtree(entry)
    entry.write_text("in the way")


def writable_file(entry):
    (entry / "a.txt").chmod(0o666)


def writable_entry(entry):
    entry.chmod(0o777)


DAMAGES = [
    truncate,
    flip_a_bit,
    remove_file,
    add_file,
    add_byte_code,
    damage_manifest,
    empty_manifest,
    nested_manifest,
    empty_entry,
    earlier_layout,
    folder_for_file,
    pipe_for_file,
    link_out,
    entry_is_a_link,
    entry_is_a_file,
    writable_file,
    writable_entry,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_made_again(tmp_path, damage):
    store, log = KernelCache(tmp_path), tmp_path / "log"
    entry = store.get_or_make("binary", "aa", counting_make(log)).folder
    assert store.get_or_make("binary", "aa", counting_make(log)).folder == entry
    assert log.read_text() == "made\n"  # the control: an entry without damage is not made again
    damage(entry)
    assert store.find("binary", "aa") is None
    again = store.get_or_make("binary", "aa", counting_make(log))
    assert (again.folder, again.files) == (entry, FILES)
    assert log.read_text() == "made\nmade\n"
    assert {p.name: p.read_bytes() for p in entry.iterdir() if p.name in FILES} == FILES
    assert [p.name for p in entry.parent.iterdir()] == ["aa"]
    assert store.get_or_make("binary", "aa", counting_make(log)).files == FILES
    assert log.read_text() == "made\nmade\n"


@pytest.mark.parametrize("other", [("binary", "bb"), ("source", "aa")])
def test_an_entry_in_the_place_of_another_is_not_that_one(tmp_path, other):
    store = KernelCache(tmp_path)
    moved = store.get_or_make("binary", "aa", lambda: {"a.txt": b"of another key"}).folder
    place = store.entry(*other)
    place.parent.mkdir(parents=True)
    moved.rename(place)
    assert store.find(*other) is None
    assert store.get_or_make(*other, lambda: FILES).files == FILES


@pytest.mark.parametrize("whose", ["root", "entry", "a.txt"])
def test_what_another_user_put_there_is_not_used(tmp_path, monkeypatch, whose, warnings):
    root = tmp_path / "cache"
    store = KernelCache(root)
    planted = store.get_or_make("binary", "aa", lambda: {"a.txt": b"planted"}).folder
    assert store.find("binary", "aa").files == {"a.txt": b"planted"}
    place = {"root": root, "entry": planted, "a.txt": planted / "a.txt"}[whose]
    give_away(place, monkeypatch)
    assert store.find("binary", "aa") is None
    entry = store.get_or_make("binary", "aa", lambda: FILES)
    assert entry.files == FILES
    if whose == "root":
        assert root not in entry.folder.parents
        (said,) = warnings()
        assert f"{root} is not used" in said
        assert "it belongs to user" in said
        assert "TILEWRIGHT_CACHE_TRUST=1" in said


def test_a_file_in_place_of_the_folder_is_no_matter_of_trust(tmp_path, warnings):
    place = tmp_path / "cache"
    place.write_text("")
    assert KernelCache(place).get_or_make("binary", "aa", lambda: FILES).files == FILES
    (said,) = warnings()
    assert said.endswith("it is not a folder. Set TILEWRIGHT_CACHE_DIR to another folder")


def test_told_to_trust_it_uses_what_others_wrote(tmp_path, monkeypatch):
    store = KernelCache(tmp_path)
    entry = store.get_or_make("binary", "aa", lambda: FILES).folder
    entry.chmod(0o777)
    give_away(entry, monkeypatch)
    assert store.find("binary", "aa") is None
    monkeypatch.setenv("TILEWRIGHT_CACHE_TRUST", "1")
    assert store.find("binary", "aa").files == FILES
    (entry / "a.txt").write_text("damaged")
    assert store.find("binary", "aa") is None  # the hashes are checked even so


def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch, warnings):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o1777)
    entry = KernelCache(root).get_or_make("binary", "aa", lambda: FILES)
    assert entry.files == FILES
    assert list(root.iterdir()) == []
    assert "other users can write to it (drwxrwxrwt)" in warnings()[0]
    monkeypatch.setenv("TILEWRIGHT_CACHE_TRUST", "1")
    KernelCache(root).get_or_make("binary", "bb", lambda: FILES)
    assert KernelCache(root).entry("binary", "bb").is_dir()


def test_a_link_of_another_user_is_refused(tmp_path, monkeypatch, warnings):
    (tmp_path / "mine").mkdir()
    link = tmp_path / "cache"
    link.symlink_to(tmp_path / "mine")
    assert KernelCache(link).get_or_make("binary", "aa", lambda: FILES).files == FILES
    assert (
        KernelCache(link).entry("binary", "aa").is_dir()
    )  # the control: a link of the user is followed
    give_away(link, monkeypatch)
    assert KernelCache(link).find("binary", "bb") is None
    if os.geteuid() == 0:
        assert "it is a symbolic link of user" in warnings()[0]


@pytest.mark.parametrize(
    ("members", "name", "refused"),
    [([], "me", False), (["me"], "me", False), (["you"], "me", True), ([], "staff", True)],
)
def test_a_group_may_write_where_it_is_the_users_alone(monkeypatch, members, name, refused):
    me = SimpleNamespace(pw_name="me", pw_gid=4321)
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    cache_folder._is_own_group.cache_clear()
    mode = stat.S_IFDIR | 0o775
    status = os.stat_result((mode, 1, 1, 1, os.geteuid(), 4321, 0, 0, 0, 0))
    assert bool(cache_folder.distrust(status)) == refused
    cache_folder._is_own_group.cache_clear()


def modes_after_store(root, umask):
    before = os.umask(umask)
    try:
        store = KernelCache(root)
        place = store.get_or_make("binary", "aa", lambda: FILES).folder
        paths = [root, place.parent, place, place / "a.txt", place / "manifest.json"]
        reused = store.find("binary", "aa") is not None
        return [stat.S_IMODE(path.stat().st_mode) for path in paths], reused
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("umask", "trust", "folder", "file"),
    [
        (0o022, "", 0o755, 0o644),
        (0o027, "", 0o750, 0o640),
        (0o077, "", 0o700, 0o600),
        (0o002, "", 0o755, 0o644),  # others get no write permission: the cache would refuse it
        (0o000, "", 0o755, 0o644),
        (0o002, "1", 0o775, 0o664),
        (0o000, "1", 0o777, 0o666),
    ],
)
def test_entries_have_the_modes_that_the_umask_leaves(
    tmp_path, monkeypatch, umask, trust, folder, file
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_TRUST", trust)
    modes, reused = modes_after_store(tmp_path / "cache", umask)
    assert [oct(m) for m in modes] == [oct(m) for m in [folder] * 3 + [file] * 2]
    assert reused


def test_a_lock_is_open_to_whom_its_folder_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_TRUST", "1")
    store, seen = KernelCache(tmp_path / "cache"), []

    def make():
        (lock,) = (tmp_path / "cache").glob("binary/aa/*.lock")
        seen.append(stat.S_IMODE(lock.stat().st_mode))
        return FILES

    before = os.umask(0o002)
    try:
        store.get_or_make("binary", "aa", make)
    finally:
        os.umask(before)
    assert seen == [0o664]


@pytest.fixture
def public():
    folder = public_folder()
    yield folder
    shutil.rmtree(folder)


def entry_of_an_unwritable_cache(root):
    store, made = KernelCache(root), []

    def make():
        made.append(1)
        return FILES

    first = store.get_or_make("binary", "aa", make)
    again = store.get_or_make("binary", "aa", make)
    private = first.folder is not None and root not in first.folder.parents
    mode = stat.S_IMODE(cache_folder.private_folder().stat().st_mode)
    return first.files == again.files == FILES, private, len(made), mode, len(cache_folder._said)


@pytest.mark.parametrize("how", ["root", "parent", "file in the way"])
def test_a_cache_that_cannot_be_written_costs_the_sharing_alone(public, how):
    """If the cache cannot be written, the process makes the entry once, keeps it in a private
    folder, and warns once."""
    root = public / "cache"
    if how == "root":
        root.mkdir()
        if os.geteuid() == 0:
            os.chown(root, NOBODY, NOBODY)
        root.chmod(0o555)
    elif how == "parent":
        public.chmod(0o555)
    else:
        root.write_text("in the way")
    cache_folder._said.clear()
    answer = in_a_child(entry_of_an_unwritable_cache, root, user=NOBODY)
    assert answer == (True, True, 1, 0o700, 1)
    assert not root.is_dir() or list(root.iterdir()) == []


def entry_of_a_warm_cache(root):
    entry = KernelCache(root).get_or_make("binary", "aa", dict)
    return entry.files, entry.folder


def test_a_warm_cache_of_roots_that_cannot_be_written_serves(public):
    """A cache that belongs to root and cannot be written may be a part of a container image."""
    root = public / "cache"
    place = KernelCache(root).get_or_make("binary", "aa", lambda: FILES).folder
    os.utime(place, (0, 0))
    assert in_a_child(entry_of_a_warm_cache, root, user=NOBODY) == (FILES, place)


def store_under_a_limit(root):
    """Stores an entry while files of more than 4 KiB cannot be written, in the cache or
    elsewhere."""
    store = KernelCache(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    entry = store.get_or_make("binary", "aa", lambda: FILES)
    small = store.get_or_make("binary", "bb", lambda: {"a.txt": b"small"})
    return entry.files == FILES, entry.folder, small.folder


def test_what_no_disk_takes_runs_from_memory_and_leaves_no_half(tmp_path):
    store = KernelCache(tmp_path / "cache")
    assert in_a_child(store_under_a_limit, store.root) == (True, None, store.entry("binary", "bb"))
    assert list((store.root / "binary" / "aa").iterdir()) == []
    assert store.find("binary", "aa") is None
    assert store.get_or_make("binary", "aa", lambda: FILES).folder == store.entry("binary", "aa")


def test_a_full_disk_is_said_once_and_the_private_folder_takes_it(tmp_path, monkeypatch, warnings):
    store = KernelCache(tmp_path / "cache")
    really_open = os.open

    def full(path, flags, *arguments, dir_fd=None, **options):
        creates = dir_fd is not None and flags & os.O_CREAT
        if creates and str(store.root) in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_open(path, flags, *arguments, dir_fd=dir_fd, **options)

    monkeypatch.setattr(os, "open", full)
    for key in ("aa", "bb"):
        entry = store.get_or_make("binary", key, lambda: FILES)
        assert entry.files == FILES
        assert cache_folder.private_folder() in entry.folder.parents
    assert list(store.root.glob("binary/*/*")) == []
    (said,) = warnings()
    assert "No space left on device" in said


def test_failed_make_leaves_nothing(tmp_path):
    store = KernelCache(tmp_path)

    def fail():
        raise RuntimeError("the compiler gave up")

    with pytest.raises(RuntimeError, match="gave up"):
        store.get_or_make("binary", "aa", fail)
    assert list((tmp_path / "binary" / "aa").iterdir()) == []
    assert store.get_or_make("binary", "aa", lambda: FILES).files == FILES


def test_keys_do_not_run_together():
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("abc")
    assert key_of("ab", "c") == key_of("ab", "c")


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "~/kernels")
    assert cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("TILEWRIGHT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "tilewright"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache_dir() == tmp_path / "xdg" / "tilewright"
    monkeypatch.setenv(
        "XDG_CACHE_HOME", "relative"
    )  # the XDG specification says to ignore a relative path
    assert cache_dir() == tmp_path / ".cache" / "tilewright"


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "TILEWRIGHT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_dir().name == f"tilewright-cache-{os.geteuid()}"


TEMPLATE = """
import triton
import triton.language as tl

@triton.jit
def fill(x_ptr, VALUE: tl.constexpr):
    tl.store(x_ptr, VALUE + {})
"""


def test_edited_template_misses_the_cache(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "edited_templates"
    package.mkdir()
    (package / "helper.py").write_text("")
    template = package / "filling.py"
    template.write_text(TEMPLATE.format(1))
    store = KernelCache(tmp_path / "cache")
    spec = KernelSpec.make("edited_templates.filling", "fill", {"VALUE": 5}, {"x_ptr": "*i32"})
    first = build.emitted_path(spec, store)
    assert build.emitted_path(spec, store) == first
    assert "tl.store(x_ptr, 6)" in first.read_text()
    template.write_text(TEMPLATE.format(2))
    second = build.emitted_path(spec, store)
    assert second != first
    assert "tl.store(x_ptr, 7)" in second.read_text()
    # A template that this template imports counts, too.
    before = source_fingerprint(spec)
    template.write_text("from edited_templates.helper import nothing\n" + TEMPLATE.format(2))
    imported = source_fingerprint(spec)
    (package / "helper.py").write_text("# edited")
    assert len({before, imported, source_fingerprint(spec)}) == 3
    assert template_source.find_module("edited_templates.filling") == template
