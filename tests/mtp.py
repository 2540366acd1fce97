"""The layer that predicts a further token: transformers' own, written as checkpoints have it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints_generic import LAYERS, randomise
from tests.checkpoints_padded import randomise_scales
from tests.eagle3 import Guesses
from tests.modeling.models.tiny_causal import build, tiny_config


class Mtp(Guesses):
    """transformers' MtpModel over the model in a folder, with random weights."""

    def __init__(self, folder: Path) -> None:
        # Here, not above: versions before 5.24 have none.
        from transformers.modeling_layers import MtpModel

        super().__init__()
        auto: Any = AutoModelForCausalLM
        main = auto.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        main.config.num_mtp_layers = 1
        if getattr(main.config, "mlp_layer_types", None):
            main.config.mtp_mlp_layer_types = ["sparse"]
        self.first: int = main.config.num_hidden_layers
        self.folder = folder
        made: Any = MtpModel
        self.model = made(main, 1).train(False)
        for name, parameter in self.model.layers.named_parameters():
            randomise(name, parameter)
        with torch.no_grad():
            randomise_scales(self.model.layers)

    def inner(self, tokens: Tensor, states: Tensor, given: Sequence[Tensor] = ()) -> Tensor:
        """See `Guesses`; states: the target's last ones."""
        h = torch.cat((states, *(each[None] for each in given)))[None]
        positions = torch.arange(1, len(tokens) + 1)[None]
        found: Tensor = self.model.forward_layer(0, h, positions, None, input_ids=tokens[None])
        return found[0]

    def logits(self, g: Tensor) -> Tensor:
        """See `Guesses`."""
        logits: Tensor = self.model.shared_head(g)
        return logits

    def write(self) -> Path:
        """Add it to the model's files, with copies that nobody reads, and return the folder."""
        path, config = self.folder / "model.safetensors", self.folder / "config.json"
        tensors = load_file(path)
        for name, tensor in self.model.layers[0].state_dict().items():
            for own, part in _published(name, tensor.detach()):
                tensors[f"model.layers.{self.first}.{own}"] = part.clone()
        copy = torch.full_like(tensors["model.embed_tokens.weight"], float("nan"))
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            tensors[f"model.layers.{self.first}.{name}"] = copy.clone()
        save_file(tensors, path, metadata={"format": "pt"})
        settings = json.loads(config.read_text())
        config.write_text(json.dumps({**settings, "num_nextn_predict_layers": 1}))
        return self.folder


def write_untrained(folder: Path, kind: str) -> Path:
    """Write a small random model of a mixture's type with such a layer, by any transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build(tiny_config(kind, num_hidden_layers=LAYERS + 1))
        for name, parameter in made.named_parameters():
            randomise(name, parameter)
    made.save_pretrained(folder)
    path, config = folder / "model.safetensors", folder / "config.json"
    settings, tensors = json.loads(config.read_text()), load_file(path)
    for key in ("mlp_layer_types", "layer_types"):
        if settings.get(key):
            settings[key] = settings[key][:LAYERS]
    size, generator = settings["hidden_size"], torch.Generator().manual_seed(3)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{LAYERS}.{name}.weight"] = 1 + torch.rand(size, generator=generator)
    joined = torch.randn(size, 2 * size, generator=generator) * 0.2
    tensors[f"model.layers.{LAYERS}.eh_proj.weight"] = joined
    save_file(tensors, path, metadata={"format": "pt"})
    own = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps({**settings, **own}))
    return folder


def _published(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor as published files have it: a matrix for each expert's gate, up and down."""
    own = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    if tensor.dim() != 3:
        return [(own, tensor)]
    path, _, last = own.rpartition(".")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
    return [
        (f"{path}.{expert}.{each}.weight", part)
        for expert, matrix in enumerate(tensor)
        for each, part in zip(names, matrix.chunk(len(names)), strict=True)
    ]
