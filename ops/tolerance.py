"""The allowed difference between a result and the exact result."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted error of an element: `relative * |exact| + of_rms * rms(exact) +
    absolute`.

    `relative` bounds the error of rounding to the output dtype. `absolute` bounds the error of
    rounding subnormal numbers; it matters for dtypes with few exponents, such as 8-bit floats.
    `of_rms` bounds the error of accumulation in the precision of the op if terms cancel. `exact` is
    the result of the reference in float64, saturated for 8-bit floats.
    """

    relative: float
    of_rms: float
    absolute: float = 0.0

    def problem(self, actual: torch.Tensor, exact: torch.Tensor) -> str | None:
        """Returns a sentence about the worst element; None if all errors are accepted."""
        if actual.shape != exact.shape:
            return f"shape {list(actual.shape)}, expected {list(exact.shape)}"
        if exact.numel() == 0:
            return None
        got, want = actual.detach().double().cpu(), exact.detach().double().cpu()
        if actual.is_floating_point() and actual.itemsize == 1:
            limit = torch.finfo(actual.dtype).max
            want = want.clamp(-limit, limit)
        same = (got == want) | (got.isnan() & want.isnan())
        error = torch.where(same, 0.0, (got - want).abs().nan_to_num(nan=float("inf")))
        finite = torch.where(want.isfinite(), want, 0.0)
        allowed = self.relative * finite.abs() + self.of_rms * finite.square().mean().sqrt()
        allowed = allowed + self.absolute
        excess = error - allowed
        worst = int(excess.argmax())
        if float(excess.flatten()[worst]) <= 0:
            return None
        where = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
        got_value, want_value = float(got.flatten()[worst]), float(want.flatten()[worst])
        over = int((excess > 0).sum())
        return (
            f"{over} of {want.numel()} elements are off; the worst is at {where}: {got_value!r}, "
            f"exact {want_value!r}, allowed error {float(allowed.flatten()[worst]):.3e}"
        )


EXACT = Tolerance(relative=0.0, of_rms=0.0)
#: The value of `Tolerance.relative` for a result that is rounded once.
ROUNDING = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-20,
    torch.float64: 2.0**-49,
}


def rounded_once(*of_rms: float) -> dict[torch.dtype, Tolerance]:
    """Returns tolerances for results that are rounded once. of_rms: a number for each dtype of
    ROUNDING."""
    pairs = zip(ROUNDING.items(), of_rms, strict=False)
    return {dtype: Tolerance(relative, size) for (dtype, relative), size in pairs}
