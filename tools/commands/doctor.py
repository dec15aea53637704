"""The command `tilewright doctor`, which shows what is installed, and what works on this
machine."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import typer

from tilewright.codegen.targets import Target, gpu_targets
from tilewright.tools.commands.common import FAILED, JsonOption, print_json
from tilewright.tools.console import make_console
from tilewright.tools.matrix.releases import newest_tried, release, tried_together

PACKAGES = ("tilewright", "torch", "triton", "transformers", "sympy", "networkx", "rich", "typer")
MARKS = {"ok": "green", "no": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the output.

    state: `ok`; `no` if the item is absent but optional, newer than any tested version, or not
    tested together with another item; or `failed`.
    """

    what: str
    state: str
    detail: str


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine: versions, GPU, cache, compiler and backend. The exit code is 1 if a check
    fails."""
    findings = [_python(), *map(_package, PACKAGES), *_pair(), _gpu()]
    findings += [_checked("cache folder", _cache), _checked("backend", _backend)]
    findings += [_checked(f"compiler for {t.name}", partial(_compile, t)) for t in gpu_targets()]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        console = make_console()
        for finding in findings:
            style = MARKS[finding.state]
            console.print(f"{finding.state:<7} {finding.what:<18} {finding.detail}", style=style)
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(FAILED)


def _python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", "ok" if platform.system() == "Linux" else "failed", detail)


def _package(name: str) -> Finding:
    try:
        return _tried(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        needed = "the model zoo needs it: pip install transformers peft"
        optional = name == "transformers"
        return Finding(name, "no" if optional else "failed", needed if optional else "missing")


def _tried(name: str, version: str) -> Finding:
    """Reports an installed package. Its state is `no` if it is newer than any tested version."""
    newest = newest_tried(name)
    if newest is None or release(version) <= release(newest):
        return Finding(name, "ok", version)
    return Finding(
        name, "no", f"{version} is newer than any tested version; the newest tested is {newest}"
    )


def _pair() -> list[Finding]:
    """Reports whether the installed torch and Triton were tested together. Reports nothing if one
    of them is missing."""
    try:
        installed = [importlib.metadata.version(name) for name in ("torch", "triton")]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [_together(*installed)]


def _together(torch: str, triton: str) -> Finding:
    tried = tried_together()
    if (release(torch), release(triton)) in [(release(a), release(b)) for a, b in tried]:
        return Finding("torch with triton", "ok", "tried together")
    listed = ", ".join(f"{a} with {b}" for a, b in tried)
    return Finding("torch with triton", "no", f"not tried together; tried are {listed}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        detail = "none: kernels are cross-compiled, and reports show what a GPU would run; "
        detail += "torch.compile leaves graphs as they are"
        return Finding("GPU", "no", detail)
    arch = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} (sm_{arch[0]}{arch[1]})"
    fits = [target.name for target in gpu_targets() if target.arch == 10 * arch[0] + arch[1]]
    if not fits:
        detail = f"{name}: no kernels for it; torch.compile leaves graphs as they are"
        return Finding("GPU", "no", detail)
    return Finding("GPU", "ok", f"{name}: target {fits[0]}")


def _checked(what: str, check: Callable[[], str]) -> Finding:
    """Returns a finding with the text that the check returned, or with the message of the error
    that it raised."""
    try:
        return Finding(what, "ok", check())
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Finding(what, "failed", f"{type(error).__name__}: {lines[-1]}")


def _cache() -> str:
    from tilewright.codegen.build.cache import cache_dir
    from tilewright.codegen.build.cache.folder import make_folders, refusal
    from tilewright.codegen.build.cache.upkeep import size_bound, survey

    folder = cache_dir()
    reason = refusal(folder)
    if reason is not None:
        raise PermissionError(f"{folder} is not used: {reason}")
    make_folders(folder, folder)
    with tempfile.NamedTemporaryFile(dir=folder):
        pass
    found = survey(folder)
    size = f"{found.size / 2**20:.0f} MiB of {size_bound() / 2**20:.0f}"
    stale = f", {len(found.stale)} leftovers" if found.stale else ""
    return f"{folder}, {len(found.entries)} entries, {size}{stale}"


def _backend() -> str:
    import torch

    from tilewright.compiler import lower

    weight, x = torch.zeros(8, 8), torch.zeros(2, 8)
    report = lower(torch.nn.functional.linear, (x, weight))
    return f"registered as {_entry_point()!r}; traced {len(report.graphs)} graph"


def _entry_point() -> str:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="tilewright")
    return entry.name


def _compile(target: Target) -> str:
    """Compiles a real but small kernel: the cache write of the op's first sample."""
    from tilewright.codegen.build import compile_for
    from tilewright.ops.contract import get_op

    op = get_op("paged_kv_store")
    plan = op.plan_for(op.sample_inputs(op.cases[0]), target.name)
    audit = compile_for(plan.specs[0], target).audit
    return f"{audit.sm_target}, {audit.registers} registers, {audit.spills} spills"
