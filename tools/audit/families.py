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

FAMILIES = {
    "qkv": (qkv_cases, quantized_cases),
    "lora": (lora_cases,),
    "moe": (moe_cases,),  # with those of `grouped`
    "mla": (mla_cases, mla_attention_cases),
    "attention": (attention_cases,),
    "mlp": (mlp_cases,),
    "collective": (collective_cases,),
}


def all_cases(target: Target) -> list[AuditCase]:
    """The kernels of the families that there are for a chip, of the dtypes that it has."""
    known = [make for name, makes in FAMILIES.items() if name in target.families for make in makes]
    return [case for make in known for case in make(target) if _has_dtypes(case, target)]


def _has_dtypes(case: AuditCase, target: Target) -> bool:
    return target.has("fp8") or all("fp8e4nv" not in kind for _, kind in case.spec.signature)
