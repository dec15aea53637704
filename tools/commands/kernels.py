"""The command `tilewright kernels MODEL`, which audits every kernel. With `-o DIR` it writes the
source, PTX and cubin of each kernel."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands.common import (
    FAILED,
    CommandError,
    DebugOption,
    DynamicOption,
    JsonOption,
    ModelArgument,
    PatternsOption,
    TargetOption,
    errors_for_people,
    print_json,
    writable_folder,
)
from tilewright.tools.console import make_console
from tilewright.tools.files import write_whole

if TYPE_CHECKING:
    from tilewright.compiler import Kernel
    from tilewright.tools.kernel_audit import KernelAudit

MANIFEST = "manifest.json"
SUFFIXES = (".py", ".ptx", ".cubin", ".audit.json")


def kernels(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The folder to which files are written. Without it, no files are written.",
        ),
    ] = None,
    patterns: PatternsOption = None,
    dynamic: DynamicOption = None,
    target: TargetOption = "sm100",
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="The number of compilers that run at a time.")
    ] = os.cpu_count() or 1,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Audit every kernel of MODEL. With -o, write each kernel as .py, .ptx, .cubin and .audit.json.

    A manifest in the folder lists these files. A later run removes the files that the manifest of
    an earlier run lists and that the later run does not write; all other files stay. Compiled
    kernels are cached. Therefore a second run only copies files, and an interrupted run can be
    continued. The exit code is 1 if a kernel does not compile or breaks a rule of the target.
    """
    from tilewright.tools.commands.models import audited, load_and_lower
    from tilewright.tools.report.text_report import render_kernels

    with errors_for_people(debug):
        folder = None if output is None else writable_folder(output, "--output")
        earlier = set() if folder is None else listed_files(folder / MANIFEST)
        lowered = load_and_lower(model, patterns, dynamic, target, debug)
        outcomes = audited(lowered.kernels, target, workers=jobs)
        found: dict[str, Any] = {"model": model, "target": target, "versions": _versions()}
        found["kernels"] = [_told(folder, outcome, target) for outcome in outcomes]
        if folder is not None:
            _keep_only(folder, earlier, found)
        if as_json:
            print_json(found)
        else:
            console = make_console()
            console.print(render_kernels(outcomes, target))
            console.print(f"{len(outcomes)} kernels" + (f" in {folder}" if folder else ""))
    if not all(outcome.good for outcome in outcomes):
        raise typer.Exit(FAILED)


def _told(folder: Path | None, outcome: KernelAudit, target: str) -> dict[str, Any]:
    """Returns a kernel's entry in the manifest, and writes the kernel's files if there is a
    folder."""
    files = [] if folder is None else write_kernel(folder, outcome, target)
    return {"name": outcome.kernel.spec.name, "files": files} | outcome.as_dict()


def _keep_only(folder: Path, earlier: set[str], manifest: dict[str, Any]) -> None:
    """Writes the manifest, and removes files that only the earlier manifest listed."""
    for name in earlier.difference(*(kernel["files"] for kernel in manifest["kernels"])):
        (folder / name).unlink(missing_ok=True)
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def listed_files(manifest: Path) -> set[str]:
    """Returns the kernel files that a manifest lists. Returns none if there is no manifest.

    Raises CommandError if the file is not such a manifest, because it would be overwritten.
    """
    try:
        listed = json.loads(manifest.read_text("utf-8"))
        names = {name for kernel in listed["kernels"] for name in kernel["files"]}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--output: {manifest} is not a manifest of kernels; name another folder"
        ) from error
    return {name for name in names if Path(name).name == name and name.endswith(SUFFIXES)}


def write_kernel(folder: Path, outcome: KernelAudit, target: str) -> list[str]:
    """Writes the files of a kernel and returns their names. A kernel that did not compile has only
    its source."""
    kernel: Kernel = outcome.kernel
    parts: Mapping[str, bytes] = {".py": kernel.source.encode()}
    if outcome.audit is not None:
        parts = {**parts, **_compiled(kernel, outcome.audit, target)}
    names = [kernel.spec.name + suffix for suffix in parts]
    for name, content in zip(names, parts.values(), strict=True):
        write_whole(folder / name, content)
    return names


def _compiled(kernel: Kernel, audit: Any, target: str) -> dict[str, bytes]:
    artifact = kernel.build(target)
    return {
        ".ptx": artifact.ptx.encode(),
        ".cubin": artifact.cubin,
        ".audit.json": audit.to_json().encode(),
    }


def _versions() -> dict[str, str]:
    names: Sequence[str] = ("tilewright", "torch", "triton")
    return {name: importlib.metadata.version(name) for name in names}
