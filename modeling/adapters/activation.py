"""Activated LoRA (arXiv:2504.12397): adapters that change the model from a position on."""

from collections.abc import Iterable, Sequence

from modeling.adapters.faults import refuse
from modeling.adapters.peft_config import LoraPlan
from modeling.adapters.projection import (
    ModulePosition,
    Projection,
    ProjectionKind,
    in_foreign_code,
)


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
    kinds = {projections[at.projection].kind for at in adapted}
    if kinds - {ProjectionKind.LINEAR} or has_whole_modules:
        refuse(
            "alora_invocation_tokens: an activated adapter changes linear modules inside the "
            "layers alone, as in PEFT; retrain it without embedding and heads"
        )
