"""Tests the command `bench`: its list, a missing GPU, and charts."""

from __future__ import annotations

import pytest
import torch

from tests.tools.schemas import schema_checked


def test_bench_lists_what_there_is_and_refuses_what_there_is_not(command):
    rows = schema_checked("bench", command("bench", "--json").stdout)["benchmarks"]
    assert {"qkv_cache", "compile_time"} <= {row["name"] for row in rows}
    assert all(row["question"] for row in rows)
    done = command("bench", "nonsense")
    assert done.exit_code == 2
    assert "no benchmark nonsense" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_benchmark_without_its_gpu_is_one_line(command):
    done = command("bench", "cache_size")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "tilewright: cache_size needs an NVIDIA GPU, and there is none here"
    ]


def test_bench_draws_what_is_kept(command, tmp_path):
    done = command("bench", "qkv_cache", "compile_time", "--plot", "plots", "--json")
    assert done.exit_code == 0, done.stderr
    (drawn,) = schema_checked("bench", done.stdout)["plots"]
    assert drawn == "plots/qkv_cache.svg"
    text = (tmp_path / drawn).read_text()
    for word in ("llama3-70b, static", "tilewright", "eager", "NVIDIA H200"):
        assert f"<!-- {word} -->" in text or word in text
