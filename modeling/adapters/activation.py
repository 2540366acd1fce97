"""Activated LoRA (arXiv:2504.12397): adapters that change the model from a position on."""

from collections.abc import Sequence

from modeling.adapters.faults import refuse
from modeling.adapters.projection import Projection, ProjectionKind


def check_activation(
    projections: Sequence[Projection], adapted: set[ProjectionKind], has_whole_modules: bool
) -> None:
    """Refuse an activated adapter where it is not served, and for modules that PEFT refuses.

    adapted: the kinds of the modules that have factors. has_whole_modules: whether the adapter
    brings a whole embedding, head or classification head.
    """
    if not all(projection.can_adapt_ends for projection in projections):
        refuse(
            "alora_invocation_tokens: activated LoRA is not served over this model, which runs in "
            "transformers' own code; retrain it as plain LoRA"
        )
    if adapted - {ProjectionKind.LINEAR} or has_whole_modules:
        refuse(
            "alora_invocation_tokens: an activated adapter changes linear modules inside the "
            "layers alone, as in PEFT; retrain it without embedding and heads"
        )
