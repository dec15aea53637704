"""Seeds whose results were wrong, with the reasons.

The test suite runs the seeds in `MENDED`.
"""

from __future__ import annotations

FOREACH = "a foreach op's write was not seen"
OUT = "the write of `out=` was not seen"

#: For each (family, seed), the fault that this seed found.
MENDED = {
    ("lora", 209): "of two equal writes to one cache the second was left out",
    ("mla", 310): "a result written in place through as_strided had other strides",
    ("mla", 380): "flatten of a result written in place was a view, in eager a copy",
    ("cache_store", 1403): FOREACH,
    ("lora", 357): FOREACH,
    ("lora", 452): FOREACH,
    ("lora", 1177): FOREACH,
    ("mla", 214): OUT,
    ("mla", 219): FOREACH,
    ("mla", 582): "a query that sees no key: eager's softmax gives NaN, PyTorch's attention zero",
    ("mla", 5697): "a query was read from memory whose writes the match left out",
    ("mla", 6390): "no fault: a query that sees no key, beside rows that differ by a rounding",
    ("moe", 46): FOREACH,
    ("moe", 281): "topk of no expert: a pattern raised",
    ("moe", 626): FOREACH,
    ("moe", 990008): "no fault: clamped scores are equal, and topk promises no order of those",
    ("products", 5997): "no fault: a product next to zero is divided by zero, and is zero in ours",
}
