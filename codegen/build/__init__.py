"""A spec's kernel, emitted and built: for Triton's JIT, its interpreter, or as a cubin."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import linecache
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilewright.codegen import emit as emitter
from tilewright.codegen.build.cache import Entry, KernelCache, key_of
from tilewright.codegen.build.cache.folder import private_folder, warn_once
from tilewright.codegen.build.worker import DISK_ERROR_EXIT
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target, get_target

if TYPE_CHECKING:
    from tilewright.codegen.audit import Audit
    from tilewright.codegen.build.interpreter import InterpretedKernel

WORKER = Path(__file__).with_name("worker.py")
COMPILE_TIMEOUT_S = 600

# A descriptor that a kernel makes on the device lives in global scratch memory.
_SCRATCH_MARK = "make_tensor_descriptor"


class BuildError(RuntimeError):
    """Triton did not compile a kernel; the message has its last words."""


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel.

    files: source.py, kernel.ttir, kernel.ttgir, kernel.ptx, kernel.cubin, metadata.json and
    audit.json, by name. folder: where they lie; None where none could be written.
    """

    folder: Path | None
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def source(self) -> str:
        return self.files["source.py"].decode()

    @property
    def ptx(self) -> str:
        return self.files["kernel.ptx"].decode()

    @property
    def ttgir(self) -> str:
        return self.files["kernel.ttgir"].decode()

    @property
    def cubin(self) -> bytes:
        return self.files["kernel.cubin"]

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads(self.files["metadata.json"])
        return metadata

    @functools.cached_property
    def audit(self) -> Audit:
        from tilewright.codegen.audit import Audit

        return Audit.from_json(self.files["audit.json"].decode())


def emitted(spec: KernelSpec, store: KernelCache | None = None) -> Entry:
    """The entry of a spec's emitted file, `<name>.py`; emitted now where it is missing."""

    names = {f"{spec.name}.py", "spec.json"}

    def make() -> dict[str, bytes]:
        return {
            f"{spec.name}.py": emitter.emit(spec).encode(),
            "spec.json": spec.to_json().encode(),
        }

    def is_whole(entry: Entry) -> bool:
        """An entry may have been brought along."""
        return entry.files.keys() == names

    key = emitter.source_fingerprint(spec)
    return (store or KernelCache()).get_or_make("source", key, make, is_whole)


def emitted_path(spec: KernelSpec, store: KernelCache | None = None) -> Path:
    """The emitted file of a spec, for people and their tools; emitted now where it is missing.

    Raises OSError where it cannot be written.
    """
    entry, name = emitted(spec, store), f"{spec.name}.py"
    if entry.folder is not None:
        return entry.folder / name
    path = private_folder() / name
    path.write_bytes(entry.files[name])
    return path


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
    Raises BuildError where Triton fails, also where it aborts its process.
    """
    if isinstance(source, KernelSpec):
        text = emitted(source, store).text(f"{source.name}.py")
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

    def make() -> dict[str, bytes]:
        from tilewright.codegen.audit import audit_folder

        with tempfile.TemporaryDirectory(dir=private_folder()) as name:
            folder = Path(name)
            (folder / "source.py").write_text(text, "utf-8")
            _run_worker(python, folder, request)
            shutil.rmtree(folder / ".triton", ignore_errors=True)  # Triton's own, the same again
            audited = audit_folder(folder).to_json().encode()
            made = {path.name: path.read_bytes() for path in folder.iterdir()}
            return made | {"audit.json": audited}

    entry = (store or KernelCache()).get_or_make("binary", key, make)
    return Artifact(entry.folder, entry.files)


def _helper_files() -> list[Path]:
    names = ("dead_barriers.py", "audit/__init__.py", "audit/sass.py")
    return [Path(__file__).parents[1] / name for name in names]


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
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
    if done.returncode == DISK_ERROR_EXIT:
        raise OSError(errno.EIO, f"cannot write to {folder}: {_last_lines(done.stderr, 1)}")
    if done.returncode:
        raise BuildError(f"{_exit_reason(done.returncode)}:\n{_last_lines(done.stderr)}")
    request_file.unlink()


def _exit_reason(code: int) -> str:
    if code < 0:
        return f"Triton aborted its process ({signal.Signals(-code).name})"
    return "Triton did not compile the kernel"


def _last_lines(text: str, count: int = 25) -> str:
    return "\n".join(text.strip().split("\n")[-count:])


def _load(spec: KernelSpec) -> tuple[Any, str]:
    """The emitted kernel of a spec as its file defines it, and the file's text.

    The text that was read and compared with its hash is what runs: the file is not opened again,
    and no byte code beside it is used.
    """
    entry, name = emitted(spec), f"{spec.name}.py"
    text = entry.text(name)
    place = str(entry.folder / name) if entry.folder is not None else f"<emitted {name}>"
    module = ModuleType(f"tilewright_emitted.{spec.name}")
    module.__file__ = place
    # Triton asks `inspect` for a kernel's source, which looks here first. None: never looked up
    # again.
    linecache.cache[place] = (len(text), None, StringIO(text).readlines(), place)
    exec(compile(text, place, "exec"), module.__dict__)
    return getattr(module, module.KERNEL), text


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


@functools.cache
def load_jit(spec: KernelSpec) -> Launchable:
    """The spec's kernel, compiled by Triton at its first launch on the present GPU.

    Arguments are the run-time parameters in the order of spec.signature. Where the kernel makes
    descriptors on the device, an allocator for their memory is installed.
    """
    function, text = _load(spec)
    if not hasattr(function, "warmup"):
        raise BuildError("TRITON_INTERPRET is set: nothing is compiled; use load_interpreted")
    if needs_scratch(text):
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
    from tilewright.codegen.build.interpreter import interpret

    function, _ = _load(spec)
    return interpret(function)


def keep_ttgir(text: str) -> Path:
    """A file of this process alone with a module's text, for Triton to compile."""
    handle, path = tempfile.mkstemp(".ttgir", dir=private_folder())
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(path)


@functools.cache
def find_triton_a_cache() -> None:
    """Gives Triton a private cache folder for this process where its own cannot be written.

    Without one Triton fails to compile anything. A folder that the user chose (TRITON_CACHE_DIR) is
    left as it is.
    """
    from triton import knobs

    folder = knobs.cache.dir
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
    except OSError as error:
        said = f"Triton's cache {folder} cannot be written: {error.strerror}"
        if "TRITON_CACHE_DIR" in os.environ:
            warn_once("Triton", f"{said}. TRITON_CACHE_DIR names it")
            return
        private = private_folder() / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(private)
        kept = f"What it compiles in this process is kept in {private} until it ends"
        warn_once("Triton", f"{said}. {kept}")


def needs_scratch(source: str) -> bool:
    """Whether an emitted file makes tensor descriptors on the device."""
    return _SCRATCH_MARK in source


def install_allocator() -> None:
    """Let Triton take scratch memory from torch's caching allocator, on the launch's stream."""
    import torch
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.int8)

    triton.set_allocator(allocate)
