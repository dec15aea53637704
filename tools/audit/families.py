"""The kernels of every family that every compiler release is tried on."""

from __future__ import annotations

from tilewright.codegen.targets import Target
from tilewright.tools.audit.attention import attention_cases
from tilewright.tools.audit.cases import AuditCase
from tilewright.tools.audit.collective import collective_cases
from tilewright.tools.audit.lora import lora_cases
from tilewright.tools.audit.mla import mla_cases
from tilewright.tools.audit.mla_attention import mla_attention_cases
from tilewright.tools.audit.mlp import mlp_cases
from tilewright.tools.audit.moe import moe_cases
from tilewright.tools.audit.qkv import qkv_cases, quantized_cases

FAMILIES = (
    *(qkv_cases, quantized_cases, lora_cases, moe_cases),
    *(mla_cases, mla_attention_cases, attention_cases, mlp_cases),
    collective_cases,
)


def all_cases(target: Target) -> list[AuditCase]:
    return [case for cases in FAMILIES for case in cases(target)]
