"""Compiles one emitted file in a separate process: `python worker.py REQUEST.json`.

The script needs only the standard library and Triton, so any environment with Triton can run it. If
Triton aborts the process on input that it does not support, the parent process continues.

The request is {"source": path, "out": folder, "arch": 90 | 100, "options": {...}}. The script
writes kernel.ptx, kernel.cubin, kernel.ttgir, kernel.ttir and metadata.json to `out`. Exit code 74
means that the disk is full or cannot be written. Any other code except 0 means that Triton could
not compile the kernel.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

WARP_SIZE = 32
STAGES = ("ttir", "ttgir", "ptx", "cubin")
METADATA = (
    "name",
    "shared",
    "tmem_size",
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "global_scratch_size",
    "global_scratch_align",
    "profile_scratch_size",
    "launch_pdl",
)


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
DISK_ERROR_EXIT = 74


def load_source(path: str) -> Any:
    """Loads a file as a module, always from its text and never from a byte-code file."""
    module = ModuleType("emitted_kernel")
    module.__file__ = path
    exec(compile(Path(path).read_text("utf-8"), path, "exec"), module.__dict__)
    return module


def attributes(signature: Mapping[str, str], divisible16: Sequence[str]) -> dict:
    """Returns Triton's argument attributes, which say that the named arguments are divisible by 16.

    For a launch, the names come from the spec. For cross-compiling, they come from DIVISIBLE16 of
    the emitted file.
    """
    return {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(signature)
        if name in divisible16
    }


def source_of(function: Any, signature: Mapping[str, str], divisible16: Sequence[str]) -> Any:
    """Returns the source of a kernel that has no constexpr parameters, as `triton.compile` expects
    it."""
    from triton.compiler import ASTSource

    made: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        made = GluonASTSource
    attrs = attributes(signature, divisible16)
    return made(fn=function, signature=dict(signature), constexprs={}, attrs=attrs)


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the requested file and writes the results. Returns the metadata, which it also
    writes to a file."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import cache

    # Triton's own function hashes all of Triton, half a gigabyte, to name a cache entry that is
    # never read again.
    cache.triton_key = lambda: ""
    out = Path(request["out"])
    module = load_source(request["source"])
    options = {"num_warps": module.NUM_WARPS, "num_stages": module.NUM_STAGES}
    if module.MAXNREG is not None:
        options["maxnreg"] = module.MAXNREG
    if getattr(module, "LAUNCH_PDL", False):
        options["launch_pdl"] = True
    options["enable_fp_fusion"] = True  # the default differs between triton 3.6 and 3.9
    options.update(request.get("options", {}))
    source = source_of(getattr(module, module.KERNEL), module.SIGNATURE, module.DIVISIBLE16)

    def keep(ttgir: str) -> Path:
        path = out / "mended.ttgir"
        path.write_text(ttgir, "utf-8")
        return path

    target = GPUTarget("cuda", request["arch"], WARP_SIZE)
    mend = load_source(str(Path(__file__).parents[1] / "dead_barriers.py"))
    compiled = mend.compile_without_dead_barriers(source, target, options, keep)
    for stage in STAGES:
        code = compiled.asm.get(stage, "")  # a Gluon kernel has no TTIR
        data = code if isinstance(code, bytes) else str(code).encode()
        (out / f"kernel.{stage}").write_bytes(data)
    metadata = {name: getattr(compiled.metadata, name, None) for name in METADATA}
    metadata |= {
        "triton": triton.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "arch": request["arch"],
        "tools": str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin"),
        "options": options,
    }
    (out / "metadata.json").write_text(json.dumps(metadata, indent=1, default=str), "utf-8")
    return metadata


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    os.environ.pop("TRITON_INTERPRET", None)
    # Without this variable, Triton's cache could return the result of an earlier compilation.
    os.environ.setdefault("TRITON_ALWAYS_COMPILE", "1")
    os.environ["TRITON_CACHE_DIR"] = str(Path(request["out"]) / ".triton")
    try:
        compile_kernel(request)
    except OSError as error:
        traceback.print_exc()
        sys.exit(DISK_ERROR_EXIT if error.errno in DISK_ERRORS else 1)


if __name__ == "__main__":
    main()
