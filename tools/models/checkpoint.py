"""Builds a model from the config.json of a checkpoint, with its sizes and formats but without its
weights.

Nothing in this module imports torch before a model is built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.tools.models.loading import ModelError
from tilewright.tools.models.user_errors import one_line

CONFIG = "config.json"
#: The file in which ModelOpt describes how the weights are stored.
MODELOPT = "hf_quant_config.json"


def folder_of(spec: str) -> Path | None:
    """Returns the folder of the checkpoint that `spec` names. `spec` is the folder or its
    config.json. Returns None if it is neither."""
    path = Path(spec)
    if path.name == CONFIG and path.is_file():
        return path.parent
    return path if (path / CONFIG).is_file() else None


def dense_model(folder: Path) -> tuple[Any, dict[str, Any] | None]:
    """Returns the dense model of a folder's config.json on the meta device, and the checkpoint's
    description of how its weights are stored. The description is None if the checkpoint has none.
    Raises ModelError."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        stated = getattr(config, "quantization_config", None)
        if stated is not None:
            del config.quantization_config
        if (folder / MODELOPT).is_file():
            stated = json.loads((folder / MODELOPT).read_text("utf-8"))["quantization"]
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # a configuration may have any content
        raise ModelError(
            f"{folder / CONFIG}: no model can be built from it: {one_line(error)}"
        ) from (error)
    return model.eval().requires_grad_(False), stated


def model_of(folder: Path) -> Any:
    """Returns the model of a folder's config.json on the meta device. The same weights are
    quantised as in the checkpoint. Raises ModelError."""
    from tilewright.compiler.quantised.unloaded import put_codes

    model, stated = dense_model(folder)
    if stated is not None:
        try:
            put_codes(model, stated)
        except ValueError as error:
            raise ModelError(f"{folder / CONFIG}: {one_line(error)}") from error
        except (AttributeError, LookupError, TypeError) as error:
            said = f"quantization_config cannot be read: {one_line(error)}"
            raise ModelError(f"{folder / CONFIG}: {said}") from error
    return model.requires_grad_(False)
