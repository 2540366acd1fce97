"""Tokens that a larger model embeds by tables of other parts, though no image or sound is there.

Gemma 3n's vocabulary ends in tokens of images and sound. Their vectors come from `embed_vision` and
`embed_audio`, in a text too: an own table, a norm, a projection, and a norm without weights.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from configs.architectures.base import ArchitectureError
from configs.base import Config


class OuterTokens(Config):
    """Tokens from `first` on that are embedded by one part of a larger model.

    part: its name in the checkpoint. count: how many tokens. table_size, width: rows and columns of
    its table. eps: of both of its norms.
    """

    part: str
    first: NonNegativeInt
    count: NonNegativeInt
    table_size: PositiveInt
    width: PositiveInt
    eps: float


_GEMMA3N = {
    "vision": {"vocab_offset": 262144, "vocab_size": 128, "hidden_size": 2048},
    "audio": {"vocab_offset": 262272, "vocab_size": 128, "hidden_size": 1536},
}
"""By its parts, in the order in which they take tokens: transformers' numbers for what files leave
unsaid."""


def outer_tokens(name: str, config: Mapping[str, Any], vocab_size: int) -> tuple[OuterTokens, ...]:
    """Return the last tokens of a class's vocabulary by part, in order; (): it embeds all itself.

    ArchitectureError where transformers fails at some of them.
    """
    if name != "Gemma3nForConditionalGeneration":
        return ()
    fields = {
        kind: {"rms_norm_eps": 1e-6, **own, **(config.get(f"{kind}_config") or {})}
        for kind, own in _GEMMA3N.items()
    }
    # Each part's tokens end where the next one's begin, whatever the size of its table.
    begins = [own["vocab_offset"] for own in fields.values()]
    ends = [*(min(first, vocab_size) for first in begins[1:]), vocab_size]
    found = []
    for (kind, own), first, end in zip(fields.items(), begins, ends, strict=True):
        if first >= end:
            continue
        table_size = own["vocab_size"]
        if end - first > table_size:
            raise ArchitectureError(
                f"{kind}_config.vocab_size ({table_size}) is below the {end - first} tokens from "
                f"{kind}_config.vocab_offset ({first}) on: transformers fails at tokens that the "
                "table lacks"
            )
        found.append(
            OuterTokens(
                part=f"embed_{kind}",
                first=first,
                count=end - first,
                table_size=table_size,
                width=own["hidden_size"],
                eps=own["rms_norm_eps"],
            )
        )
    return tuple(found)
