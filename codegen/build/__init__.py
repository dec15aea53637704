"""Emits the kernel of a spec and builds it, for Triton's JIT, for Triton's interpreter, or as a
cubin."""

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

# This call in an emitted file makes a descriptor on the device, for which the kernel needs global
# scratch memory.
_SCRATCH_MARK = "make_tensor_descriptor"


class BuildError(RuntimeError):
    """Raised when Triton cannot compile a kernel. The message ends with the last lines that Triton
    printed."""


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel.

    Attributes:
        folder: The folder of the files; None if they could not be written.
        files: The contents of source.py, kernel.ttir, kernel.ttgir, kernel.ptx, kernel.cubin,
            metadata.json and audit.json, by name.
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
    """Returns the cache entry of a spec's emitted file, `<name>.py`. Emits the file if it is
    missing."""

    names = {f"{spec.name}.py", "spec.json"}

    def make() -> dict[str, bytes]:
        return {
            f"{spec.name}.py": emitter.emit(spec).encode(),
            "spec.json": spec.to_json().encode(),
        }

    def is_whole(entry: Entry) -> bool:
        """Whether the entry has exactly the files that `make` returns. It may have other files if
        it comes from another machine."""
        return entry.files.keys() == names

    key = emitter.source_fingerprint(spec)
    return (store or KernelCache()).get_or_make("source", key, make, is_whole)


def emitted_path(spec: KernelSpec, store: KernelCache | None = None) -> Path:
    """Returns the path of a spec's emitted file, so that people and tools can read it. Emits the
    file if it is missing. Raises OSError if the file cannot be written."""
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
    """Compiles a spec, or the text of an emitted file, to a cubin. This needs no GPU.

    Args:
        source: The spec or the text.
        target: The chip that the kernel will run on. By default, it is the target of the spec.
        python: A Python interpreter whose environment has the Triton to use. By default, it is the
            current interpreter.
        options: More options for Triton.
        store: The cache in which the result is stored.

    Raises:
        BuildError: Triton fails or aborts its process.
        ValueError: `source` is a text and `target` is None, or the target is not a GPU.
        OSError: The disk cannot be written.
    """
    if isinstance(source, KernelSpec):
        text = emitted(source, store).text(f"{source.name}.py")
        target = target or source.target
    else:
        text = source
    if target is None:
        raise ValueError("target: expected a target, because the source is a text, got None")
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
            shutil.rmtree(folder / ".triton", ignore_errors=True)  # this folder holds only copies
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
    """Returns the version and the path of the Triton that `python` imports. Raises BuildError if
    `python` cannot import Triton."""
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
    """Returns the kernel that the emitted file of a spec defines, and the text of the file.

    Python executes exactly the text whose hash was checked: the file is not opened a second time,
    and a byte-code file next to it is not used.
    """
    entry, name = emitted(spec), f"{spec.name}.py"
    text = entry.text(name)
    place = str(entry.folder / name) if entry.folder is not None else f"<emitted {name}>"
    module = ModuleType(f"tilewright_emitted.{spec.name}")
    module.__file__ = place
    # Triton calls `inspect` for the source of a kernel, and `inspect` looks into this cache first.
    # With None as the modification time, `linecache` does not read the file again.
    linecache.cache[place] = (len(text), None, StringIO(text).readlines(), place)
    exec(compile(text, place, "exec"), module.__dict__)
    return getattr(module, module.KERNEL), text


@dataclass(frozen=True)
class Launchable:
    """An emitted kernel on the current GPU, called as `kernel[grid](*run_time_args)`.

    Attributes:
        spec: The spec of the kernel.
        function: Triton's JITFunction, for callers that need more of its interface.
        options: The launch options that are passed to Triton.
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
    """Returns the kernel of a spec. Triton compiles it at its first launch on the current GPU.

    The kernel's arguments are the run-time parameters in the order of spec.signature. If the kernel
    makes descriptors on the device, this function installs an allocator for their memory. Raises
    BuildError if TRITON_INTERPRET is set.
    """
    function, text = _load(spec)
    if not hasattr(function, "warmup"):
        raise BuildError("TRITON_INTERPRET is set: nothing is compiled; use load_interpreted")
    if needs_scratch(text):
        install_allocator()
    options: dict[str, Any] = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    options["enable_fp_fusion"] = True  # as in worker.py: the default differs between releases
    if spec.maxnreg is not None:
        options["maxnreg"] = spec.maxnreg
    if spec.launch_pdl:
        options["launch_pdl"] = True
    return Launchable(spec, function, options)


def load_interpreted(spec: KernelSpec) -> InterpretedKernel:
    """Returns the kernel of a spec for CPU tensors. Triton's interpreter runs it, with corrected
    bf16 arithmetic."""
    from tilewright.codegen.build.interpreter import interpret

    function, _ = _load(spec)
    return interpret(function)


def keep_ttgir(text: str) -> Path:
    """Writes the text of a TTGIR module to a private file of this process, from which Triton
    compiles it. Returns the path."""
    handle, path = tempfile.mkstemp(".ttgir", dir=private_folder())
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(path)


@functools.cache
def find_triton_a_cache() -> None:
    """Gives Triton a private cache folder for this process if Triton's own cache folder cannot be
    written.

    Triton cannot compile without a cache folder. If the user chose the folder (TRITON_CACHE_DIR),
    this function only warns.
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
            warn_once("Triton", f"{said}. TRITON_CACHE_DIR names this folder")
            return
        private = private_folder() / "triton"
        os.environ["TRITON_CACHE_DIR"] = str(private)
        kept = f"Triton's results are kept in {private} until this process ends"
        warn_once("Triton", f"{said}. {kept}")


def needs_scratch(source: str) -> bool:
    """Whether an emitted file makes tensor descriptors on the device."""
    return _SCRATCH_MARK in source


def install_allocator() -> None:
    """Makes Triton allocate scratch memory from torch's caching allocator, on the stream of the
    launch."""
    import torch
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, device="cuda", dtype=torch.int8)

    triton.set_allocator(allocate)
