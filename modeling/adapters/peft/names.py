"""The names of an adapter's tensors, as PEFT writes them, of those that training tools write.

PEFT writes `base_model.model.<module>.lora_A.weight`. A tool that saves a wrapped model's state
itself leaves the wrappers' names inside (torch.compile, FSDP, DDP) and the adapter's name behind
the factor (`lora_A.default.weight`). A tool that trains without PEFT's model leaves the prefix out.
"""

import re
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

from modeling.adapters.faults import refuse
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.kinds import MEGATRON_ADVICE
from sharding.tensor_file import TensorFile

WEIGHTS_NAME = "adapter_model.safetensors"
MOST_READ = 64
"""How many names are compared with other formats': a file may hold any number of them."""
MOST_SHOWN = 8

WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
"""Parts of paths that torch.compile, FSDP, activation checkpointing and Lightning add."""

_PARALLEL = "module."
"""What DDP and DeepSpeed put before every path."""

_NAMED = re.compile(
    r"(?P<factor>\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|"
    r"token_adapter\.trainable_tokens_delta))"
    r"\.(?P<adapter>[^.]+)(?P<rest>\.weight|\.bias|)$"
)
_SAVED = re.compile(r"\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\.[^.]+)$")
_BARE = frozenset({"weight", "bias"})

_TOOLS = (
    (
        re.compile(r"\.(?:attn|mlp|sa_attn)\.[a-z0-9_]+\.lora_[ab]\.weight$"),
        "torchtune's own format: save it with torchtune's FullModelHFCheckpointer, or convert it "
        "with torchtune.models.convert_weights.tune_to_peft_adapter_weights",
    ),
    (
        re.compile(r"\.lora_[ab]$"),
        "MLX's names: leave the weights in a file adapters.safetensors, as mlx_lm writes it",
    ),
    (
        re.compile(r"\.(?:linear_in|linear_out)\.weight$|\.adapter_layer\."),
        f"Megatron's names, as NeMo writes them: {MEGATRON_ADVICE}",
    ),
    (
        re.compile(r"^lora_(?:unet|te\d?)_|\.lora_(?:down|up)\.weight$"),
        "an image model's: no language model takes it",
    ),
)
"""Names by which formats are known that are not read here, and what converts them."""


def open_tensors(folder: Path, within: Path | None = None) -> TensorFile:
    """Open a folder's weights; within: as in RegularFile.

    Raises AdapterError where there are none, DamagedFile or OSError where they cannot be read.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        other = " (only a .bin)" if any(folder.glob("*.bin")) else ""
        refuse(
            f"no {WEIGHTS_NAME} among the adapter's files{other}: save it with "
            "save_pretrained(..., safe_serialization=True)"
        )
    return TensorFile(path, within)


def use_peft_names(file: TensorFile) -> None:
    """Give tensors PEFT's names; AdapterError where the names are another format's."""
    meaning = format_of(file.keys())
    if meaning is not None:
        refuse(f"{WEIGHTS_NAME} holds {meaning}")
    file.rename(peft_names(file.keys()))


def peft_names(keys: Collection[str]) -> dict[str, str]:
    """Return PEFT's name of each tensor; AdapterError where the file holds several adapters."""
    taken: dict[str, str] = {}
    adapters: set[str] = set()
    paths = {key: _path(key) for key in keys}
    has_prefix = any(PREFIX in path for path in paths.values())
    for key, path in paths.items():
        name, adapter = _without_adapter(path if has_prefix else PREFIX + path)
        adapters |= {adapter} if adapter else set()
        if name in taken:
            refuse(f"{taken[name]} and {key} are names of one tensor: save the adapter again")
        taken[name] = key
    if len(adapters) > 1:
        refuse(
            f"{WEIGHTS_NAME} holds several adapters ({', '.join(sorted(adapters)[:MOST_SHOWN])}): "
            "save the one that is meant (save_pretrained with selected_adapters)"
        )
    return {key: name for name, key in taken.items()}


def _path(key: str) -> str:
    """Return a tensor's path in the model without what wrappers add."""
    name = ".".join(part for part in key.split(".") if part not in WRAPPERS)
    return name.removeprefix(_PARALLEL) if name.startswith(_PARALLEL + PREFIX) else name


def _without_adapter(name: str) -> tuple[str, str | None]:
    """Return the name without the adapter's own, which a raw state holds, and that."""
    found = _NAMED.search(name)
    if found is not None and found["adapter"] not in _BARE:
        # PEFT saves a magnitude without `.weight`.
        rest = "" if found["factor"] == ".lora_magnitude_vector" else found["rest"]
        return name[: found.start()] + found["factor"] + rest, found["adapter"]
    saved = _SAVED.search(name)
    if saved is None:
        return name, None
    return name[: saved.start()] + saved["rest"], saved["adapter"]


def format_of(keys: Iterable[str]) -> str | None:
    """Return which format has these names, and what converts it; None for PEFT's."""
    for key in islice(keys, MOST_READ):
        for pattern, meaning in _TOOLS:
            if pattern.search(key):
                return meaning
    return None
