"""Tests kernels, verify, diff, explain, zoo, doctor and bench: what each prints, writes and
returns."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import textwrap
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.tools.test_cli import CACHE_MODEL
from tilewright.codegen.build import BuildError
from tilewright.codegen.build.cache import KernelCache, key_of
from tilewright.codegen.targets import SM90, SM100
from tilewright.compiler.report.bars import BARS, PUBLISHED
from tilewright.compiler.report.step import SPENT
from tilewright.patterns.language import CODES
from tilewright.tools.cli import app
from tilewright.tools.commands import doctor
from tilewright.tools.matrix.releases import newest_tried
from tilewright.tools.report.miss_guide import miss_guide

REAL_MODELS = """
    import torch

    def make_real(device="cpu"):
        torch.manual_seed(0)
        model = mine.Model(mine.by_index).to(torch.bfloat16).requires_grad_(False)
        return model, (torch.randn(3, 128, dtype=torch.bfloat16), torch.tensor([1, 5, 40])), {}
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Returns `command(*arguments)`, which runs the program in a folder that holds mine.py and
    real.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(CACHE_MODEL))
    (tmp_path / "real.py").write_text("import mine\n" + textwrap.dedent(REAL_MODELS))
    for name in ("mine", "real"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch._dynamo.reset()
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def schema_checked(command: str, text: str) -> dict:
    """Returns the JSON that a command printed, after a check against its published schema."""
    data = json.loads(text)
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the extra 'dev'")
    schema = json.loads(files("tilewright.tools").joinpath(f"schemas/{command}.json").read_text())
    jsonschema.validate(data, schema)
    return data


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
    assert "lm_head, 64 KiB: stored in float16: the model holds no codes for it" in said
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


def test_kernels_writes_every_file_and_a_second_run_compiles_nothing(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ("kernels", "mine.py:make", "-o", "out/nested", "--target", "sm90", "--json")
    done = command(*arguments)
    assert done.exit_code == 0, done.stderr
    manifest = schema_checked("kernels", done.stdout)
    folder = tmp_path / "out" / "nested"
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert manifest["kernels"]
    for kernel in manifest["kernels"]:
        suffixes = {name.removeprefix(kernel["name"]) for name in kernel["files"]}
        assert suffixes == {".py", ".ptx", ".cubin", ".audit.json"}
        assert all((folder / name).stat().st_size for name in kernel["files"])
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json",
        *(name for kernel in manifest["kernels"] for name in kernel["files"]),
    }
    compiled = "tilewright.codegen.build._run_worker"
    monkeypatch.setattr(compiled, lambda *a: pytest.fail("compiled again"))
    torch._dynamo.reset()
    assert command(*arguments).exit_code == 0
    torch._dynamo.reset()
    there = set(tmp_path.rglob("*"))
    told = command("kernels", "mine.py:make", "--target", "sm90", "--json")
    audits = [kernel | {"files": []} for kernel in manifest["kernels"]]
    assert schema_checked("kernels", told.stdout)["kernels"] == audits
    assert set(tmp_path.rglob("*")) == there, "without -o nothing is written"


@pytest.fixture
def without_compiler(monkeypatch):
    """Makes the compilation of emitted kernels fail."""

    def fail(*arguments):
        raise BuildError("ptxas: out of registers")

    monkeypatch.setattr("tilewright.codegen.build._run_worker", fail)


def test_a_folder_loses_an_earlier_model_s_kernels_and_nothing_else(
    command, tmp_path, monkeypatch, without_compiler
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    folder, outside = tmp_path / "out", tmp_path / "outside.py"
    command("kernels", "mine.py:make", "-o", "out")
    old = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert old
    for mine in (folder / "mine.py", folder / "notes.txt", outside):
        mine.write_text("the user's own")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["kernels"][0]["files"] += ["notes.txt", "../outside.py", "", "."]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    kept = {"mine.py", "notes.txt", "manifest.json"}
    for model, kernels in (("mine.py:make", old), ("mine.py:make_missed", set())):
        torch._dynamo.reset()
        command("kernels", model, "-o", "out")
        assert {path.name for path in folder.iterdir()} == kept | kernels
    assert outside.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"name": "an app"}', '{"kernels": 3}'])
def test_a_manifest_of_somebody_else_is_left_alone(command, tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    done = command("kernels", "mine.py:make", "-o", ".")
    assert done.exit_code == 2
    assert "manifest.json is not a manifest of kernels" in done.stderr
    assert (tmp_path / "manifest.json").read_text() == content


def test_a_kernel_that_does_not_compile_is_exit_code_one(
    command, tmp_path, monkeypatch, without_compiler
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    done = command("kernels", "mine.py:make", "-o", "out", "--json")
    assert done.exit_code == 1
    (kernel,) = schema_checked("kernels", done.stdout)["kernels"]
    assert "out of registers" in kernel["error"]
    assert [Path(name).suffix for name in kernel["files"]] == [".py"]


def test_verify_compares_every_rewrite_with_float64(command):
    done = command("verify", "real.py:make_real", "--json")
    assert done.exit_code == 0, done.stderr
    (site,) = schema_checked("verify", done.stdout)["sites"]
    assert (site["pattern"], site["scope"], site["count"]) == ("qkv_cache", "layers.*", 2)
    assert 0 < site["plain_error"] < 0.02
    assert 0 < site["fused_error"] <= site["allowed"]
    said = command("verify", "real.py:make_real").stdout
    assert "good" in said
    assert said.rstrip().endswith("verified: 2 sites, none of them is less accurate than allowed")


def test_verify_finds_a_wrong_rewrite(command, monkeypatch):
    monkeypatch.setattr("tilewright.ops.qkv.qkv_cache.write_kv", lambda *a, **k: None)
    done = command("verify", "real.py:make_real", "--json")
    assert done.exit_code == 1
    (site,) = json.loads(done.stdout)["sites"]
    assert not site["good"]
    assert site["fused_error"] > site["allowed"]


def test_a_large_cache_hides_no_wrong_write(command, tmp_path, monkeypatch):
    """Only the elements that a run changed are compared: three of many slots."""
    (tmp_path / "large.py").write_text(
        "import torch, mine, real\n\ndef make():\n"
        "    model, args, kwargs = real.make_real()\n"
        "    for layer in model.layers:\n"
        "        layer.k_cache = torch.randn(20000, 2, 32, dtype=torch.bfloat16)\n"
        "        layer.v_cache = torch.randn(20000, 2, 32, dtype=torch.bfloat16)\n"
        "    return model, args, kwargs\n"
    )
    assert command("verify", "large.py:make").exit_code == 0
    monkeypatch.setattr("tilewright.ops.qkv.qkv_cache.write_kv", lambda *a, **k: None)
    torch._dynamo.reset()
    assert command("verify", "large.py:make").exit_code == 1


def test_verify_of_meta_tensors_says_that_it_needs_data(command):
    done = command("verify", "mine.py:make")
    assert done.exit_code == 2
    assert "meta device" in done.stderr
    assert "`real` in docs/command-line.md" in done.stderr


def test_diff_of_saved_reports_names_what_was_lost(command, tmp_path):
    for name, model in (("a", "mine.py:make"), ("b", "mine.py:make_missed")):
        torch._dynamo.reset()
        report = command("inspect", model, "--json", "--no-kernels").stdout
        (tmp_path / f"{name}.json").write_text(report)
    assert command("diff", "a.json", "a.json").exit_code == 0
    done = command("diff", "a.json", "b.json", "--json")
    assert done.exit_code == 1
    changes = schema_checked("diff", done.stdout)["changes"]
    assert [(c["before"], c["after"]) for c in changes] == [(2, 0), (0, 2)]
    assert "ACCUMULATED_WRITE" in changes[1]["what"]
    text = command("diff", "a.json", "b.json").stdout
    assert text.startswith("- layers.*  qkv_cache -> fused_qkv_paged")


@pytest.mark.parametrize("content", ["", "{", '{"matches": 3}', "onlyoneword\n", "\x00\x01"])
def test_diff_of_a_corrupt_file_is_one_line(command, tmp_path, content):
    (tmp_path / "bad").write_text(content)
    done = command("diff", "bad", "bad")
    assert done.exit_code == 2
    assert done.stderr.startswith("tilewright: bad: ")
    assert len(done.stderr.splitlines()) == 1


def test_explain_knows_every_code_with_a_text(command):
    done = command("explain", "--json")
    codes = schema_checked("explain", done.stdout)["codes"]
    assert {entry["code"] for entry in codes} == set(CODES)
    assert all(guide.text for guide in miss_guide(CODES).values())
    one = command("explain", "growing-cache").stdout
    assert one.startswith("GROWING_CACHE: ")
    assert "static cache" in one


def test_explain_of_an_unknown_code_suggests_one(command):
    done = command("explain", "GROWING_CASH")
    assert done.exit_code == 2
    assert "did you mean 'GROWING_CACHE'?" in done.stderr


@pytest.mark.parametrize("place", ["codes.py", "codes.py:make", "codes"])
def test_explain_knows_the_codes_of_a_user_s_file(command, tmp_path, monkeypatch, place):
    (tmp_path / "codes.py").write_text(
        "from tilewright.patterns.language import register_code\n"
        "print('a line of its own')\nregister_code('MY_CODE', 'what it means')\n"
    )
    monkeypatch.delitem(sys.modules, "codes", raising=False)
    assert command("explain", "MY_CODE").exit_code == 2
    try:
        done = command("explain", "my-code", "--from", place)
        listed = schema_checked("explain", command("explain", "--from", place, "--json").stdout)
    finally:
        CODES.pop("MY_CODE", None)
    assert done.stdout.splitlines()[0] == "MY_CODE: what it means"
    assert "MY_CODE" in {entry["code"] for entry in listed["codes"]}
    missing = command("explain", "MY_CODE", "--from", "absent.py")
    assert missing.exit_code == 2
    assert missing.stderr.startswith("tilewright: absent.py: no such file")


def test_zoo_lists_every_model(command):
    models = schema_checked("zoo", command("zoo", "--json").stdout)["models"]
    assert {"llama3-8b", "qwen3-30b-a3b"} <= {model["name"] for model in models}
    assert "llama3-8b" in command("zoo").stdout


def test_doctor_checks_this_machine(command, tmp_path, monkeypatch):
    """Tests two chips. tests/tools/audit/test_chips.py compiles for the others."""
    monkeypatch.setattr(doctor, "gpu_targets", lambda: (SM90, SM100))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    done = command("doctor", "--json")
    findings = {f["what"]: f for f in schema_checked("doctor", done.stdout)["findings"]}
    assert done.exit_code == 0, done.stdout
    assert findings["compiler for sm100"]["detail"].startswith("sm_100a")
    assert findings["torch"]["detail"] == importlib.metadata.version("torch")


def test_doctor_says_where_a_version_is_newer_than_any_tried():
    newest = newest_tried("torch")
    assert doctor._tried("torch", f"{newest}+cu130").state == "ok"
    later = doctor._tried("torch", "99.0.0a0")
    assert later.state == "no"
    assert newest in later.detail
    assert doctor._tried("rich", "99.0").state == "ok"


@pytest.fixture
def doctor_compiles_nothing(monkeypatch):
    """Replaces the compilation of a kernel for each target, which takes a second each."""
    monkeypatch.setattr(doctor, "gpu_targets", lambda: ())


@pytest.mark.usefixtures("doctor_compiles_nothing")
def test_doctor_reports_an_unwritable_cache(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    done = command("doctor", "--json")
    assert done.exit_code == 1
    states = {f["what"]: f["state"] for f in json.loads(done.stdout)["findings"]}
    assert states["cache folder"] == "failed"


def test_bench_lists_what_there_is_and_refuses_what_there_is_not(command):
    rows = schema_checked("bench", command("bench", "--json").stdout)["benchmarks"]
    assert {"qkv_cache", "compile_time"} <= {row["name"] for row in rows}
    assert all(row["question"] for row in rows)
    done = command("bench", "nonsense")
    assert done.exit_code == 2
    assert "no benchmark nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels", "llama3_8b", "-o", "x"), "is not a zoo name"),
        (("kernels", "mine.py:make", "-o", "mine.py"), "--output: cannot write to mine.py"),
        (("inspect", "mine.py:make", "--html", "no/such/page.html"), "--html: no such folder"),
        (("inspect", "mine.py:make", "--json", "--after"), "--json cannot be used together with"),
        (("verify", "mine.py:make_untraceable"), "cannot be traced: RuntimeError: boom"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(command, arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_kernels_are_audited_without_a_cache_that_can_be_written(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    done = command("inspect", "mine.py:make", "--json")
    assert done.exit_code == 0
    kernels = schema_checked("inspect", done.stdout)["kernels"]
    assert kernels
    assert all(kernel["audit"]["registers"] for kernel in kernels)


def test_no_folder_to_compile_in_is_one_line(command, monkeypatch):
    def nowhere(*arguments, **options):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tilewright.codegen.build.private_folder", nowhere)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "/proc/no/such/cache")
    done = command("inspect", "mine.py:make")
    assert done.exit_code == 2
    assert "No usable temporary directory" in done.stderr.splitlines()[-1]
    assert "TMPDIR names another" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


@pytest.mark.usefixtures("doctor_compiles_nothing")
def test_doctor_says_what_the_cache_holds_and_why_it_is_not_used(command, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    monkeypatch.setenv("TILEWRIGHT_CACHE_SIZE", "3GiB")
    KernelCache().get_or_make("source", key_of("one"), lambda: {"a.py": bytes(2 << 20)})
    assert doctors_cache(command) == ("ok", f"{root}, 1 entries, 2 MiB of 3072")
    root.chmod(0o777)
    state, detail = doctors_cache(command)
    assert state == "failed"
    assert "is not used: other users can write to it" in detail


def doctors_cache(command):
    done = command("doctor", "--json")
    findings = {f["what"]: f for f in schema_checked("doctor", done.stdout)["findings"]}
    return findings["cache folder"]["state"], findings["cache folder"]["detail"]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_benchmark_without_its_gpu_is_one_line(command):
    done = command("bench", "cache_size")
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "tilewright: cache_size needs an NVIDIA GPU, and there is none here"
    ]


def test_help_of_every_command_and_completion(command):
    text = command("--help").stdout
    names = ("inspect", "kernels", "verify", "diff", "explain", "zoo", "doctor", "cache", "bench")
    for name in names:
        assert name in text
        shown = command(name, "--help")
        assert shown.exit_code == 0
        assert "\x1b[" not in shown.stdout
    assert "--install-completion" in text


def test_bench_draws_what_is_kept(command, tmp_path):
    done = command("bench", "qkv_cache", "compile_time", "--plot", "plots", "--json")
    assert done.exit_code == 0, done.stderr
    (drawn,) = schema_checked("bench", done.stdout)["plots"]
    assert drawn == "plots/qkv_cache.svg"
    text = (tmp_path / drawn).read_text()
    for word in ("llama3-70b, static", "tilewright", "eager", "NVIDIA H200"):
        assert f"<!-- {word} -->" in text or word in text


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
