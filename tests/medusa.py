"""Medusa heads in plain torch: trained on what a model has said, written as their authors do."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS = "medusa_lm_head.safetensors"


class Block(nn.Module):
    """One residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + nn.functional.silu(self.linear(x))
        return out


class Heads(nn.Module):
    """Heads over states [n, width]; head_weight: the model's head [vocab, width].

    own: whether each head has a copy of its own (version 1).
    """

    def __init__(self, head_weight: Tensor, count: int, layers: int = 1, own: bool = False) -> None:
        super().__init__()
        width = head_weight.shape[1]
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(width) for _ in range(layers))) for _ in range(count)
        )
        self.layers = layers
        self.base = head_weight
        self.heads = nn.ParameterList(
            nn.Parameter(head_weight.clone()) for _ in range(count if own else 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] to [n, count, vocab]."""
        weights = list(self.heads) or [self.base] * len(self.blocks)
        pairs = zip(self.blocks, weights, strict=True)
        return torch.stack([block(x) @ weight.t() for block, weight in pairs], dim=1)

    def train_on(self, texts: Sequence[tuple[Tensor, Sequence[int]]], steps: int = 60) -> None:
        """Learn which tokens follow; texts: states [n, width] and the n tokens of each."""
        parameters = [*self.parameters()]
        optimiser = torch.optim.Adam(parameters, 0.02)
        for _ in range(steps):
            loss = torch.zeros(())
            for states, tokens in texts:
                logits = self(states)
                for k in range(len(self.blocks)):
                    wanted = torch.tensor(tokens[k + 2 :])
                    own = logits[: len(wanted), k]
                    loss = loss + nn.functional.cross_entropy(own, wanted)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.requires_grad_(False)

    def write(self, folder: Path, name: str = WEIGHTS, **config: object) -> Path:
        """Save them as Medusa's authors and LoRAX do, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{k}.{key}": value.detach().clone()
            for k, block in enumerate(self.blocks)
            for key, value in block.state_dict().items()
        }
        tensors |= {
            f"{k}.{self.layers}.weight": head.detach().clone() for k, head in enumerate(self.heads)
        }
        save_file(tensors, folder / name)
        counts = {"medusa_num_heads": len(self.blocks), "medusa_num_layers": self.layers}
        (folder / "config.json").write_text(json.dumps(counts | config))
        return folder
