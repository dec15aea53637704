"""Tests tuning without a GPU: which lowerings are tried, which one wins, what is stored, and when
it is not."""

from __future__ import annotations

import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.codegen.qkv.test_plan import LLAMA_8B, UNMEASURED, problem
from tilewright.codegen import emit
from tilewright.codegen.build.cache import KernelCache
from tilewright.codegen.qkv import measured, tune
from tilewright.codegen.qkv.plan import HERE, MODEL, TABLE, choose
from tilewright.codegen.qkv.tune import Case, Machine, NothingMeasuredError, bucket, trials, tuned
from tilewright.codegen.targets import SM90, SM100

H200 = Machine("NVIDIA H200", (("triton", "3.6.0"),))
CASE = Case(LLAMA_8B, 64, SM90, packed=False)


class FakeTimer:
    """Returns seconds by the name of a trial, and one second for other trials. Counts its calls."""

    def __init__(self, **seconds):
        self.seconds = seconds
        self.calls = 0

    def __call__(self, choices):
        self.calls += 1
        return [self.seconds.get(tune.name_of(choice), 1.0) for choice in choices]


def entries(store):
    return list((store.root / "tuned").glob("*/*/times.json"))


@pytest.fixture
def store(tmp_path):
    return KernelCache(tmp_path)


@pytest.mark.parametrize("wanted", trials(CASE))
def test_the_fastest_trial_wins_and_is_measured_once(wanted, store):
    timer = FakeTimer(**{wanted: 12e-6})
    first = tuned(CASE, H200, timer, store)
    assert (tune.name_of(first), first.source, first.seconds) == (wanted, HERE, 12e-6)
    assert "12.0 us measured here" in first.reason
    again = tuned(CASE, H200, FakeTimer(), KernelCache(store.root))
    assert again == first
    assert tuned(CASE, H200, None, store) == first
    assert timer.calls == 1
    assert len(entries(store)) == 1


def test_measured_here_goes_before_the_table_and_the_table_before_the_model(store):
    assert choose(LLAMA_8B, 64, SM90).source == TABLE
    assert choose(UNMEASURED, 64, SM90).source == MODEL
    assert tuned(CASE, H200, FakeTimer(library=1e-6), store).name == "library"
    assert tune.name_of(choose(LLAMA_8B, 64, SM90)) in trials(CASE)


@pytest.mark.parametrize("shipped", [measured.NUMBERS_FILE, measured.CODES_FILE])
def test_a_shipped_table_has_a_row_a_line(shipped):
    text = shipped.read_text("utf-8")
    facts = json.loads(text)
    rows = facts.pop("rows")
    assert measured.table_text(facts, rows) == text
    lines = [line.removesuffix(",") for line in text.split("\n") if line.startswith("  {")]
    assert [json.loads(line) for line in lines] == rows
    assert json.loads(measured.table_text(facts, [])) == {**facts, "rows": []}


def test_trials_are_few_distinct_and_for_the_target():
    for target in (SM90, SM100):
        for tokens in (1, 64, 4096):
            tried = trials(Case(LLAMA_8B, tokens, target, packed=True))
            assert 3 <= len(tried) <= tune.MAX_FUSED + 2
            assert "library" in tried


@pytest.mark.parametrize(
    ("case", "machine"),
    [
        (replace(CASE, num_tokens=128), H200),
        (replace(CASE, packed=True), H200),
        (replace(CASE, problem=UNMEASURED), H200),
        (replace(CASE, target=replace(SM90, num_sms=78)), replace(H200, gpu="NVIDIA H100")),
        (CASE, replace(H200, versions=(("triton", "3.7.0"),))),
    ],
)
def test_another_problem_machine_or_triton_is_measured_anew(case, machine, store):
    tuned(CASE, H200, FakeTimer(), store)
    timer = FakeTimer()
    assert tuned(case, machine, None, store) is None
    tuned(case, machine, timer, store)
    assert timer.calls == 1
    assert len(entries(store)) == 2


def test_another_emitter_is_measured_anew(store, monkeypatch):
    tuned(CASE, H200, FakeTimer(), store)
    monkeypatch.setattr(emit, "emitter_fingerprint", lambda: "another")
    assert tuned(CASE, H200, None, store) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1, 2]",
        '{"seconds": {}}',
        '{"seconds": {"library": "fast"}}',
        '{"seconds": {"library": -1.0}}',
        '{"seconds": {"a kernel of long ago": 1e-6}}',
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "damaged"])
def test_a_bad_entry_is_measured_anew(text, whole, store, monkeypatch):
    good = tuned(CASE, H200, FakeTimer(library=2e-6), store)
    (file,) = entries(store)
    file.write_text(text)
    if whole:  # as if it had been stored so
        path = file.with_name("manifest.json")
        manifest = json.loads(path.read_text())
        manifest["files"][file.name] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(manifest))
        assert store.find("tuned", file.parent.name) is not None
    assert tuned(CASE, H200, None, store) is None
    timer = FakeTimer(library=2e-6)
    assert tuned(CASE, H200, timer, store) == good
    assert timer.calls == 1
    assert json.loads(file.read_text())["seconds"]["library"] == 2e-6


def test_what_fails_is_no_candidate_and_nothing_is_kept_where_all_fail(store):
    names = list(trials(CASE))
    failing = dict.fromkeys(names, math.inf)
    with pytest.raises(NothingMeasuredError, match="none of"):
        tuned(CASE, H200, FakeTimer(**failing), store)
    assert entries(store) == []
    one = FakeTimer(**failing | {names[1]: 3e-6})
    assert tune.name_of(tuned(CASE, H200, one, store)) == names[1]


def test_an_error_of_the_timer_is_the_callers_and_nothing_is_kept(store):
    def broken(choices):
        raise MemoryError("no room for the scratch tensors")

    with pytest.raises(MemoryError, match="no room"):
        tuned(CASE, H200, broken, store)
    assert entries(store) == []


def test_threads_that_ask_at_once_measure_once(store):
    timer = FakeTimer(library=1e-6)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: tuned(CASE, H200, timer, store).reason, range(4)))
    assert len(found) == timer.calls == 1


def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "mine"))
    tuned(CASE, H200, FakeTimer())
    assert len(list((tmp_path / "mine" / "tuned").glob("*/*/times.json"))) == 1


@pytest.mark.parametrize(
    ("tokens", "stands_for"), [(1, 16), (16, 16), (17, 32), (8192, 8192), (9000, 16384)]
)
def test_buckets(tokens, stands_for):
    assert bucket(tokens) == stands_for


def test_a_lowering_without_a_rival_is_not_measured(store):
    scaled = replace(CASE, problem=problem(dtype="fp32"))
    assert list(trials(scaled)) == ["library"]
    timer = FakeTimer()
    assert "no other lowering to compare" in tuned(scaled, H200, timer, store).reason
    assert tuned(scaled, H200, None, store) is not None
    assert timer.calls == 0
