"""Models that two processes share: every layer is fused on each rank, and no further from the
unsharded model in float64 than the sharded one as it was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers.distributed")
from tests.compiler import sharded

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 180


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found; both are ended where they take too long."""
    folder = tmp_path_factory.mktemp("sharded")
    # What torchrun tells: transformers reads it.
    told = {"WORLD_SIZE": str(sharded.RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    running = []
    for rank in range(sharded.RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with (folder / f"{rank}.txt").open("w") as log:
            command = [sys.executable, "-m", "tests.compiler.sharded", str(rank), str(folder)]
            environment = os.environ | told | own
            running.append(
                subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)
            )
    try:
        codes = [process.wait(timeout=_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * sharded.RANKS, (folder / "0.txt").read_text()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(sharded.RANKS)]


@pytest.mark.parametrize("name", sharded.CASES)
def test_every_layer_is_fused_on_each_rank(ranks, name):
    wanted = {"qkv_cache", "cache_attention"}
    if "llama" not in name:
        wanted.add("moe")
    for found in ranks:
        assert wanted <= set(found[name]["fused"])


@pytest.mark.parametrize("name", sharded.CASES)
def test_it_is_no_worse_than_the_model_as_written(ranks, name):
    for found in ranks:
        for ours, eager in zip(found[name]["ours"], found[name]["eager"], strict=True):
            assert 0 < eager < 0.05
            assert ours < 1.25 * eager + 1e-3
