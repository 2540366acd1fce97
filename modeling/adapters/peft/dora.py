"""DoRA (arXiv:2402.09353) in a PEFT file: one magnitude for each output row of a module."""

from collections.abc import Mapping, Sequence

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import check_outputs
from modeling.adapters.projection import (
    ModulePosition,
    Projection,
    ProjectionKind,
    in_foreign_code,
)
from sharding.tensor_file import TensorFile


def magnitude_key(module: str) -> str:
    """Return the name of a module's magnitudes."""
    return f"{PREFIX}{module}.lora_magnitude_vector"


def check_magnitudes(
    file: TensorFile,
    plan: LoraPlan,
    modules: Mapping[str, ModulePosition],
    projections: Sequence[Projection],
) -> None:
    """Refuse DoRA where it is not served, and magnitudes that are missing or of another shape.

    modules: those that have factors.
    """
    if in_foreign_code(projections):
        refuse(
            "use_dora=True is not served over this model, which runs in transformers' own code: "
            "retrain without DoRA, or merge the adapter into the base model"
        )
    if plan.invocation:
        refuse("use_dora=True beside alora_invocation_tokens: PEFT has no such adapters")
    for module, position in modules.items():
        projection = projections[position.projection]
        if projection.kind is not ProjectionKind.LINEAR:
            refuse(
                f"use_dora=True at {module}: DoRA is served for linear modules inside the layers; "
                "retrain without embedding and head"
            )
        _check(file, magnitude_key(module), projection)


def _check(file: TensorFile, key: str, projection: Projection) -> None:
    if key not in file.keys():  # noqa: SIM118 - not a dictionary
        refuse(f"use_dora=True, but the file holds no {key}: save the adapter again")
    check_outputs(file, key, projection)
