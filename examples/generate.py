"""Measures the tokens per second of a Hugging Face model's `generate()`, in eager mode and with
tilewright.

    python examples/generate.py                                   # a small model, random weights
    python examples/generate.py NAME --prompt "Once upon a time"  # yours, from the hub or a folder
    python examples/generate.py NAME --cache paged --batch 16 --new 256

On a GPU the steps are compiled and captured in CUDA graphs. Without a GPU, nothing is faster: the
fused ops run as their PyTorch references, which only shows that the tokens are the same. This takes
minutes for 128 tokens, so pass `--new 8` on a machine without a GPU.

The exit status is 1 if nothing was fused.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaConfig

from tilewright import PagedCache, cache_argument, prepare, reports

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    pad_token_id=0,
)


def load(name: str | None, device: str) -> Any:
    """Returns a model for inference: a model from the hub or a folder, or a small model with random
    weights."""
    if name is None:
        torch.manual_seed(0)
        # The CPU runs in float32, in which rounding hardly ever changes the chosen token.
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return AutoModelForCausalLM.from_config(SMALL, dtype=dtype).to(device).eval()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device).eval()
    print(prepare(model))  # only quantised checkpoints need this call
    return model


def inputs_of(name: str | None, prompt: str, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Returns the prompt as tokens, repeated for each sequence of the batch."""
    if name is None:
        return {"input_ids": torch.arange(1, 10, device=device).repeat(batch, 1)}
    tokenizer = AutoTokenizer.from_pretrained(name)
    return dict(tokenizer([prompt] * batch, return_tensors="pt").to(device))


def compiled_by(device: str) -> CompileConfig:
    """Returns the way in which the steps are compiled."""
    if device == "cuda":
        return CompileConfig(backend="tilewright")
    options = {"everywhere": True, "inner": "eager"}
    how = CompileConfig(backend="tilewright", mode=None, options=options)
    how._compile_all_devices = True  # transformers compiles only on a GPU, except in its own tests
    return how


def timed(
    model: Any,
    inputs: dict[str, torch.Tensor],
    new: int,
    cache: PagedCache | None = None,
    **options: Any,
) -> torch.Tensor:
    """Calls `generate()` twice. Returns the tokens of the second call, [batch, prompt + new], and
    prints the speed of that call."""
    if cache is not None:
        options |= cache_argument(model, cache)
    for _ in range(2):  # the first call compiles
        if cache is not None:
            cache.reset()
        start = time.perf_counter()
        tokens: torch.Tensor = model.generate(
            **inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
        )
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    print(f"{tokens.shape[0] * new / seconds:10.1f} tokens per second")
    return tokens


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="a model of the hub, or a folder")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--cache", choices=("static", "paged"), default="static")
    given = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(given.name, device)
    inputs = inputs_of(given.name, given.prompt, given.batch, device)
    print("eager:")
    expected = timed(model, inputs, given.new)

    options: dict[str, Any] = {"compile_config": compiled_by(device)}
    if given.cache == "paged":
        longest = inputs["input_ids"].shape[1] + given.new
        options["cache"] = PagedCache(model.config, max_cache_len=longest)
    else:
        options["cache_implementation"] = "static"
    print("tilewright:")
    tokens = timed(model, inputs, given.new, **options)

    same = (tokens == expected).float().mean().item()
    print(f"{100 * same:.0f} % of tokens are those of eager (rounding may swap close logits)")
    if not reports() or not reports()[-1].matches:
        print("nothing was fused: see docs/troubleshooting.md", file=sys.stderr)
        return 1
    print(reports()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
