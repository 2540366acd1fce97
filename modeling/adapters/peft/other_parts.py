"""What adapters change that no answer depends on, and what beside a larger model's decoder."""

from collections.abc import Collection, Sequence

from configs.architectures.text_stack import is_other_part, parts_of
from modeling.adapters.faults import refuse
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import FLOATS
from modeling.adapters.projection import Projection
from sharding.tensor_file import TensorFile

LARGER = "model.language_model."
"""How paths in larger models begin, among others, where the decoder is served as a part of one."""


def leave_other_parts(
    file: TensorFile, known: Collection[str], projections: Sequence[Projection]
) -> bool:
    """Leave out of a file what changes no text; return whether numbers in it decided that.

    known: modules as a larger model names them, if it is one. Parts that embed some tokens of texts
    too may not be changed; layers of the decoder that no text goes through are left out.
    """
    if not any(module.startswith(LARGER) for module in known):
        return False
    outer_parts = {part for each in projections for part in each.outer_parts}
    idle = {f".layers.{layer}." for each in projections for layer in each.idle_layers}
    others = {
        key
        for key in [*file.keys()]
        if is_other_part(key.removeprefix(PREFIX)) or any(layer in key for layer in idle)
    }
    outer = {key: parts_of(key.removeprefix(PREFIX)).intersection(outer_parts) for key in others}
    changed = [key for key, parts in outer.items() if parts and not _is_idle(file, key)]
    if changed:
        key = min(changed)
        refuse(
            f"tensor {key} changes how tokens of images and sound are embedded, in texts too, "
            f"which no adapter may do here: leave {min(outer[key])} out of target_modules and "
            "modules_to_save and retrain, or merge the adapter into the base model"
        )
    file.leave_out(others)
    if others and not file.keys():
        refuse(
            f"tensor {min(others)}, and all others, adapt what reads images or sound: only the "
            "model's decoder is served, for text, which this adapter does not change"
        )
    return any(outer.values())


def leave_idle_modules(file: TensorFile, projections: Sequence[Projection]) -> None:
    """Leave out of a file the factors of modules that transformers computes without them.

    Training leaves such factors as they were made, so adapters on all linear maps have them too.
    """
    names = {name for each in projections for name in each.idle_modules}
    keys = [*file.keys()] if names else []
    file.leave_out({key for key in keys if _adapted(key).rpartition(".")[2] in names})


def _adapted(key: str) -> str:
    """The module that a tensor is a factor of; "" for other tensors."""
    path, found, _ = key.rpartition(".lora_")
    return path if found else ""


def _is_idle(file: TensorFile, key: str) -> bool:
    """Whether a tensor is of factors as training on text alone leaves them: B is zero."""
    if ".lora_A." in key:
        return True
    is_b = ".lora_B." in key and file.dtype(key) in FLOATS
    return is_b and not file.get_tensor(key).any()
