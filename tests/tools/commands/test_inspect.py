"""Tests the command `inspect`: graphs, the savings of a checkpoint, the census, and the steps of an
engine."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.tools.schemas import schema_checked
from tilewright.compiler.report.bars import BARS, PUBLISHED
from tilewright.compiler.report.step import SPENT


def test_inspect_prints_the_graphs_before_and_after(command):
    done = command("inspect", "mine.py:make", "--no-kernels", "--before", "--after")
    assert done.exit_code == 0, done.stderr
    before, _, after = done.stdout.partition("# graph 0, after")
    assert "tilewright" not in before
    assert after.count("torch.ops.tilewright.fused_qkv_paged") == 2


def test_inspect_as_json_keeps_to_its_schema(command):
    done = command("inspect", "mine.py:make", "--json", "--no-kernels")
    report = schema_checked("inspect", done.stdout)
    assert report["matches"]
    step = report["step"]
    assert step["fused"]["weights"] == step["total"]["weights"] > 0
    assert (step["class"], step["bar_percent"]) == ("decode, dense", PUBLISHED["sm100"])
    assert "sm100" in step["bar_why"]
    spent = sum(step["total"][name] for name in SPENT)
    assert spent == pytest.approx(step["total"]["modelled_us"])
    assert step["bound"] == "starts of kernels"


def test_inspect_says_how_sure_a_modelled_time_is(command):
    done = command("inspect", "mine.py:make", "--no-kernels", "--target", "sm90")
    assert re.search(r"A step: modelled at \S+ µs ± \d+ %, most of it starts of", done.stdout)
    assert f"± {BARS['decode, dense']} %: held-out steps of decode, dense" in done.stdout
    missed = command("inspect", "mine.py:make_missed", "--json", "--no-kernels")
    assert schema_checked("inspect", missed.stdout)["misses"]


CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


def write_checkpoint(folder: Path, **stated: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CHECKPOINT | stated))


def test_a_checkpoint_s_configuration_says_what_its_format_saves(command, tmp_path):
    pytest.importorskip("transformers", reason="checkpoints are built with transformers")
    write_checkpoint(tmp_path / "awq", quantization_config=AWQ)
    done = command("inspect", "awq", "--no-kernels", "--html", "page.html")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    size = "weights read per step: 621 KiB as int4 codes in groups of 64 (2 MiB in bfloat16)"
    assert size in said
    assert "), for 1 token " in said
    assert "linear_activation, int4 codes" in said
    assert "lm_head, 64 KiB: the model stores it in float16, not as codes" in said
    page = (tmp_path / "page.html").read_text()
    assert size in page
    assert '<a href="#savings">' in page
    assert '<table class="wide" id="savings-table">' in page
    torch._dynamo.reset()
    report = command("inspect", "awq/config.json", "--no-kernels", "--json")
    savings = schema_checked("inspect", report.stdout)["savings"]
    numbers = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512)
    assert savings["read"]["bfloat16"] == 2 * numbers
    assert savings["read"]["codes"] == numbers // 2
    assert savings["read"]["zeros"] == numbers // 64 // 2
    assert savings["tokens"] == 1
    assert savings["floor_us"] < savings["bfloat16_floor_us"]
    assert {row["by"]: row["count"] for row in savings["rows"]} == {
        "linear_activation": 2, "linear_residual": 4, "qkv_cache": 2
    }  # fmt: skip
    assert [one["scope"] for one in savings["unread"]] == ["lm_head"]


def test_a_dense_checkpoint_says_nothing_of_codes(command, tmp_path):
    pytest.importorskip("transformers", reason="checkpoints are built with transformers")
    write_checkpoint(tmp_path / "dense")
    done = command("inspect", "dense", "--no-kernels", "--html", "page.html")
    assert done.exit_code == 0, done.stderr
    assert "A step" in done.stdout
    assert "codes" not in done.stdout.partition("In words")[0]
    assert "savings" not in (tmp_path / "page.html").read_text()
    torch._dynamo.reset()
    report = command("inspect", "dense", "--no-kernels", "--json")
    assert "savings" not in schema_checked("inspect", report.stdout)


def test_a_format_that_a_configuration_does_not_tell_is_named(command, tmp_path):
    pytest.importorskip("transformers", reason="checkpoints are built with transformers")
    write_checkpoint(tmp_path / "other", quantization_config={"quant_method": "aqlm"})
    done = command("inspect", "other")
    assert done.exit_code == 2
    assert (
        "quant_method 'aqlm': modules of this method cannot be built from a configuration"
    ) in done.stderr
    write_checkpoint(tmp_path / "odd", quantization_config=AWQ | {"group_size": None})
    done = command("inspect", "odd")
    assert done.exit_code == 2
    assert "quantization_config cannot be read" in done.stderr
    (tmp_path / "other" / "config.json").write_text('{"model_type": "nothing"}')
    done = command("inspect", "other")
    assert done.exit_code == 2
    assert "no model can be built from it" in done.stderr


def test_the_census_and_a_module_are_in_the_report(command):
    asked = ("--no-kernels", "--census", "--at", "layers.0*")
    report = schema_checked("inspect", command("inspect", "mine.py:make", "--json", *asked).stdout)
    assert report["census"]["unaccounted"] == []
    assert {entry["account"] for entry in report["census"]["counts"]} >= {"match"}
    said = {entry["pattern"]: entry for entry in report["at"]["patterns"]}
    assert [site["pattern"] for site in said["qkv_cache"]["matches"]] == ["qkv_cache"]
    assert said["moe_router"]["matches"] == said["moe_router"]["nearest"] == []
    assert all(entry["looks_for"] for entry in said.values())
    assert {point["scope"].split(".")[1] for point in report["at"]["points"]} == {"0"}


def test_the_census_and_a_module_are_printed(command):
    done = command("inspect", "mine.py:make_missed", "--census", "--at", "layers.0*")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "0 unaccounted" in said
    assert "miss 4 qkv_cache ACCUMULATED_WRITE" in said
    assert "qkv_cache missed: layers.0" in said
    assert "moe_router no anchor. It looks for a choice of experts" in said
    assert "Kernels" not in said
    wrong = command("inspect", "mine.py:make", "--at", "layers.7")
    assert wrong.exit_code == 2
    assert "no operation of the graphs is in a module 'layers.7'" in wrong.stderr
    assert "layers.0" in wrong.stderr


ENGINE_MODELS = """
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    def make():
        config = GptOssConfig(
            vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        )
        with torch.device("meta"):
            model = GptOssForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
        return model, (), {}

    def make_state():
        return torch.nn.Linear(2, 2), (torch.ones(1, 2),), {}
"""


def test_inspect_shows_both_steps_of_continuous_batching(command, tmp_path):
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    (tmp_path / "served.py").write_text(textwrap.dedent(ENGINE_MODELS))
    done = command("inspect", "served.py:make", "--engine", "--no-kernels", "--json")
    assert done.exit_code == 0, done.stderr
    report = schema_checked("inspect", done.stdout)
    assert len(report["graphs"]) == 2
    assert report["graph_breaks"] == []
    writes = [match for match in report["matches"] if match["pattern"] == "qkv_cache"]
    assert [match["shapes"]["x"] for match in writes] == (
        ["bfloat16[8,64]"] * 2 + ["bfloat16[512,64]"] * 2
    )
    assert "UNRECOGNISED" not in {miss["code"] for miss in report["misses"]}
    done = command("inspect", "served.py:make_state", "--engine")
    assert done.exit_code == 2
    assert "--engine: model: expected a model of transformers" in done.stderr
    done = command("inspect", "served.py:make", "--engine", "--tp", "2")
    assert (done.exit_code, "cannot be used together with --tp" in done.stderr) == (2, True)
