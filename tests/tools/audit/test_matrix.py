"""Tests `make audit`: its cases, outcomes and exit status. `make audit` itself tries the
releases."""

import dataclasses
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tilewright.codegen.audit import Expectations
from tilewright.codegen.targets import SM100
from tilewright.tools.audit.qkv import MODELS, qkv_cases
from tilewright.tools.matrix import audit_matrix, environments
from tilewright.tools.matrix.audit_matrix import as_snapshot, as_table, audit_one, environment

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def cases():
    return qkv_cases(SM100)


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    root = tmp_path_factory.getbasetemp() / "tilewright-cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))


def small(cases):
    return next(case for case in cases if case.name.endswith(" store"))


def test_cases_cover_models_and_lowerings(cases):
    assert len({case.spec for case in cases}) == len(cases)
    for model in MODELS:
        kernels = {case.spec.kernel for case in cases if case.name.startswith(model.name)}
        assert kernels == {"qkv_projection", "qkv_projection_swapped", "qkv_epilogue"}, model
    for case in cases:
        assert case.spec.target == "sm100"
        assert (case.expectations.mma is None) == (case.spec.kernel == "qkv_epilogue")


def test_outcomes(cases):
    case = small(cases)
    good = audit_one(case, "here", Path(sys.executable), SM100)
    assert good.good
    assert good.audit.sm_target == "sm_100a"
    claims = dataclasses.replace(case, expectations=Expectations(tma_stores=True))
    bad = audit_one(claims, "here", Path(sys.executable), SM100)
    assert not bad.good
    assert bad.problems == ("tma stores: no TMA store (UTMASTG)",)
    constants = {**dict(case.spec.constants), "BLOCK_P": 48}
    spec = dataclasses.replace(case.spec, constants=tuple(sorted(constants.items())))
    broken = audit_one(dataclasses.replace(case, spec=spec), "here", Path(sys.executable), SM100)
    assert broken.audit is None
    assert "power of 2" in broken.error
    assert as_table([good, bad, broken], SM100).row_count == 3
    lines = as_snapshot([good, broken]).splitlines()
    assert lines[0].startswith(f"{case.name} | triton here | no mma UTMALDG=0")
    assert lines[1].endswith("| does not compile")


def command():
    app = typer.Typer()
    app.command()(audit_matrix.main)
    return app


@pytest.mark.parametrize(("claims", "status"), [({}, 0), ({"tma_loads": True}, 1)])
def test_exit_status(cases, monkeypatch, claims, status):
    case = dataclasses.replace(small(cases), expectations=Expectations(**claims))
    monkeypatch.setattr(audit_matrix, "environment", lambda release: Path(sys.executable))
    monkeypatch.setattr(audit_matrix, "audit_cases", lambda target: [case])
    result = RUNNER.invoke(command(), ["--release", "here"])
    assert result.exit_code == status, result.output
    assert ("tma loads: no TMA load" in result.output) == bool(status)
    assert f"{1 - status} of 1 good" in result.output


def test_no_kernel_of_that_name(cases, monkeypatch):
    monkeypatch.setattr(audit_matrix, "audit_cases", lambda target: [small(cases)])
    result = RUNNER.invoke(command(), ["--only", "nothing like this"])
    assert result.exit_code == 2


def test_environment_is_built_once_and_checked(tmp_path, monkeypatch):
    commands = []

    def run(*command):
        commands.append(command)
        python = tmp_path / "9.9.9" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text("#!/bin/sh\necho 9.9.9\n")
        python.chmod(0o755)

    monkeypatch.setattr(environments, "_run", run)
    assert environment("9.9.9", tmp_path).name == "python"
    assert [command[-1] for command in commands] == [str(tmp_path / "9.9.9"), "triton==9.9.9"]
    environment("9.9.9", tmp_path)
    assert len(commands) == 2
    # The installed version is not the requested one.
    monkeypatch.setattr(audit_matrix, "_version", lambda python: "9.9.9")
    with pytest.raises(RuntimeError, match=r"expected triton 0\.0\.1, got '9\.9\.9'"):
        environment("0.0.1", tmp_path)
