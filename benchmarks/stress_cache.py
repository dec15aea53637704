"""Tests the kernel cache with killed processes, many processes, full disks, damaged
entries and two versions at once.

The program checks every answer of the cache byte by byte; after a wrong or missing answer, its exit
code is 1. --seed determines the random moments, orders and damages. No GPU is needed. The full disk
is a small tmpfs, which only root can mount; for other users, only a limit on file sizes is tested.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from timing import keep

from tilewright.codegen import build
from tilewright.codegen.build import cache as cache_module
from tilewright.codegen.build import compile_for, emitted
from tilewright.codegen.build.cache import KernelCache, key_of, upkeep
from tilewright.codegen.build.cache.folder import remove, sweep_private
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.contract import get_op

KIND = "source"
ENTRIES = 12


class WrongAnswerError(AssertionError):
    """Raised if the cache's answer differs from the content that was stored under the key."""


@cache
def files_of(number: int) -> dict[str, bytes]:
    """Returns the content of entry `number`: three files of up to 200 kB."""
    random_bytes = random.Random(number)
    return {
        f"{name}.bin": random_bytes.randbytes(random_bytes.randrange(1, 200_000)) for name in "abc"
    }


def key(number: int) -> str:
    return key_of("stress", str(number))


def ask(root: Path, number: int, log: Path | None = None) -> None:
    """Asks the cache for an entry, and checks the answer. Raises WrongAnswerError."""

    def make() -> dict[str, bytes]:
        if log is not None:
            note(log, str(number))
        return files_of(number)

    if KernelCache(root).get_or_make(KIND, key(number), make).files != files_of(number):
        raise WrongAnswerError(f"entry {number}")


def ask_kernel(root: Path, spec: KernelSpec, text: str, log: Path | None = None) -> None:
    """Asks the cache for an emitted kernel, and checks that it is `text`. Raises
    WrongAnswerError."""
    store = KernelCache(root)
    if log is not None and store.find(KIND, build.emitter.source_fingerprint(spec)) is None:
        note(log, f"{spec.name} asked cold")
    if emitted(spec, store).text(f"{spec.name}.py") != text:
        raise WrongAnswerError(spec.name)


