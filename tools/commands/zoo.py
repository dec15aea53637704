"""The command `tilewright zoo`, which lists the built-in models."""

from __future__ import annotations

from rich.table import Table

from tilewright.tools.commands.common import JsonOption, print_json
from tilewright.tools.console import make_console
from tilewright.tools.zoo import ZOO, zoo_facts


def zoo(as_json: JsonOption = False) -> None:
    """List the built-in models: published configurations in full size on the meta device.

    Names, except those of DeepSeek's models, may have the suffix -paged or -lora. Every name may
    also have the suffix -prefill (1024 tokens).
    """
    models = [{"name": name} | zoo_facts(name) for name in ZOO]
    if as_json:
        print_json({"models": models})
        return
    columns = list(models[0])
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for model in models:
        table.add_row(*(str(model[column]) for column in columns))
    make_console().print(table)
