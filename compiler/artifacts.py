"""Adds kernels and tuned times to torch's cache artifacts.

`torch.compiler.save_cache_artifacts()` saves the artifacts that this process has used, and
`load_cache_artifacts` puts them into the caches of another process. The backend imports this
module. A process that loads artifacts must import this module first, because torch refuses a whole
bundle of artifacts if it does not know the type of one of them.
"""

from __future__ import annotations

import logging

from tilewright.codegen.build import travel
from tilewright.compiler._compat import inductor

log = logging.getLogger("tilewright")

#: The name of the artifact type in torch's CacheInfo: `info.tilewright_artifacts`.
TYPE = "tilewright"


def _register() -> None:
    record = inductor.register_artifacts(TYPE, travel.deliver)
    if record is None:
        log.info("this torch saves no kernels of tilewright with its cache artifacts")
        return
    for name, data in travel.parcels().items():
        record(name, data)
    travel.listeners.append(record)


_register()
