"""Explains the short forms of a report in words. `inspect` prints the explanations of the short
forms that a report contains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A short form and its meaning. docs/command-line.md shows the short form as `shown`.

    label: the labels of the lines that may contain the short form.
    seen: a regular expression for the short form in such a line. If the expression covers all of
        `shown`, the explanation shows the numbers of the report.
    """

    shown: str
    label: str
    seen: str
    meaning: str


TERMS = (
    Term("graph", "place", r"graph\b", "code outside of every module: the model's own forward"),
    Term("swapped", "lowering|reason", r"swapped\b",
         "the kernel for few tokens: the weight's rows are the M dimension of the tensor core's "
         "product, and tokens are its N dimension"),
    Term("decoding kernel", "lowering", r"decoding kernel\b",
         "a kernel for many tokens and a weight of codes, which decodes the weight while it "
         "multiplies"),
    Term("streaming kernel", "lowering", r"streaming kernel\b",
         "the kernel of linears for few tokens: it reads the weights once, in the form in which "
         "they are stored"),
    Term("library", "lowering", r"library\b",
         "a library's GEMMs, and one kernel for the rest of the op's computation"),
    Term("reference", "lowering", r"reference\b",
         "the op's definition in PyTorch runs, because no kernel takes this call"),
    Term("dots 16x2048", "reason", r"dots \d+x\d+",
         "one token times a weight of codes, without tensor cores; the numbers are the rows of the "
         "weight that each program takes, and the columns of K that it reads at a time"),
    Term("128x16x128", "reason", r"\d+x\d+h? ?x\d+",
         "the tile that a program multiplies at a time: rows and columns of the result, and "
         "columns of K. In swapped and streaming kernels, the rows are rows of the weight; in "
         "other kernels, they are tokens; `h` counts heads"),
    Term("/2", "reason", r"/\d+ w\d",
         "split-K: this many programs compute one output tile together, each a part of its sum "
         "(in attention, each reads a part of the keys)"),
    Term("w4 s4", "reason", r"\bw\d+\b",
         "`w4`: a program has 4 warps; `s4`: 4 stages, which is the number of loads in flight"),
    Term("p256 early", "reason", r"\bp\d+\b| early\b",
         "`p256`: the kernel prefetches 256 weight columns while the previous kernel finishes; "
         "`early`: it lets the next kernel start early. In other kernels, `p2` means two programs "
         "per multiprocessor"),
    Term("g8", "reason", r" g\d+\b",
         "this many tiles of rows run one after the other with the same part of a weight"),
    Term("ws", "reason", r" ws\b", "warps are specialised: some load, some multiply"),
    Term("modelled", "reason", "modelled",
         "the time is predicted by the chip's cost model; nothing was measured"),
    Term("slots=per_sequence", "shapes", r"slots=per_sequence",
         "all sequences write at the same places, each into its own part of the cache"),
    Term("slots=page+offset", "shapes", r"slots=page\+offset",
         "the graph has a page and an offset as two tensors: the slot is page * page size + "
         "offset"),
    Term("slots=slice", "shapes", r"slots=slice", "the graph writes a slice of the cache"),
    Term("rope=half", "shapes", r"rope=half",
         "the rotary embedding pairs the two halves of a head"),
    Term("gqa=4", "shapes", r"gqa=\d+",
         "number of query heads that share a head of keys and values"),
    Term("routed=128", "shapes", r"routed=\d+",
         "number of experts that the router chooses from; this device holds only some of them"),
    Term("anchored", "stage", "anchored",
         "a pattern began at this write, but the write does not have the form that the pattern "
         "needs"),
    Term("k path, v path, q path", "stage", "[kvq] path",
         "the pattern does not know an operation between the cache (or the attention) and the "
         "projection of K, V or Q"),
    Term("activation", "stage", "activation",
         "the projections must share one input, but they do not"),
    Term("guards", "stage", "guards",
         "the structure is present, but the op does not support this variant of it"),
    Term("hazards", "stage", "hazards",
         "the structure is present, but rewriting it could change a result"),
    Term("capability", "stage", "capability",
         "the structure is present, but the device has no kernel for it"),
)  # fmt: skip


def explained(report: str) -> Iterator[tuple[str, str]]:
    """Yields (short form, meaning) of each term in a report that `inspect` prints."""
    lines = list(_labelled(report))
    for term in TERMS:
        labels, seen = term.label.split("|"), re.compile(term.seen)
        texts = (text for label, text in lines if label in labels)
        found = next(filter(None, map(seen.search, texts)), None)
        if found:
            yield found[0] if seen.fullmatch(term.shown) else term.shown, term.meaning


_PLACE = re.compile(r"  (?=\S)(.*)")
_FIELD = re.compile(r"    (\S.*?) {2,}(.*)")
_STAGES = re.compile("|".join(t.seen for t in TERMS if t.label == "stage"))


def _labelled(report: str) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of the lines of a report. A continuation line has the label of the line
    before it."""
    label = ""
    for line in report.splitlines():
        field, place = _FIELD.fullmatch(line), _PLACE.fullmatch(line)
        if place:
            label, text = "place", place[1]
        elif field and not line.startswith(" " * 5):
            label, text = field[1], field[2]
            if _STAGES.fullmatch(label):
                yield "stage", label
        else:
            text = line
        yield label, text
