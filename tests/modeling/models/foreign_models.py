"""Models from elsewhere: plain modules with habits of old or odd code, to be served or refused."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCAB_SIZE, HIDDEN, HEADS = 40, 12, 3

Legacy = tuple[tuple[Tensor, Tensor], ...]


class ForeignLayer(nn.Module):
    """Attention with keys kept as [rows * heads, head_dim, length], as old BLOOM did."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, _ = x.shape
        parts = self.query_key_value(x).view(rows, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).flatten(1, 2)
        k = k.transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-1), torch.cat([past[1], v], dim=-2)
        scores = (q @ k).view(rows, HEADS, length, -1).masked_fill(~mask[:, None], -1e9)
        out = scores.softmax(-1).flatten(0, 1) @ v
        y = self.dense(out.view(rows, HEADS, length, -1).transpose(1, 2).flatten(2))
        return x + y, (k, v)


class ForeignModel(nn.Module):
    """A decoder that answers with legacy tuples; it has no position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList([ForeignLayer(), ForeignLayer()])
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE)
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: Legacy | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
    ) -> Any:
        assert use_cache
        assert return_dict
        assert past_key_values is None or isinstance(past_key_values, tuple)
        queries, keys = input_ids.shape[1], attention_mask.shape[1]
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = causal[None] & attention_mask[:, None].bool()
        x, past = self.embedded(input_ids, attention_mask), []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, mask, past_key_values[index] if past_key_values else None)
            past.append(kept)
        return SimpleNamespace(logits=self.head(x), past_key_values=self.kept(tuple(past)))

    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        embedded: Tensor = self.embed(input_ids)
        return embedded

    def kept(self, past: Legacy) -> Legacy | None:
        return past


class ColumnPositions(ForeignModel):
    """Numbers columns, not tokens: its rows change with their padding."""

    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        first = attention_mask.shape[1] - input_ids.shape[1]
        columns = torch.arange(first, attention_mask.shape[1]) / 4
        return super().embedded(input_ids, attention_mask) + columns.sin()[None, :, None]


class Counting(ForeignModel):
    """Adds the number of new tokens: a row that goes on is another than the same row whole."""

    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().embedded(input_ids, attention_mask) + input_ids.shape[1] / 4


class Forgetful(ForeignModel):
    """Keeps no cache."""

    def kept(self, past: Legacy) -> Legacy | None:
        return None


class Recurrent(ForeignModel):
    """Keeps one state for a whole row."""

    def kept(self, past: Legacy) -> Legacy | None:
        return tuple((keys[..., :1], values[:, :1]) for keys, values in past)


class Halving(ForeignLayer):
    """Takes rows longer than a trial's in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.piece = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parts = x.tensor_split(2, dim=1) if x.shape[1] > 10 else [x]
        return super().forward(torch.cat([self.piece(part) for part in parts], 1), mask, past)


class Halves(ForeignModel):
    """Of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halving(), Halving()])


class Router(nn.Linear):
    """A linear module that answers with more than its product."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return scores.softmax(-1), scores


class OddLayer(ForeignLayer):
    """A layer with modules that a hook on them could not serve."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.router = nn.Linear(HIDDEN, 2, dtype=torch.float64)
        self.gate = Router(HIDDEN, 2)
        self.twice = nn.Linear(HIDDEN, HIDDEN)
        self.some = nn.Linear(HIDDEN, HIDDEN)
        self.turned = nn.Linear(HIDDEN, HIDDEN)
        self.named = nn.Linear(HIDDEN, HIDDEN)
        self.never = nn.Linear(HIDDEN, HIDDEN)
        self.flat = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        weight = self.router(x.double()).softmax(-1).float() + self.gate(x)[0]
        x = x + sum(weight[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        x = x + self.twice(self.twice(x)) + self.named(input=x)
        x = x + self.turned(x.transpose(0, 1)).transpose(0, 1)
        x = x + self.flat(x.flatten(0, 1)).view(x.shape)
        chosen = x.sum(-1) > 0
        x = x.index_put((chosen,), self.some(x[chosen]))
        return super().forward(x, mask, past)


class Odd(ForeignModel):
    """Its second layer lacks one module that the first has, and has another wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OddLayer(), OddLayer(), ForeignLayer()])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(5))


def foreign(model: nn.Module) -> PreTrainedModel:
    """As if transformers had loaded it."""
    return cast(PreTrainedModel, model.eval())
