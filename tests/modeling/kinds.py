"""Kinds of adapters that parity tests compare, and over which models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.checkpoints_generic import GENERIC_ADAPTERS, GENERIC_ENDS
from tests.checkpoints_others import GPT2_ADAPTERS
from tests.modeling.parity.comparison import ADAPTERS, VOCABULARY_ADAPTERS
from tests.sweeps import swept_rows

Model = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """Adapters of a kind, by family and variant of the model; more: of `Setting`."""

    names: Mapping[Model, tuple[str, ...]]
    more: Mapping[str, Any] = field(default_factory=dict)


def _kind(suffix: str, *names: str, **more: Any) -> Kind:
    models = {"llama": "gqa", "gpt2": "plain", "generic": "olmo2"}
    return Kind({(f"{f}_{suffix}", variant): names for f, variant in models.items()}, more)


KINDS: Mapping[str, Kind] = {
    "LoRA, rsLoRA, patterns, some layers": Kind(
        {
            ("llama", "gqa"): tuple(ADAPTERS),
            ("gpt2", "plain"): tuple(GPT2_ADAPTERS),
            ("generic", "olmo2"): tuple(GENERIC_ADAPTERS),
        }
    ),
    "DoRA": _kind("dora", "dora", "some"),
    "a bias of B": _kind("dora", "biased"),
    "trained biases": _kind("dora", "trained"),
    "bare parameters": _kind("parameters", "parameters", "some"),
    "trained tokens": Kind(
        {
            ("llama_tokens", "odd_vocab_tied"): ("tokens", "embedding", "both", "head"),
            ("gpt2_tokens", "plain"): ("tokens", "embedding", "both", "head"),
            ("generic_tokens", "olmo2"): ("tokens", "embedding", "both", "head"),
        }
    ),
    "norms": _kind("norms", "norms", "last", "scarce"),
    "whole linear maps": _kind("whole", "whole", "one"),
    "LoRA on embedding and head": Kind(
        {
            ("vocabulary", "gqa"): tuple(VOCABULARY_ADAPTERS)[1:],
            ("gpt2_ends", "untied"): ("head", "embedding", "everything"),
            ("generic_ends", "gemma2_untied"): ("everything",),
        },
        {"vocabulary": True},
    ),
    "whole embedding or head": Kind(
        {
            ("llama_ends", "gqa"): ("whole_head", "whole_embedding", "whole_both"),
            ("gpt2_ends", "untied"): ("whole_head", "whole_embedding", "whole_both"),
            ("generic_ends", "gemma2_untied"): tuple(GENERIC_ENDS)[1:],
        },
        {"vocabulary": True, "copies": 5},
    ),
}

MODELS: tuple[Model, ...] = (("llama", "gqa"), ("gpt2", "plain"), ("generic", "olmo2"))
"""Of Llama's code, GPT-2's, and transformers' modules."""

WHOLE_LINEARS: Mapping[Model, tuple[str, ...]] = {
    ("llama_whole", "gqa"): ("k_proj", "o_proj", "down_proj"),
    ("gpt2_whole", "plain"): ("mlp.c_proj", "c_attn"),
    ("generic_whole", "olmo2"): ("gate_proj", "v_proj", "down_proj"),
}
"""The linear maps that adapters of the kind bring."""


def once(suffix: str) -> list[Any]:
    """Each family of a kind, its variant, and ranks: `parity/cells.py` tries all of them."""
    ranks = {"llama": 4, "gpt2": 1, "generic": 2}
    rows = [(f"{family}_{suffix}", variant, ranks[family]) for family, variant in MODELS]
    return swept_rows(rows, lambda family, *_: not family.startswith("generic"))
