"""The step of `round_rows`: one kernel."""

from __future__ import annotations

from tilewright.codegen.arithmetic import LINE_BYTES
from tilewright.codegen.mlp.kernels import ROUND, RoundConfig, round_grid
from tilewright.codegen.mlp.plan import round_config
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.ops.mlp.arguments import RoundRowsArguments
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.program import Buffer, Outcome, Steps


def round_rows_steps(
    a: RoundRowsArguments, target: Target, config: RoundConfig | None = None
) -> Steps:
    """Performs the steps of a `round_rows` call. config: the tile sizes. If it is None, the plan
    chooses them."""
    tokens, columns = a.x.shape
    made, scales = a.results
    results = (yield Buffer(*made)), (yield Buffer(*scales))
    whole = a.rms_norm or (a.group == 0 and a.scale is None)
    config = config or round_config(columns, a.group, whole, tokens, target)
    values = {
        "x": a.x,
        "up": a.up,
        "norm_weight": a.norm_weight,
        "given_scale": a.scale,
        "out": results[0],
        "scale": results[1],
    }
    grid = round_grid(config, columns, tokens)
    yield launch(ROUND, target, grid, values, config, **_constants(a))
    return Outcome(results, "rounding kernel", config)


def _constants(a: RoundRowsArguments) -> dict[str, Constant]:
    """Returns the constants of the kernel, except strides and tile sizes."""
    norm, weight = row_norm_of(a.norm), a.norm_weight
    dense = weight is not None and weight.stride(0) == 1
    return {
        "K": a.x.shape[1],
        "NORM": norm is not None,
        "NORM_EPS": a.norm_eps if norm else 0.0,
        "NORM_OFFSET": a.norm_offset if norm else 0.0,
        "NORM_LINE": LINE_BYTES // weight.element_size() if weight is not None and dense else 0,
        "ACTIVATION": a.activation,
        "GROUP": a.group,
        "ROUNDED": a.rounded,
        "ZERO_SCALE": a.zero_scale,
        "LEAST": a.least,
        "LEAST_DIVISOR": a.least_divisor,
        "DECODED": a.decoded,
    }
