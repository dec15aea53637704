"""Tests the part of a zoo model that one of several ranks has, without the other ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

pytest.importorskip("transformers.distributed")
from tests.tools.schemas import schema_checked
from tilewright.codegen.targets import SM90, SM100, get_target
from tilewright.tools.cli import app
from tilewright.tools.models.sharding import Collective, check_sharding, one_rank_of
from tilewright.tools.zoo import ModelError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def inspected(*options):
    done = CliRunner().invoke(app, ["inspect", *options, "--no-kernels"])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_a_rank_of_a_mixture_is_reported_in_full_size():
    report = schema_checked(
        "inspect", inspected(*["qwen3-30b-a3b", "--tp", "4", "--ep", "4", "--json"])
    )
    rank = report["rank"]
    assert sum(rank["layers"].values()) == 48
    wanted = {"qkv_cache", "cache_attention", "moe", "moe_router"}
    assert {name: rank["fused"].get(name) for name in wanted} == dict.fromkeys(wanted, 48)
    # Each token sends 2048 bfloat16 numbers after each attention, after each mixture and after the
    # embedding.
    reduced = [one for one in rank["collectives"] if one["kind"] == "all_reduce"]
    assert reduced == [{"kind": "all_reduce", "bytes": 2 * 2048, "count": 2 * 48 + 1}]
    heads, experts = (32 + 2 * 4 + 32) * 128 * 2048 // 4, 2 * 3 * 2048 * 768
    router, words, norms = 128 * 2048, 151936 * 2048 // 4, 2 * 2048 + 2 * 128
    layer = heads + experts + router + norms
    assert rank["weight_bytes"] == 2 * (48 * layer + words + 2048)
    assert rank["cache_bytes"] == 2 * 2 * 48 * 2048 * 128
    sites = [match["shapes"] for match in report["matches"] if match["pattern"] == "moe"]
    assert {(site["experts"], site["routed"]) for site in sites} == {(32, 128)}
    assert not dist.is_initialized()  # docs/tutorials/two-gpus.md explains it in words


def test_a_process_with_ranks_of_its_own_is_refused():
    with (
        one_rank_of(2),
        pytest.raises(ModelError, match="already belongs to a process group"),
        one_rank_of(2),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "tp", "ep", "message"),
    [
        ("llama3-8b", 3, 1, "--tp: 3 ranks do not divide num_attention_heads = 32"),
        ("qwen3-30b-a3b", 8, 8, "--tp: 8 ranks do not divide num_key_value_heads = 4"),
        ("mixtral-8x7b", 4, 2, "--ep: expected 1 or the number of ranks of --tp, 4, got 2"),
        ("llama3-8b-paged", 2, 1, "--tp: expected one of the zoo's models"),
        ("mine.py:decode", 2, 1, "--tp: expected one of the zoo's models"),
    ],
)
def test_what_cannot_be_shared_is_refused(model, tp, ep, message):
    with pytest.raises(ModelError, match="--") as raised:
        check_sharding(model, tp, ep)
    assert message in str(raised.value)


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
def test_a_ring_s_bytes_go_over_the_links_of_one_chip(target):
    size = 8 * 10**8
    gathered, summed = (Collective(kind, size, 3) for kind in ("all_gather", "all_reduce"))
    sent = 3 * 7 * 10**8 / target.link_bytes_per_s
    assert gathered.seconds(target, 8) == pytest.approx(sent + 3 * target.collective_s)
    assert summed.seconds(target, 8) == pytest.approx(2 * sent + 3 * target.collective_s)
    assert get_target(target.name).link_bytes_per_s < target.hbm_bytes_per_s
