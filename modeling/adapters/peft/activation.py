"""Activated LoRA (arXiv:2504.12397): adapters that change the model from a position on."""

from collections.abc import Iterable, Sequence

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.projection import (
    ModulePosition,
    Projection,
    ProjectionKind,
    in_foreign_code,
)

GENERATES = "CAUSAL_LM"
"""PEFT's task_type of adapters that are loaded as PeftModelForCausalLM."""

BEFORE_FIRST = frozenset({"v_proj_delayed"})
"""Maps that are computed of a row of zeros before a sequence's first token, too (ZAYA)."""


def check_activation(
    plan: LoraPlan,
    projections: Sequence[Projection],
    adapted: Iterable[ModulePosition],
    has_whole_modules: bool,
) -> None:
    """Refuse an activated adapter where it is not served, and for modules that PEFT refuses.

    adapted: the modules that have factors. has_whole_modules: whether the adapter
    brings a whole embedding, head or classification head.
    """
    if not plan.invocation:
        return
    if in_foreign_code(projections):
        refuse(
            "alora_invocation_tokens: activated LoRA is not served over this model, which runs in "
            "transformers' own code; retrain it as plain LoRA"
        )
    found = [projections[at.projection] for at in adapted]
    kinds = {each.kind for each in found}
    if kinds - {ProjectionKind.LINEAR} or has_whole_modules:
        refuse(
            "alora_invocation_tokens: an activated adapter changes linear modules inside the "
            "layers alone, as in PEFT; retrain it without embedding and heads"
        )
    late = sorted({each.name for each in found if each.of_latents})
    if late:
        refuse(
            f"alora_invocation_tokens with factors of {', '.join(late)}: this model's cache has "
            "latents, of which an adapter of that map changes all that a token reads, those before "
            "the invocation too; retrain it without that module"
        )
    early = sorted({each.name for each in found} & BEFORE_FIRST)
    if plan.lora_bias and early:
        refuse(
            f"lora_bias with alora_invocation_tokens and factors of {', '.join(early)}: PEFT adds "
            "that bias before a prompt's first token too, where the invocation comes later; "
            "retrain it without lora_bias, or without that module"
        )
    if plan.task != GENERATES:
        # Of PEFT's classes PeftModelForCausalLM alone looks for the invocation (peft_model.py).
        refuse(
            f"alora_invocation_tokens with task_type {plan.task}: PEFT's PeftModel.from_pretrained "
            f"never activates such an adapter; set task_type to {GENERATES} in "
            "adapter_config.json if it was trained so"
        )
