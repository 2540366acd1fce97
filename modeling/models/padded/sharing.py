"""Which rows of a padded model may share a forward, so that no answer depends on the other rows.

Padding hides the other rows from a row, but for what transformers' code looks up once for a
whole forward: how many columns there are, and the largest position among them. What does so was
found by `tests/modeling/models/sweep.py`, which runs every causal class beside transformers.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from modeling.models.cache_name import cache_name


@dataclass(frozen=True)
class Sharing:
    """How the rows of a model are grouped, by their lengths (tokens computed, the step's included).

    equal_from: rows of so many tokens and more share a forward only with rows as long as they
    are; None for never. borders: lengths beyond which rows are computed otherwise (longrope's
    second set of frequencies). recomputes: whether a row that passes a border is computed anew,
    where else its cache stays as it was written. replays: whether tokens that were computed one
    by one are computed so again, for more columns at once would make other answers.
    """

    equal_from: int | None = None
    borders: tuple[int, ...] = ()
    recomputes: bool = False
    replays: bool = False

    def group(self, length: int) -> Hashable:
        """Rows may share a forward when this is the same for both."""
        if self.equal_from is not None and length >= self.equal_from:
            return ("equal", length)
        return self.side(length)

    def side(self, length: int) -> int:
        """How many borders lie below a length."""
        return sum(border < length for border in self.borders)

    def begins_anew(self, length: int) -> bool:
        """Whether a row of `length` tokens, the newest included, cannot use its cache."""
        return self.recomputes and length - 1 in self.borders

    def cuts(self, prompt_length: int, length: int) -> list[int]:
        """Ends of the pieces in which `length` tokens are computed, as they first were."""
        if self.replays and self.equal_from is not None:
            return [*range(max(prompt_length, self.equal_from - 1), length), length]
        between = [] if self.recomputes else self.borders
        return [border for border in between if prompt_length <= border < length] + [length]


def sharing_of(model: PreTrainedModel) -> Sharing:
    """Read a model's config for what makes its rows depend on each other."""
    config = model.config.get_text_config(decoder=True)
    borders = tuple(sorted({border for border in _borders(config) if border is not None}))
    recomputes = any(_recomputes(model, border) for border in borders)
    replays = getattr(config, "keep_window_size", None) is not None
    return Sharing(min(_column_limits(config), default=None), borders, recomputes, replays)


def _column_limits(config: PreTrainedConfig) -> Iterator[int]:
    """From how many columns on a row's answer depends on their number."""
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries by their column; below this all have the same scale.
        yield int(config.floor_scale)
    if getattr(config, "keep_window_size", None) is not None:
        # Doge keeps the best so many columns; of equal ones (of one token) the number decides.
        yield int(config.keep_window_size) + 1


def rope_kinds(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of a config: one set, or one for each kind of layer."""
    found: Any = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    yield from nested or [found]


def _borders(config: PreTrainedConfig) -> Iterator[int | None]:
    for rope in rope_kinds(config):
        if rope.get("rope_type") == "longrope":
            own: Any = getattr(config, "original_max_position_embeddings", None)
            yield rope.get("original_max_position_embeddings", own)


def _recomputes(model: PreTrainedModel, border: int) -> bool:
    """Whether the family's `generate` drops a cache of `border` tokens for the next one."""
    settings = model.generation_config
    if settings is not None and settings.use_cache is False:
        return True  # It computes each token's whole sequence.
    past = DynamicCache()
    past.update(torch.zeros(1, 1, border, 1), torch.zeros(1, 1, border, 1), 0)
    prepare: Any = model.prepare_inputs_for_generation
    ids = torch.zeros(1, border + 1, dtype=torch.int64, device=model.device)
    name = cache_name(model.forward)
    inputs: dict[str, Any] = prepare(
        ids,
        next_sequence_length=1,
        attention_mask=torch.ones_like(ids),
        use_cache=True,
        **{name: past},
    )
    return inputs.get(name) is None
