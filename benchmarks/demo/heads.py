"""Medusa heads for the demo: what guesses the tokens behind the next one, for all styles.

They are trained on the final hidden states of the base model and of its adapters as they were
saved. Whatever they guess, answers stay the same: each guess is checked.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

NUM_HEADS: Final = 4
IGNORED: Final = -100
HEADS_RATE: Final = 4e-3


class DemoHead(nn.Module):
    """A residual block and a linear map to the vocabulary: version 1, with one layer."""

    def __init__(self, head: Tensor) -> None:
        """head: the base model's [vocabulary, width], with which the map begins."""
        super().__init__()
        width = head.shape[1]
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.out = nn.Parameter(head.detach().clone())

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] to logits [..., vocabulary]."""
        return functional.linear(states + functional.silu(self.linear(states)), self.out)


def train_heads(
    head: Tensor, batches: Iterator[tuple[Tensor, Tensor]], steps: int
) -> nn.ModuleList:
    """Train heads on batches of (states [rows, tokens, width], labels [rows, tokens])."""
    heads = nn.ModuleList(DemoHead(head) for _ in range(NUM_HEADS))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=HEADS_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=HEADS_RATE, total_steps=steps)
    for step, (states, labels) in enumerate(batches):
        losses, right = [], []
        for index, each in enumerate(heads):
            ahead = index + 2
            wanted = labels[:, ahead:].masked_fill(labels[:, 1 : 1 - ahead] == IGNORED, IGNORED)
            logits = each(states[:, :-ahead]).flatten(0, 1)
            target = wanted.flatten()
            losses.append(functional.cross_entropy(logits, target, ignore_index=IGNORED))
            known = target != IGNORED
            right.append((logits.argmax(-1)[known] == target[known]).float().mean().item())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(torch.stack(losses).sum())
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"  step {step:4d}  right {' '.join(f'{each:.2f}' for each in right)}", flush=True
            )
    return heads


def save_heads(heads: nn.ModuleList, folder: Path) -> None:
    """Save heads in bfloat16, as Medusa's authors name them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for index, head in enumerate(heads):
        own = dict(head.named_parameters())
        tensors[f"{index}.0.linear.weight"] = own["linear.weight"]
        tensors[f"{index}.0.linear.bias"] = own["linear.bias"]
        tensors[f"{index}.1.weight"] = own["out"]
    kept = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(kept, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": len(heads), "medusa_num_layers": 1, "version": "1"}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
