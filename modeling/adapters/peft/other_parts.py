"""What adapters of a larger model change beside its decoder."""

from collections.abc import Collection

from configs.architectures.text_stack import is_other_part, parts_of
from modeling.adapters.faults import refuse
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import FLOATS
from sharding.tensor_file import TensorFile

LARGER = "model.language_model."
"""How paths in larger models begin, among others, where the decoder is served as a part of one."""


def leave_other_parts(
    file: TensorFile,
    known: Collection[str],
    outer_parts: Collection[str],
    idle_layers: Collection[int],
) -> bool:
    """Leave out of a file what changes no text; return whether numbers in it decided that.

    known: modules as a larger model names them, if it is one. outer_parts: those that embed some
    tokens of texts too, which no adapter may change. idle_layers: those of the decoder that no text
    goes through.
    """
    if not any(module.startswith(LARGER) for module in known):
        return False
    idle = [f".layers.{layer}." for layer in idle_layers]
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


def _is_idle(file: TensorFile, key: str) -> bool:
    """Whether a tensor is of factors as training on text alone leaves them: B is zero."""
    if ".lora_A." in key:
        return True
    is_b = ".lora_B." in key and file.dtype(key) in FLOATS
    return is_b and not file.get_tensor(key).any()
