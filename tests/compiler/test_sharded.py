"""Tests models that several processes share.

Every layer must be fused on each rank. The error against the unsharded model in float64 must not
exceed the error of the unfused sharded model.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import fx

pytest.importorskip("transformers.distributed")
from tests.compiler import engine_ranks, sharded, sharded_parts
from tilewright.compiler.safety import ranks as agreed

_ROOT = Path(__file__).resolve().parents[2]
# How long the run may take on a busy machine. On an idle machine it takes one or two minutes.
_SECONDS = 900
# How long a rank may take on a busy machine for steps in which it must not wait for another rank.
_PATIENCE_S = 30
_CASES = [(ranks, name) for ranks, cases in sharded.WORLDS.items() for name in cases]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Returns the findings of each rank of each world. If several workers of pytest run the tests
    of this module, only one of them starts the ranks."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sharded"
    ended = folder / "ended"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            ended.write_text("unknown: the worker that started the ranks failed or was killed")
            ended.write_text(_run(folder))
    log = folder / "log.txt"
    said = log.read_text() if log.exists() else ""
    # The tracebacks of the ranks come last, because only the end of a long message is kept.
    said += "".join(path.read_text() for path in sorted(folder.glob("raised-*.txt")))
    assert ended.read_text() == "0", f"{said}\nended with {ended.read_text()}"
    found: dict = {"example": (folder / "example").read_text()}
    found["watched"] = (folder / "watched").read_text()
    found["log"] = said
    killed = {one: folder / f"killed-{one}.json" for one in (True, False)}
    found["killed"] = {one: json.loads(path.read_text()) for one, path in killed.items()}
    return found | {
        ranks: [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        for ranks in sharded.WORLDS
    }


def _run(folder):
    """Returns the exit codes of the processes. Ends all processes if they take too long."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}
    environment |= {"PYTHONFAULTHANDLER": "1"}  # shows where a signal met a rank
    with (folder / "log.txt").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "tests.compiler.sharded", str(folder)],
            cwd=_ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # its ranks can be ended together with it
        )
    try:
        return str(running.wait(timeout=_SECONDS))
    except subprocess.TimeoutExpired:
        return f"not within {_SECONDS} s"
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize(("ranks", "name"), _CASES)
def test_every_layer_is_fused_on_each_rank(worlds, ranks, name):
    for found in worlds[ranks]:
        assert sharded.WORLDS[ranks][name].fused <= set(found[name]["fused"])


@pytest.mark.parametrize(("ranks", "name"), _CASES)
def test_it_is_no_worse_than_the_model_as_written(worlds, ranks, name):
    for found in worlds[ranks]:
        for ours, eager in zip(found[name]["ours"], found[name]["eager"], strict=True):
            assert 0 < eager < 0.05
            assert ours < 1.25 * eager + 1e-3


@pytest.mark.parametrize(("ranks", "name"), _CASES)
def test_what_is_said_to_be_lost_is_lost(worlds, ranks, name):
    """FSDP2's hooks break the graph at each layer. Nothing else is reported, and no router that is
    fused counts as missed."""
    lost = ["capture GRAPH_BREAK"] if "weights" in name else []
    for found in worlds[ranks]:
        assert found[name]["lost"] == lost
        assert set(found[name]["advice"]) <= {"linear_residual COLLECTIVE"}


@pytest.mark.parametrize(
    ("ranks", "name"), [(n, name) for n, names in sharded_parts.RANKS.items() for name in names]
)
def test_parts_shared_by_hand_are_fused_or_say_why(worlds, ranks, name):
    """The parts are experts to which tokens are sent, sequence parallelism, and the stages of a
    pipeline."""
    fused, lost, advice = sharded_parts.WANTED[name]
    for found in worlds[ranks]:
        assert (found[name]["fused"], found[name]["lost"]) == (fused, lost)
        assert found[name]["advice"] == advice
        eager, ours = found[name]["errors"]
        assert ours <= 1.25 * eager + 1e-3
    assert max(found[name]["errors"][1] for found in worlds[ranks]) > 0


@pytest.mark.parametrize("name", sharded.REFUSED)
def test_what_cannot_be_shared_ends_with_what_eager_says(worlds, name):
    """If ranks cannot share a model, each rank gets the error of eager mode, and no rank waits for
    another."""
    _, said = sharded.REFUSED[name]
    for found in worlds[2]:
        eager, ours, seconds = found[name]
        assert seconds < _PATIENCE_S
        assert said in eager
        assert said in ours


