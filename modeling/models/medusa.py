"""Medusa heads: each guesses one token behind the next one, from what the model's head reads.

    s_k = x + silu(W_k x + b_k)     a block; a head has one or more, one after the other
    logits_k = V_k s_k              version 1: V_k is the head's own; 2: that of the model's head

Head k, from 0 on, guesses the token k + 1 behind the one that the model's head samples from x.
Names and shapes in the files are those of Medusa's authors, as LoRAX reads them:
`k.block.linear.weight`, `k.block.linear.bias`, and `k.blocks.weight` in version 1.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.medusa import MedusaArchitecture, load_medusa
from modeling.models.base import PagedModel
from sharding.checkpoint import Checkpoint, CheckpointError
from sharding.embedding import ParallelHead
from sharding.group import TensorParallel
from sharding.loader import Weights
from sharding.tensor_file import TensorFile

WEIGHTS = "medusa_lm_head.safetensors"


class ResidualBlock(nn.Module):
    """One block of a head, whole on every rank."""

    def __init__(self, name: str, width: int, weights: Weights) -> None:
        """name: e.g. "0.0"."""
        super().__init__()
        self.weight = weights.parameter(f"{name}.linear.weight", (width, width))
        self.bias = weights.parameter(f"{name}.linear.bias", (width,))

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] to the same shape."""
        return x + F.silu(F.linear(x, self.weight, self.bias))


class MedusaHeads(nn.Module):
    """The heads of a base model. count: tokens that they guess."""

    def __init__(self, config: MedusaArchitecture, model: PagedModel, weights: Weights) -> None:
        """model: the one that the heads were trained for. Reads this rank's part."""
        super().__init__()
        self.count, layers, width = config.num_heads, config.num_layers, model.width
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(f"{k}.{layer}", width, weights) for layer in range(layers))
            )
            for k in range(self.count)
        )
        own = layers > 1 or weights.has(f"0.{layers}.weight")
        self._heads = [
            ParallelHead(f"{k}.{layers}", model.vocab_size, width, weights)
            for k in range(self.count if own else 0)
        ]
        self._model_head = model.head

    @property
    def shares_head(self) -> bool:
        """Whether they have no linear maps of their own (version 2)."""
        return not self._heads

    def shared_logits(self, states: Tensor) -> Tensor:
        """[n, count, width] to [n, count, vocab_size] by the model's own head."""
        return self._model_head(states.flatten(0, 1), None).view(*states.shape[:2], -1)

    def states(self, x: Tensor, count: int) -> Tensor:
        """[n, width] to what the first heads' linear maps read, [n, count, width]."""
        return torch.stack([blocks(x) for blocks in self.blocks[:count]], dim=1)

    def logits(self, states: Tensor) -> Tensor:
        """[n, count, width] to [n, count, vocab_size], the same on every rank."""
        if self.shares_head:
            return self.shared_logits(states)
        heads = self._heads[: states.shape[1]]
        parts = [head.partial(states[:, k]) for k, head in enumerate(heads)]
        logits = self._heads[0].gather(torch.stack(parts, dim=1).flatten(0, 1))
        return logits.view(*states.shape[:2], -1)


def load_heads(folder: Path, model: PagedModel, group: TensorParallel) -> MedusaHeads:
    """Read this rank's part of the heads in a folder; ValueError says what is wrong with it."""
    config = load_medusa(folder)
    path = _weights_file(folder)
    weights = Weights(Checkpoint(folder, path.name, TensorFile), group, model.dtype, model.device)
    try:
        heads = MedusaHeads(config, model, weights)
        weights.finish()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: {error}. These heads have {config.num_heads} heads of {config.num_layers} "
            f"blocks by config.json, and the model is {model.width} wide with {model.vocab_size} "
            "tokens: are they for another model?"
        ) from error
    return heads


def _weights_file(folder: Path) -> Path:
    """Return the heads' file: under its usual name, or the only one of its format."""
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} lacks {WEIGHTS}, and has {len(found)} other files of safetensors: heads are "
            "read from safetensors alone; convert medusa_lm_head.pt, or name the folder with them"
        )
    return found[0]
