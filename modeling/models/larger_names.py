"""How the tensors of a decoder are named in a larger model's checkpoint."""

from collections.abc import Callable, Collection
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from configs.architectures.text_stack import decoder_name


def decoder_names(larger_type: str, parts: Collection[str]) -> Callable[[str], str | None]:
    """Return what makes the decoder's own name of a tensor's; None for another part's.

    larger_type: the larger model's `model_type`, of which transformers lists how its makers name
    tensors (`transformers.conversion_mapping`). parts: others that are read; see `decoder_name`.
    """
    listed: Any = get_checkpoint_conversion_mapping
    renamings = [each for each in listed(larger_type) or () if isinstance(each, WeightRenaming)]

    def own_name(stored: str) -> str | None:
        name = stored
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return decoder_name(name, parts)

    return own_name
