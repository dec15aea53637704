"""Lists the releases with which tilewright is tested. `make matrix` tests them, and
`tilewright doctor` names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One environment. Each version is a version on PyPI. An empty version stands for the newest
    release.

    differs: how this environment differs from the others, and why. docs/support.md shows it.
    besides: further packages with their versions.
    runs: the kinds of tests to run, as keys of `support_matrix.TESTS`.
    """

    name: str
    python: str
    torch: str
    triton: str
    transformers: str
    differs: str = ""
    besides: tuple[str, ...] = ()
    runs: tuple[str, ...] = ("graphs", "ops", "interpreter")


#: Quantisation libraries. gptqmodel needs torch 2.14.1 or newer; transformers needs optimum to use
#: gptqmodel.
QUANTISERS = (
    "torchao==0.18.0",
    "compressed-tensors==0.20.0",
    "optimum==2.3.0",
    "optimum-quanto==0.2.7",
    "bitsandbytes==0.50.2",
    "hqq==0.2.8.post1",
    "gptqmodel==7.7.0",
)

ROWS = (
    Row("newest", "3.11", "2.15.0", "3.9.0", "5.23.0",
        "Dynamo records `x.T` as `aten.numpy_T`, which tilewright traces to see what it does; "
        "Triton's interpreter requires masks in int1, to which tilewright casts comparisons",
        runs=("graphs", "ops", "interpreter", "serving")),
    Row("python-3.13", "3.13", "2.15.0", "3.9.0", "5.23.0"),
    Row("python-3.12", "3.12", "2.15.0", "3.9.0", "5.23.0"),
    Row("torch-2.14", "3.11", "2.14.1", "3.8.0", "5.23.0",
        "the ptxas of Triton 3.8.0 spills two registers around the main loop of one QKV kernel for "
        "one token on SM100, which the audit notes; the ptxas of other releases spills none"),
    Row("pinned", "3.11", "2.13.0", "3.7.1", "5.23.0", "what `make test` runs in"),
    Row("transformers-5.24", "3.11", "2.13.0", "3.7.1", "5.24.0",
        "models take `cache` in place of `past_key_values`", runs=("graphs", "serving")),
    Row("transformers-5.22", "3.11", "2.13.0", "3.7.1", "5.22.2",
        "an older engine of continuous batching", runs=("serving",)),
    Row("transformers-5.0", "3.11", "2.13.0", "3.7.1", "5.0.0",
        "DeepSeek models of this release cache expanded keys"),
    Row("torch-2.12", "3.11", "2.12.1", "3.7.1", "5.23.0"),
    Row("torch-2.11", "3.11", "2.11.0", "3.6.0", "5.23.0"),
    Row("oldest", "3.10", "2.11.0", "3.6.0", "5.0.0",
        "the oldest supported versions; models of the zoo are those of the row transformers-5.0"),
    Row("quantised", "3.11", "2.14.1", "3.8.0", "5.23.0",
        "with " + ", ".join(name.replace("==", " ") for name in QUANTISERS),
        besides=QUANTISERS, runs=("quantised",)),
)  # fmt: skip

#: The newest releases on the day of the run. Only `make matrix ROWS=released` tests this row, and
#: no table lists it.
RELEASED = Row("released", "3.11", "", "", "")


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its build. For example, "2.13.0+cpu" becomes (2, 13,
    0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def tried_together() -> list[tuple[str, str]]:
    """Returns the tested pairs of a torch version and a Triton version, oldest first."""
    return sorted({(row.torch, row.triton) for row in ROWS}, key=lambda pair: [*map(release, pair)])


def newest_tried(package: str) -> str | None:
    """Returns the newest tested version of torch, triton or transformers. Returns None for other
    packages."""
    versions = [getattr(row, package, "") for row in ROWS]
    return max(versions, key=release) if all(versions) else None