def note(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


@cache
def kernels() -> dict[KernelSpec, str]:
    """Returns real kernels with their texts, emitted without the cache."""
    op = get_op("paged_kv_store")
    specs = [s for case in op.cases[:6] for s in op.plan_for(op.sample_inputs(case), "sm90").specs]
    return {spec: build.emitter.emit(spec) for spec in list(dict.fromkeys(specs))[:3]}


def child(function: Callable[[], Any]) -> int:
    """Forks a process that runs the function, and returns its id. The process exits with 1 if the
    function raises an error."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def failures(pids: Sequence[int]) -> int:
    """Waits for children, and counts those whose exit code is not 0."""
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


def whole_or_absent(root: Path) -> int:
    """Counts the entries in the cache. Raises WrongAnswerError if one of them is wrong."""
    found = [(n, KernelCache(root).find(KIND, key(n))) for n in range(ENTRIES)]
    wrong = [n for n, entry in found if entry is not None and entry.files != files_of(n)]
    if wrong:
        raise WrongAnswerError(f"entries {wrong}")
    return sum(entry is not None for _, entry in found)


def everything(root: Path, order: random.Random, log: Path | None = None) -> None:
    """Asks for all entries and kernels, in a random order."""
    work: list[Callable[[], None]] = [partial(ask, root, n, log) for n in range(ENTRIES)]
    work += [partial(ask_kernel, root, spec, text, log) for spec, text in kernels().items()]
    order.shuffle(work)
    for one in work:
        one()


def remake(root: Path, order: random.Random, emits: bool) -> None:
    """Removes entries and asks for them again, until the process is killed.

    `emits` says whether the entries are kernels, which are emitted. Other entries are only stored.
    """
    while True:
        number = order.randrange(ENTRIES)
        spec, text = order.choice(list(kernels().items()))
        wanted = build.emitter.source_fingerprint(spec) if emits else key(number)
        remove(KernelCache(root).entry(KIND, wanted))
        if emits:
            ask_kernel(root, spec, text)
        else:
            ask(root, number)


def kills(work: Path, rng: random.Random, scale: float) -> str:
    """Kills processes at random moments while they store and emit."""
    killed = answers = leftovers = 0
    for number in range(int(120 * scale)):
        root = work / f"root{number // 10}"
        orders = [random.Random(rng.random()) for _ in range(3)]
        pids = [child(partial(remake, root, order, order is orders[0])) for order in orders]
        time.sleep(rng.uniform(0, 0.3))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        answers += whole_or_absent(root)
        if number % 10 == 9:
            if failures([child(partial(everything, root, rng))]):
                raise WrongAnswerError(f"{root} after kills")
            leftovers += len(upkeep.survey(root, stale_after=0).stale)
            upkeep.prune(root, 1 << 40, stale_after=0)
            if upkeep.survey(root, stale_after=0).stale or whole_or_absent(root) != ENTRIES:
                raise WrongAnswerError(f"{root} after sweeping")
    return f"{killed} kills; {answers} entries found whole, {leftovers} leftovers, all swept"


def compiler_kills(work: Path, rng: random.Random, scale: float) -> str:
    """Kills processes that compile a kernel to a cubin. Afterwards a new interpreter compiles
    it."""
    spec = next(iter(kernels()))
    start = time.perf_counter()
    want = compile_for(spec, "sm90", store=KernelCache(work / "timed")).audit.to_json()
    longest = time.perf_counter() - start
    killed = 0
    for _ in range(max(1, int(5 * scale))):
        pid = child(partial(compile_for, spec, "sm90", store=KernelCache(work / "root")))
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    code = (
        "import sys; from tilewright.codegen.build import compile_for\n"
        "from tilewright.codegen.spec import KernelSpec\n"
        "spec = KernelSpec.from_json(sys.stdin.read())\n"
        "print(compile_for(spec, 'sm90').audit.to_json(), end='')"
    )
    environment = os.environ | {"TILEWRIGHT_CACHE_DIR": str(work / "root")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=spec.to_json(),
        text=True,
        env=environment,
        capture_output=True,
        check=False,
    )
    if done.stdout != want:
        raise WrongAnswerError(f"another kernel after kills: {done.stdout} {done.stderr}")
    return f"{killed} kills within {longest:.1f} s of compiling; then the same machine code"


def crowd(work: Path, rng: random.Random, scale: float) -> str:
    """Runs 32 processes on a cold cache."""
    most, made, asked = 0, 0, 0
    for number in range(max(1, int(3 * scale))):
        log = work / f"log{number}"
        root = work / f"root{number}"
        orders = [random.Random(rng.random()) for _ in range(32)]
        if failures([child(partial(everything, root, order, log)) for order in orders]):
            raise WrongAnswerError("in a crowd")
        counts = Counter(line for line in log.read_text().splitlines() if line.isdigit())
        most, made = max(most, *counts.values()), made + sum(counts.values())
        asked += ENTRIES
    return f"{asked} entries made {made} times, one at most {most} times"


def crowded_compiler(work: Path, rng: random.Random, scale: float) -> str:
    """Runs 32 processes that ask for the same cubin."""
    spec, log = next(iter(kernels())), work / "log"
    worker = build._run_worker

    def noted(*arguments: Any) -> None:
        note(log, "compiled")
        worker(*arguments)

    def want() -> None:
        build._run_worker = noted
        note(log, key_of(compile_for(spec, "sm90", store=KernelCache(work / "root")).ptx))

    if failures([child(want) for _ in range(32)]):
        raise WrongAnswerError("compiling in a crowd")
    counts = Counter(log.read_text().splitlines())
    if len(counts) != 2:
        raise WrongAnswerError(f"different kernels: {counts}")
    return f"32 answers, all the same; compiled {counts['compiled']} time"


def full_disk(work: Path, rng: random.Random, scale: float) -> str:
    """Fills a file system of 1 MB, and frees it again."""
    disk = work / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"skipped: {done.stderr.strip() or 'mount failed'}"
    try:
        return fill(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> str:
    root, spec = disk / "cache", next(iter(kernels()))
    for number in range(ENTRIES):
        ask(root, number)
    stored = whole_or_absent(root)
    on_disk = len(upkeep.survey(root).entries)
    (disk / "rest").write_bytes(bytes(free) if (free := free_bytes(disk)) else b"")
    ask_kernel(root, spec, kernels()[spec])
    compile_for(spec, "sm90", store=KernelCache(root))
    if list(root.rglob("*.tmp")):
        raise WrongAnswerError("half an entry is left")
    (disk / "rest").unlink()
    shutil.rmtree(root)
    ask(root, 0)
    if not KernelCache(root).entry(KIND, key(0)).is_dir():
        raise WrongAnswerError("nothing is stored where there is room again")
    return f"{stored} of {ENTRIES} answered, {on_disk} kept on the disk, none by half"


def free_bytes(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


def limited_files(work: Path, rng: random.Random, scale: float) -> str:
    """Runs a process that cannot write files over 100 kB."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        everything(work / "root", rng)

    if failures([child(limited)]):
        raise WrongAnswerError("under a limit")
    left = whole_or_absent(work / "root")
    small = sum(max(map(len, files_of(n).values())) <= 100_000 for n in range(ENTRIES))
    if left != small:
        raise WrongAnswerError(f"{left} entries were kept, {small} could be")
    return f"{ENTRIES} of {ENTRIES} answered, {small} kept, the others from memory"


def versions(work: Path, rng: random.Random, scale: float) -> str:
    """Runs two versions of the emitter side by side, and two formats of entries with the same
    keys."""
    emit = build.emitter.emit

    def other_emitter() -> None:
        build.emitter.emitter_fingerprint = lambda: "another version"
        build.emitter.emit = lambda spec: emit(spec) + "# another version\n"
        for spec in kernels():  # its fingerprint is part of the text
            ask_kernel(work / "root", spec, emit(spec) + "# another version\n")

    def own_emitter() -> None:
        for spec, text in kernels().items():
            ask_kernel(work / "root", spec, text)

    def format_of(number: int) -> None:
        cache_module._FORMAT = number
        order = random.Random(number)
        for _ in range(int(40 * scale)):
            ask(work / "root", order.randrange(4), work / "log")

    pids = [child(other_emitter if n % 2 else own_emitter) for n in range(16)]
    pids += [child(partial(format_of, 2 + n % 2)) for n in range(8)]
    if failures(pids) or failures([child(own_emitter), child(other_emitter)]):
        raise WrongAnswerError("two versions")
    both = len(list((work / "root" / KIND).glob("*/*/spec.json")))
    if both != 2 * len(kernels()):
        raise WrongAnswerError(f"{both} entries for two versions of {len(kernels())} kernels")
    again = len((work / "log").read_text().splitlines())
    asked = 8 * int(40 * scale)
    return (
        f"{both} entries of {len(kernels())} kernels; "
        f"{asked} answers of two formats, {again} made anew"
    )


def damage(entry: Path, kind: str, rng: random.Random, root: Path) -> None:
    """Damages an entry on disk in one way. `kind` is one of DAMAGES."""
    file = entry / rng.choice(["a.bin", "b.bin", "c.bin", "manifest.json"])
    data = file.read_bytes()
    place = rng.randrange(len(data))
    outside = root.parent / f"outside-{rng.randrange(1 << 60):x}"
    if kind == "truncated":
        file.write_bytes(data[:place])
    elif kind == "bit flipped":
        file.write_bytes(
            data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        )
    elif kind == "missing":
        file.unlink()
    elif kind == "one file more":
        (entry / "more.bin").write_bytes(b"more")
    elif kind == "empty manifest":
        (entry / "manifest.json").write_text(rng.choice(["{}", "[]", "null", ""]))
    elif kind == "other key":
        other = KernelCache(root).entry(KIND, key(ENTRIES + rng.randrange(ENTRIES)))
        shutil.rmtree(entry)
        shutil.copytree(other, entry)
    elif kind == "unreadable":
        file.chmod(0)
        file.write_bytes(data[:place])
    elif kind == "folder for a file":
        file.unlink()
        file.mkdir()
    elif kind == "byte code":
        (entry / "__pycache__").mkdir()
        (entry / "__pycache__" / "a.cpython-311.pyc").write_bytes(data)
    elif kind == "link out":
        outside.write_bytes(data)
        file.unlink()
        file.symlink_to(outside)
    elif kind == "entry a link":
        entry.rename(outside)
        entry.symlink_to(outside)
    elif kind == "entry a file":
        shutil.rmtree(entry)
        entry.write_bytes(data)
    elif kind == "others can write":
        file.chmod(0o666)
    else:
        manifest = json.loads((entry / "manifest.json").read_text())
        (entry / "manifest.json").write_text(json.dumps(manifest["files"]))


DAMAGES = (
    "truncated",
    "bit flipped",
    "missing",
    "one file more",
    "empty manifest",
    "other key",
    "unreadable",
    "folder for a file",
    "byte code",
    "link out",
    "entry a link",
    "entry a file",
    "others can write",
    "earlier format",
)


def damages(work: Path, rng: random.Random, scale: float) -> str:
    """Checks many times, for each kind of damage, that the cache detects and repairs it."""
    root, log = work / "root", work / "log"
    for number in range(2 * ENTRIES):
        ask(root, number)
    count = 0
    for kind in DAMAGES:
        for _ in range(int(25 * scale)):
            number = rng.randrange(ENTRIES)
            damage(KernelCache(root).entry(KIND, key(number)), kind, rng, root)
            if KernelCache(root).find(KIND, key(number)) is not None:
                raise WrongAnswerError(f"{kind}: taken for whole")
            ask(root, number, log)
            if KernelCache(root).find(KIND, key(number)) is None:
                raise WrongAnswerError(f"{kind}: not mended")
            count += 1
    made = len(log.read_text().splitlines())
    if made != count:
        raise WrongAnswerError(f"{count} damages, {made} made anew")
    return f"{count} damages of {len(DAMAGES)} kinds: all seen, all made anew"


def storm(work: Path, rng: random.Random, scale: float) -> str:
    """Runs readers while one process damages entries and another prunes all of them."""
    root, until = work / "root", time.monotonic() + 15 * scale
    for number in range(2 * ENTRIES):
        ask(root, number)

    def read() -> None:
        order, asked = random.Random(rng.random() + os.getpid()), 0
        while time.monotonic() < until:
            ask(root, order.randrange(ENTRIES), work / "log")
            asked += 1
        note(work / "asked", str(asked))

    def harm() -> None:
        while time.monotonic() < until:
            place = KernelCache(root).entry(KIND, key(rng.randrange(ENTRIES)))
            try:
                damage(place, rng.choice(DAMAGES), rng, root)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it was gone, or damaged already
            note(work / "harmed", "1")

    def prune() -> None:
        while time.monotonic() < until:
            upkeep.prune(root, 0, stale_after=3600)
            time.sleep(0.05)

    if failures([*(child(read) for _ in range(6)), child(harm), child(prune)]):
        raise WrongAnswerError("in a storm")
    asked = sum(map(int, (work / "asked").read_text().split()))
    harmed = len((work / "harmed").read_text().splitlines())
    made = len((work / "log").read_text().splitlines())
    return f"{asked} answers, {harmed} damages, {made} made anew"


STAGES: tuple[tuple[str, Callable[[Path, random.Random, float], str]], ...] = (
    ("kill -9 while storing and emitting", kills),
    ("kill -9 while compiling", compiler_kills),
    ("32 processes, cold cache", crowd),
    ("32 processes, one cubin", crowded_compiler),
    ("full disk", full_disk),
    ("no large files", limited_files),
    ("two versions at once", versions),
    ("damaged entries", damages),
    ("readers, damage and pruning at once", storm),
)


def run(name: str, stage: Callable[..., str], work: Path, seed: int, scale: float) -> dict:
    start = time.perf_counter()
    work.mkdir()
    try:
        outcome, good = stage(work, random.Random(f"{seed} {name}"), scale), True
    except Exception as error:  # the error is the result
        traceback.print_exc()
        outcome, good = f"WRONG: {error}", False
    seconds = round(time.perf_counter() - start, 1)
    print(f"{name:<36} {outcome}  ({seconds} s)", flush=True)
    return {"stage": name, "good": good, "outcome": outcome, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of rounds")
    parser.add_argument("--out", type=Path, help="folder for the result")
    options = parser.parse_args()
    logging.getLogger("tilewright").setLevel(logging.ERROR)  # hides the expected warnings
    top = Path(tempfile.mkdtemp(prefix="stress-cache-"))
    (top / "tmp").mkdir()
    tempfile.tempdir = str(top / "tmp")  # the private folders of killed processes stay here
    kernels()
    rows = [
        run(name, stage, top / str(number), options.seed, options.scale)
        for number, (name, stage) in enumerate(STAGES)
    ]
    print(f"private folders of killed processes swept: {sweep_private(age=0)}")
    shutil.rmtree(top, ignore_errors=True)
    keep("stress_cache", rows, options.out)
    sys.exit(not all(row["good"] for row in rows))


if __name__ == "__main__":
    main()
