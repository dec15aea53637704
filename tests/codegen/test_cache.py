"""The cache on disk: concurrent writers, damage, failed builds, keys."""

import multiprocessing
import time

import pytest

from tilewright.codegen import build, template_source
from tilewright.codegen.cache import KernelCache, cache_dir, key_of
from tilewright.codegen.emit import source_fingerprint
from tilewright.codegen.spec import KernelSpec


def counting_build(log):
    def fill(folder):
        with log.open("a") as file:
            file.write("built\n")
        (folder / "a.txt").write_text("first half ")
        time.sleep(0.05)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(b"second half" * 1000)

    return fill


def writer(root, log, go, seen):
    go.wait()
    entry = KernelCache(root).get_or_build("binary", "k" * 64, counting_build(log))
    seen.put((entry / "sub" / "b.bin").stat().st_size)


def test_concurrent_writers_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    go, seen, log = context.Event(), context.Queue(), tmp_path / "log"
    arguments = (tmp_path / "cache", log, go, seen)
    workers = [context.Process(target=writer, args=arguments) for _ in range(8)]
    for worker in workers:
        worker.start()
    go.set()
    sizes = [seen.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert sizes == [11000] * 8
    assert log.read_text() == "built\n"
    left = [path.name for path in (tmp_path / "cache" / "binary" / "kk").iterdir()]
    assert sorted(left) == ["k" * 64, "k" * 64 + ".lock"]


def truncate(entry):
    path = entry / "sub" / "b.bin"
    path.write_bytes(path.read_bytes()[:100])


def remove_file(entry):
    (entry / "a.txt").unlink()


def damage_manifest(entry):
    (entry / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [truncate, remove_file, damage_manifest])
def test_damaged_entry_is_built_again(tmp_path, damage):
    store, log = KernelCache(tmp_path), tmp_path / "log"
    entry = store.get_or_build("binary", "aa", counting_build(log))
    assert store.get_or_build("binary", "aa", counting_build(log)) == entry
    assert log.read_text() == "built\n"  # the control: an intact entry is not
    damage(entry)
    store.get_or_build("binary", "aa", counting_build(log))
    assert log.read_text() == "built\nbuilt\n"
    assert (entry / "a.txt").read_text() == "first half "
    assert (entry / "sub" / "b.bin").stat().st_size == 11000


def test_failed_build_leaves_nothing(tmp_path):
    store = KernelCache(tmp_path)

    def fail(folder):
        (folder / "half.txt").write_text("half")
        raise RuntimeError("the compiler gave up")

    with pytest.raises(RuntimeError, match="gave up"):
        store.get_or_build("binary", "aa", fail)
    assert not store.entry("binary", "aa").exists()
    assert [p.name for p in (tmp_path / "binary" / "aa").iterdir()] == ["aa.lock"]
    store.get_or_build("binary", "aa", counting_build(tmp_path / "log"))


def test_keys_do_not_run_together():
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("abc")
    assert key_of("ab", "c") == key_of("ab", "c")


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("TILEWRIGHT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "tilewright"


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
    # A template that this one imports counts too.
    before = source_fingerprint(spec)
    template.write_text("from edited_templates.helper import nothing\n" + TEMPLATE.format(2))
    imported = source_fingerprint(spec)
    (package / "helper.py").write_text("# edited")
    assert len({before, imported, source_fingerprint(spec)}) == 3
    assert template_source.find_module("edited_templates.filling") == template
