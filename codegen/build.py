"""From a spec to something that runs (JIT or interpreter), or to a cubin for any target."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.codegen import emit as emitter
from tilewright.codegen.audit import Audit, audit_folder
from tilewright.codegen.cache import KernelCache, key_of
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target, get_target

if TYPE_CHECKING:
    from tilewright.codegen.interpreter import InterpretedKernel

WORKER = Path(__file__).with_name("worker.py")
COMPILE_TIMEOUT_S = 600

# A descriptor that a kernel makes on the device lives in global scratch memory.
_SCRATCH_MARK = "make_tensor_descriptor"


class BuildError(RuntimeError):
    """Triton did not compile a kernel; the message has its last words."""


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel, as it lies in the cache.

    folder holds source.py, kernel.ttir, kernel.ttgir, kernel.ptx, kernel.cubin, metadata.json and
    audit.json.
    """

    folder: Path

    @property
    def source(self) -> str:
        return (self.folder / "source.py").read_text("utf-8")

    @property
    def ptx(self) -> str:
        return (self.folder / "kernel.ptx").read_text("utf-8")

    @property
    def ttgir(self) -> str:
        return (self.folder / "kernel.ttgir").read_text("utf-8")

    @property
    def cubin(self) -> bytes:
        return (self.folder / "kernel.cubin").read_bytes()

    @cached_property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads((self.folder / "metadata.json").read_text("utf-8"))
        return metadata

    @cached_property
    def audit(self) -> Audit:
        return Audit.from_json((self.folder / "audit.json").read_text("utf-8"))


def emitted_path(spec: KernelSpec, store: KernelCache | None = None) -> Path:
    """The emitted file of a spec in the cache, `<name>.py`; emitted now where it is missing."""
    store = store or KernelCache()
    name = f"{spec.name}.py"

    def build(folder: Path) -> None:
        (folder / name).write_text(emitter.emit(spec), "utf-8")
        (folder / "spec.json").write_text(spec.to_json(), "utf-8")

    return store.get_or_build("source", emitter.source_fingerprint(spec), build) / name


def compile_for(
    source: KernelSpec | str,
    target: Target | str | None = None,
    *,
    python: str | None = None,
    options: Mapping[str, Any] | None = None,
    store: KernelCache | None = None,
) -> Artifact:
    """Compile a spec, or an emitted file's text, to a cubin; no GPU is needed.

    target: where the kernel is to run; by default the spec's own. python: an interpreter whose
    environment holds the triton to use, by default this one. options: further Triton options.
    Raises BuildError where Triton fails, also where it takes its process down.
    """
    if isinstance(source, KernelSpec):
        text = emitted_path(source, store).read_text("utf-8")
        target = target or source.target
    else:
        text = source
    if target is None:
        raise ValueError("target: expected one where the source is a text, got None")
    chip = get_target(target) if isinstance(target, str) else target
    if not chip.is_gpu:
        raise ValueError(f"target: expected a GPU, got {chip.name}; use load_interpreted")
    python = python or sys.executable
    request = {"arch": chip.arch, "options": dict(options or {})}
    key = key_of(
        text,
        *(_digest(path) for path in (WORKER, *_helper_files())),
        compiler_identity(python),
        json.dumps(request),
    )

    def build(folder: Path) -> None:
        (folder / "source.py").write_text(text, "utf-8")
        _run_worker(python, folder, request)
        audited = audit_folder(folder)
        (folder / "audit.json").write_text(audited.to_json(), "utf-8")

    return Artifact((store or KernelCache()).get_or_build("binary", key, build))


def _helper_files() -> list[Path]:
    names = ("dead_barriers.py", "audit.py", "sass.py")
    return [Path(__file__).with_name(name) for name in names]


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def compiler_identity(python: str) -> str:
    """Version and place of the triton that `python` would import."""
    script = "import importlib.util, triton; print(triton.__version__, triton.__file__)"
    if python == sys.executable:
        import triton

        return f"{triton.__version__} {triton.__file__}"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{python} cannot import triton:\n{_last_lines(done.stderr)}")
    return done.stdout.strip()


def _run_worker(python: str, folder: Path, request: Mapping[str, Any]) -> None:
    request_file = folder / "request.json"
    full = {"source": str(folder / "source.py"), "out": str(folder), **request}
    request_file.write_text(json.dumps(full), "utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            [python, str(WORKER), str(request_file)],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"Triton was still compiling after {COMPILE_TIMEOUT_S} s") from error
    if done.returncode:
        raise BuildError(f"{_exit_reason(done.returncode)}:\n{_last_lines(done.stderr)}")
    request_file.unlink()


def _exit_reason(code: int) -> str:
    if code < 0:
        return f"Triton took its process down ({signal.Signals(-code).name})"
    return "Triton did not compile the kernel"


def _last_lines(text: str, count: int = 25) -> str:
    return "\n".join(text.strip().split("\n")[-count:])


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"tilewright_emitted.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Launchable:
    """An emitted kernel on the present GPU: `kernel[grid](*run_time_args)`.

    function is Triton's own JITFunction, for callers that want its other abilities.
    """

    spec: KernelSpec
    function: Any
    options: Mapping[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launcher = self.function[grid]

        def launch(*args: Any) -> Any:
            return launcher(*args, **self.options)

        return launch


@cache
def load_jit(spec: KernelSpec) -> Launchable:
    """The spec's kernel, compiled by Triton at its first launch on the present GPU.

    Arguments are the run-time parameters in the order of spec.signature. Where the kernel makes
    descriptors on the device, an allocator for their memory is installed.
    """
    path = emitted_path(spec)
    module = _import_file(path)
    function = getattr(module, module.KERNEL)
    if not hasattr(function, "warmup"):
        raise BuildError("TRITON_INTERPRET is set: nothing is compiled; use load_interpreted")
    if needs_scratch(path.read_text("utf-8")):
        install_allocator()
    options: dict[str, Any] = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    options["enable_fp_fusion"] = True  # as worker.py has it: the defaults of releases differ
    if spec.maxnreg is not None:
        options["maxnreg"] = spec.maxnreg
    if spec.launch_pdl:
        options["launch_pdl"] = True
    return Launchable(spec, function, options)


def load_interpreted(spec: KernelSpec) -> InterpretedKernel:
    """The spec's kernel for CPU tensors, run by Triton's interpreter with corrected bf16."""
    from tilewright.codegen.interpreter import interpret

    module = _import_file(emitted_path(spec))
    return interpret(getattr(module, module.KERNEL))


def keep_ttgir(text: str) -> Path:
    """A file in the cache that holds a module's text, for Triton to compile."""
    name = "kernel.ttgir"

    def build(folder: Path) -> None:
        (folder / name).write_text(text, "utf-8")

    return KernelCache().get_or_build("ttgir", key_of(text), build) / name


def needs_scratch(source: str) -> bool:
    """Whether an emitted file makes tensor descriptors on the device."""
    return _SCRATCH_MARK in source


def install_allocator() -> None:
    """Let Triton take scratch memory from torch's caching allocator, on the launching stream."""
    import torch
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.int8)

    triton.set_allocator(allocate)
