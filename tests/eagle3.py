"""EAGLE-3 heads in plain torch, from what their authors publish: no cache, no pages, one text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

THETA = 10000.0
EPS = 1e-5

Pick = Callable[[Tensor, int], int]
"""From logits [vocab] of a position in the text to its token."""


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.counts, self.head_dim = (heads, kv_heads), head_dim
        self.q_proj = nn.Linear(2 * size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, dim, (heads, kv_heads) = len(x), self.head_dim, self.counts
        q = rotated(self.q_proj(x).view(n, heads, dim))
        k = rotated(self.k_proj(x).view(n, kv_heads, dim)).repeat_interleave(heads // kv_heads, 1)
        v = self.v_proj(x).view(n, kv_heads, dim).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        out: Tensor = self.o_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        return out


class Feed(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, kv_heads: int, head_dim: int, first: bool) -> None:
        super().__init__()
        self.self_attn = Attention(size, heads, kv_heads, head_dim)
        self.mlp = Feed(size, 2 * size)
        self.input_layernorm, self.hidden_norm = Norm(size), Norm(size)
        self.post_attention_layernorm = Norm(size)
        self._normed_first = first

    def forward(self, embeds: Tensor, states: Tensor) -> Tensor:
        normed = self.hidden_norm(states)
        x = normed if self._normed_first else states
        x = x + self.self_attn(torch.cat((self.input_layernorm(embeds), normed), -1))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def rotated(x: Tensor) -> Tensor:
    """[n, heads, dim] rotated by positions 0 .. n - 1, halves together."""
    half = x.shape[-1] // 2
    frequencies = THETA ** (-torch.arange(half) / half)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Guesses(nn.Module):
    """A layer that guesses token after token over a target's states.

    guessed: the tokens that can be guessed, ascending; None: all.
    """

    guessed: Tensor | None = None

    def inner(self, tokens: Tensor, states: Tensor, given: Sequence[Tensor] = ()) -> Tensor:
        """g [n, width] of n entries: tokens [n]; states of the first ones, `given` of the last."""
        raise NotImplementedError

    def logits(self, g: Tensor) -> Tensor:
        """[n, width] to [n, vocab]."""
        raise NotImplementedError

    @torch.no_grad()
    def chain(
        self, text: Sequence[int], states: Tensor, at: int, count: int, pick: Pick
    ) -> tuple[list[int], Tensor]:
        """`count` tokens guessed behind position at + 1, and their logits [count, vocab].

        states: [text, width of all], of which those up to `at` are read.
        """
        found: list[int] = []
        given: list[Tensor] = []
        made = []
        for ahead in range(count):
            tokens = torch.tensor([*text[1 : at + 2], *found])
            g = self.inner(tokens, states[: at + 1], given)[-1]
            made.append(self.logits(g[None])[0])
            found.append(pick(made[-1], at + 2 + ahead))
            given.append(g)
        return found, torch.stack(made)

    def train_on(self, texts: Sequence[tuple[Tensor, Sequence[int]]], steps: int = 60) -> None:
        """Learn what follows; texts: states [n, width of all] and the n tokens of each."""
        optimiser = torch.optim.Adam(
            [each for each in self.parameters() if each.requires_grad], 0.01
        )
        for _ in range(steps):
            loss = torch.zeros(())
            for states, text in texts:
                tokens = torch.tensor(text)
                g = self.inner(tokens[1:-1], states[:-2])
                wanted = tokens[2:]
                if self.guessed is not None:
                    known = torch.isin(wanted, self.guessed)
                    g, wanted = g[known], wanted[known]
                loss = loss + F.cross_entropy(self.logits(g), wanted)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.requires_grad_(False)


class Heads(Guesses):
    """Heads over three states of `width` each.

    embedding: the target's, [vocab, width]. guessed: the tokens that can be guessed, ascending;
    None: all. normed_first: as `norm_before_residual`.
    """

    def __init__(
        self, embedding: Tensor, guessed: Sequence[int] | None = None, normed_first: bool = False
    ) -> None:
        super().__init__()
        vocab, size = embedding.shape
        self.embedding = embedding
        self.guessed = None if guessed is None else torch.tensor(guessed)
        self.sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16}
        self.midlayer = Layer(size, 4, 2, 16, normed_first)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.norm = Norm(size)
        self.lm_head = nn.Linear(size, vocab if guessed is None else len(guessed), bias=False)
        self.normed_first = normed_first

    def inner(self, tokens: Tensor, states: Tensor, given: Sequence[Tensor] = ()) -> Tensor:
        """g [n, width] of n entries: tokens [n]; states of the first ones, `given` of the last."""
        f = torch.cat((self.fc(states), *(each[None] for each in given)))
        out: Tensor = self.midlayer(self.embedding[tokens], f)
        return out

    def logits(self, g: Tensor) -> Tensor:
        """[n, width] to [n, vocab]."""
        own: Tensor = self.lm_head(self.norm(g))
        if self.guessed is None:
            return own
        whole = torch.full((len(own), len(self.embedding)), float("-inf"))
        whole[:, self.guessed] = own
        return whole

    def write(self, folder: Path, speculators: bool = False, **config: Any) -> Path:
        """Save them as SpecForge does, or as speculators does, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: value.detach().clone() for key, value in self.state_dict().items()}
        vocab, size = self.embedding.shape
        if self.guessed is not None:
            tensors["d2t"] = self.guessed - torch.arange(len(self.guessed))
            tensors["t2d"] = torch.isin(torch.arange(vocab), self.guessed)
        own: dict[str, Any] = {
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_attention_heads": self.sizes["heads"],
            "num_key_value_heads": self.sizes["kv_heads"],
            "head_dim": self.sizes["head_dim"],
            "num_hidden_layers": 1,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "vocab_size": vocab,
        }
        whole: dict[str, Any] = {"draft_vocab_size": self.lm_head.out_features}
        if speculators:
            tensors = {key.replace("midlayer", "layers.0"): each for key, each in tensors.items()}
            names = ["Eagle3Speculator"]
            whole |= {"transformer_layer_config": own, "norm_before_residual": self.normed_first}
        else:
            names, whole = ["LlamaForCausalLMEagle3"], {**own, **whole}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architectures": names, **whole, **config}))
        return folder