@pytest.mark.parametrize("name", sharded.DIFFERING)
def test_ranks_fuse_the_same_sums_or_none(worlds, name):
    """Ranks fuse the same sums or none. A rank that cannot fuse does not let the other rank wait
    for its kernel."""
    one, other = (found[name] for found in worlds[2])
    fused = ["all_reduce_residual_norm"] if name in sharded.TOGETHER else []
    assert one["fused"] == other["fused"] == fused
    assert ("RANKS" in one["codes"]) == (not fused and name != "verify")
    assert max(one["seconds"], other["seconds"]) < _PATIENCE_S
    assert max(one["error"], other["error"]) <= (2**-5 if fused else 0.0)


@pytest.mark.parametrize("compiling", [True, False])
def test_a_rank_that_is_killed_ends_the_others(worlds, compiling):
    """If one rank is killed, the other gets an error in the library's collective. No rank waits for
    a rank that no longer compiles."""
    found = worlds["killed"][compiling]
    assert "Connection closed by peer" in found["said"] or "Connection reset" in found["said"]
    assert found["seconds"] < _PATIENCE_S


def test_a_rank_that_waits_for_a_killed_one_is_aborted(worlds):
    """The message has the process id and the rank of the killed process, which ranks sent each
    other before."""
    assert f"rank 1 (pid {worlds['watched']}) ended, and this rank waits for it" in worlds["log"]


def test_the_example_runs_on_two_ranks(worlds):
    assert worlds["example"] == "True"
    assert "each of 2 ranks is fused, and none is less accurate than" in worlds["log"]


def _summed_in(group):
    graph = fx.Graph()
    reduced = graph.call_function(
        torch.ops._c10d_functional.all_reduce.default, (graph.placeholder("x"), "sum", group)
    )
    reduced.meta["example_value"] = torch.zeros(3)
    return graph


def test_another_group_of_the_name_begins_anew(tmp_path):
    """A new group does not use what ranks wrote for an earlier group of the same name."""
    graph = _summed_in("0")
    for life in (1, 2):
        where = f"file://{tmp_path}/{life}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        try:
            compiled = [agreed._shared_of(graph)[0].now for _ in range(2)]
        finally:
            dist.destroy_process_group()
        assert [now.rpartition("/")[2] for now in compiled] == ["1", "2"]


def test_a_group_made_anew_does_not_hear_what_the_last_one_said(tmp_path):
    """Groups that are made anew do not read what was written for an earlier group. All groups use
    one store: one has another name for the same ranks, and one has the first name again."""

    store, names, places = dist.FileStore(f"{tmp_path}/store", 1), [], []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            names += [dist.new_group([0]).group_name for _ in range(2)]
            places += [agreed._shared_of(_summed_in(name))[0].now for name in names[-2:]]
        finally:
            dist.destroy_process_group()
    assert names[:2] == names[2:]
    assert len(set(places)) == 4


def test_ranks_that_compiled_the_same_hear_that_at_once(monkeypatch):
    """If all ranks compiled the same, the last rank that says so need not wait for any other."""
    store, sums = dist.HashStore(), agreed.RankSums("group", "place", None, 1)
    monkeypatch.setattr(agreed._compat, "store", lambda: store)
    monkeypatch.setattr(agreed.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(agreed, "_members", lambda group: [0, 1])
    monkeypatch.setattr(agreed, "WAIT_S", 0.1)
    for said, heard in (("plan", "plan"), ("another", "unfused")):
        sums.compiled += 1
        store.set(f"{sums.now}/0", said)
        assert agreed._heard(sums, "plan") == heard
        assert store.get(f"{sums.now}/1") == b"plan"


def test_the_example_says_how_it_is_started(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    example = runpy.run_path(str(_ROOT / "examples" / "tensor_parallel.py"))
    assert example["main"]() == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert example["main"]() == 2
    assert "expected a divisor of 8, got 3" in capsys.readouterr().out


@pytest.mark.parametrize("name", engine_ranks.NAMES)
def test_continuous_batching_of_a_shared_model_has_the_tokens_of_the_whole(worlds, name):
    first, second = (rank[f"engine-{name}"] for rank in worlds[2])
    assert first == engine_ranks.wanted(name)
    assert second in ([], first)  # the first rank has the requests
