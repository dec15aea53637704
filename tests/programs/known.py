"""Seeds of kept runs that were wrong, and what was the matter.

`MENDED` are run by the suite. `OPEN` were wrong when they were found and are not mended in the
commit that added them; a seed that is mended moves up.
"""

from __future__ import annotations

#: (family, seed) -> what was wrong
MENDED = {
    ("lora", 209): "of two equal writes to one cache the second was left out",
    ("mla", 310): "a result written in place through as_strided had other strides",
    ("mla", 380): "flatten of a result written in place was a view, in eager a copy",
}
FOREACH = "a foreach op's write is not seen"
OUT = "the write of `out=` is not seen"
OPEN = {
    ("cache_store", 1403): FOREACH,
    ("lora", 357): FOREACH,
    ("lora", 452): FOREACH,
    ("lora", 1177): FOREACH,
    ("mla", 214): OUT,
    ("mla", 219): FOREACH,
    ("moe", 46): FOREACH,
    ("moe", 626): FOREACH,
    ("mla", 582): "a query that sees no key: eager's softmax gives NaN, the fused op zero",
    ("moe", 281): "topk of no expert: a pattern raises, the graph stays unfused (not wrong)",
}
