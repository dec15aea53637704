"""Random tensors for the sample inputs of ops, and places of tokens in a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


def sampler_of(arguments: type[Any], draw: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Returns an op's `sample_inputs`. It makes an instance of `arguments` from the fields that
    draw(case, device, seed) returns by name."""

    def sample_inputs(case: Any, device: str | torch.device = "cpu", seed: int = 0) -> Any:
        return arguments(**draw(case, device, seed))

    return sample_inputs


class Sampler:
    """Random tensors on one device. A seed gives the same values on every device. On the meta
    device, no values are drawn."""

    def __init__(self, device: str | torch.device, seed: int) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def scales(self, *shape: int, size: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns numbers between size and 2 * size."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) + 1
        return (values * size).to(dtype).to(self.device)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)


@dataclass(frozen=True)
class RowsCase:
    """A case with rows of n numbers, and their norm.

    Attributes:
        name: The name of the case.
        num_tokens: The number of rows.
        n: The number of columns.
        dtype: The dtype of the rows.
        norm: The kind of norm: "rms", "weightless", or "" for none.
        norm_dtype: The dtype of the weight of the norm.
        norm_offset: The offset that is added to the weight of the norm.
        stride: The stride between rows, in elements. The value 0 stands for a stride of n.
    """

    name: str
    num_tokens: int = 5
    n: int = 64
    dtype: torch.dtype = torch.bfloat16
    norm: str = "rms"
    norm_dtype: torch.dtype | None = None
    norm_offset: float = 0.0
    stride: int = 0

    def rows(self, sampler: Sampler) -> torch.Tensor:
        """Returns a tensor [num_tokens, n]."""
        whole = sampler.normal(self.num_tokens, self.stride or self.n, dtype=self.dtype)
        return whole[:, : self.n]

    def norm_arguments(self, sampler: Sampler) -> dict[str, Any]:
        """Returns norm_weight and norm_offset. The weights are close to the value that leaves a row
        unchanged."""
        weight, offset = None, self.norm_offset
        if self.norm == "rms":
            dtype = self.norm_dtype or self.dtype
            weight = sampler.normal(self.n, dtype=dtype) + (1 - offset)
        return {"norm_weight": weight, "norm_offset": offset}


@dataclass(frozen=True)
class PagedBatch:
    """Tokens of several sequences, and the pages that they are stored to.

    Attributes:
        name: The name of the case.
        num_tokens: The number of tokens of all sequences together.
        num_pages: The number of pages.
        page_size: The number of tokens of a page.
        slots: One of the forms in which places are given (`ops.cache.addressing`).
        slot_dtype: The dtype of slots and tables.
        skipped: The number of tokens that have a negative slot.
        new_tokens: The number of new tokens of each sequence.
        cached_tokens: The number of tokens of each sequence that are already in the cache.
    """

    name: str
    num_tokens: int = 5
    num_pages: int = 6
    page_size: int = 8
    slots: str = "flat"
    slot_dtype: torch.dtype = torch.int64
    skipped: int = 0
    new_tokens: tuple[int, ...] = ()
    cached_tokens: tuple[int, ...] = ()


def sample_table(
    batch: PagedBatch, sampler: Sampler, names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Returns the tensors of `sample_places` that have these names, in the batch's dtype and on the
    sampler's device."""
    places = sample_places(batch, sampler)
    places["sequence_ids"][: batch.skipped] = -1
    return {name: places[name].to(batch.slot_dtype).to(sampler.device) for name in names}


def sample_places(batch: Any, sampler: Sampler) -> dict[str, torch.Tensor]:
    """Returns a block table, and the tensors that each form of addressing needs in addition, in
    int64 on the CPU. Entries of the table without a page are numbers that no page has. batch: an
    object with new_tokens, cached_tokens, num_pages and page_size."""
    new = torch.tensor(batch.new_tokens, dtype=torch.int64)
    cached = torch.tensor(batch.cached_tokens, dtype=torch.int64)
    columns = (-(-(new + cached) // batch.page_size)).tolist()
    table = torch.full((len(new), max(columns, default=0) + 1), batch.num_pages)
    free = iter(sampler.permutation(batch.num_pages).tolist())
    for row, count in enumerate(columns):
        for column in range(count):
            table[row, column] = next(free)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    sequences = torch.arange(len(new)).repeat_interleave(new)
    positions = torch.arange(len(sequences)) - offsets[sequences] + cached[sequences]
    return {
        "lookup_table": table,
        "row_offsets": offsets,
        "cache_lengths": cached,
        "sequence_ids": sequences,
        "positions": positions,
    }
