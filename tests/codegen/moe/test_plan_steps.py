"""Compares plans of mixtures of experts and of routers with stored ones, from one token to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.codegen.moe.test_plan import DENSE, INT4, NVFP4
from tests.plans import check, said, steps
from tilewright.codegen.grouped.problem import WeightOperands
from tilewright.codegen.moe.dots import down_tiles, plan_dots, up_tiles
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.moe.problem import MoeProblem
from tilewright.codegen.moe.router_kernels import RouterProblem
from tilewright.codegen.moe.router_plan import router_config, uses_library
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90, SM100, Target


def of_format(problem: MoeProblem, name: str, block: tuple[int, int], scale: str) -> MoeProblem:
    """Returns a problem whose weights have another format, and scales for blocks of this size."""

    def weight(rows: int, columns: int) -> WeightOperands:
        codes = columns if name == "fp8" else columns // 2
        data = Operand("fp8e4nv" if name == "fp8" else "u8", (rows * codes, codes, 1))
        across = columns // block[1]
        return WeightOperands(
            data, name, block, Operand(scale, (rows // block[0] * across, across, 1))
        )

    up = weight(problem.inner, problem.hidden)
    down = weight(problem.hidden, problem.inner)
    return replace(problem, gate=up, up=up, down=down, distance=0)


MIXTRAL = replace(DENSE, num_experts=8, num_slots=2, hidden=4096, inner=14336)
GPT_OSS = replace(DENSE, num_experts=32, num_slots=4, hidden=2880, inner=2880)
FP8 = of_format(DENSE, "fp8", (128, 128), "fp32")
PROBLEMS = {
    "dense": DENSE,
    "int4": INT4,
    "nvfp4": NVFP4,
    "nvfp4, fp16": replace(NVFP4, dtype="fp16"),
    "float8": FP8,
    "float8 rows": replace(FP8, coded_rows=True),
    "mxfp4": of_format(GPT_OSS, "mxfp4", (1, 32), "u8"),
    "mixtral": MIXTRAL,
    "mixtral int4": of_format(MIXTRAL, "int4", (1, 128), "bf16"),
    "mixtral nvfp4": of_format(MIXTRAL, "nvfp4", (1, 16), "fp8e4nv"),
    "narrow int4": of_format(replace(DENSE, inner=384), "int4", (1, 128), "bf16"),
    "narrow nvfp4": of_format(replace(DENSE, inner=448), "nvfp4", (1, 16), "fp8e4nv"),
    "fp16 int4 by 64": of_format(replace(DENSE, dtype="fp16"), "int4", (1, 64), "fp16"),
}
ROUTER = RouterProblem(
    128, 2048, 8, "softmax", 1, 1, 1, True, 0.0, 0.0, 1.0, "bf16", "bf16", False
)  # fmt: skip
ROUTERS = {
    "qwen3": ROUTER,
    "deepseek": replace(ROUTER, num_experts=256, hidden=7168, scores="sigmoid", num_groups=8,
                        top_groups=4, group_top=2, weight="fp32", corrected=True),
    "mixtral": replace(ROUTER, num_experts=8, hidden=4096, num_slots=2),
    "fp32": replace(ROUTER, x="fp32", weight="fp32"),
    "odd": replace(ROUTER, num_experts=60, hidden=2880),
    "logits": replace(ROUTER, weight=""),
}  # fmt: skip


def kernels(problem: MoeProblem, target: Target, num_tokens: int):
    plan = plan_moe(problem, num_tokens, target)
    return plan.order, plan.up, plan.down, plan.combine, plan.decode, plan.by_route


def test_plans_of_experts(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, SM100):
            lines[f"{name} {target.name}"] = steps(partial(kernels, problem, target))
        lines[f"{name} dots"] = steps(partial(plan_dots, problem), range(1, 17))
        if plan_dots(problem, 1) is not None:
            lines[f"{name} dot tiles"] = said((up_tiles(problem), down_tiles(problem)))
    check("moe", lines, pytestconfig)


def test_plans_of_routers(pytestconfig) -> None:
    lines = {}
    for name, problem in ROUTERS.items():
        for target in (SM90, SM100):
            plan = partial(router_config, problem, target=target)
            lines[f"{name} {target.name}"] = steps(plan)
        lines[f"{name} library"] = steps(partial(uses_library, problem))
    check("moe_routers", lines, pytestconfig)
