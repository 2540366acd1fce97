"""What transformers and PEFT say of a tiny model, one request at a time: the sweep's truth."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modeling.models.generic.linears import NOT_ADAPTED

NUM_TOKENS = 9
"""The prefill's, and eight decoded ones."""

LENGTHS = {"base": (3, 14), "one": (20, 5), "two": (11, 2)}
"""Prompts of each: beyond every window and the short frequencies, below them, and across."""

VOCAB_SIZE = 96

FUSED = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""Names that PEFT turns into parameters of fused experts."""

Prompt = tuple[str, list[int]]
"""The adapter's name, or "base", and the tokens."""


class NoTruthError(Exception):
    """PEFT does not read what it wrote."""


@dataclass(frozen=True)
class Told:
    """The truth of one request: greedy tokens, and logprobs [tokens, vocab]."""

    tokens: list[int]
    logprobs: Tensor


class Oracle:
    """Answers requests to one model, each once.

    exact: whether to compute in float64 where the model's code can, expert by expert, in one model
    for all requests. Else each request has a model of its own, for some keep state between calls.
    """

    def __init__(self, model: Path, *, exact: bool) -> None:
        self._model = model
        self._exact = exact
        self._loaded: dict[Path | None, Any] = {}
        self._told: dict[tuple[Path | None, tuple[int, ...]], Told] = {}

    def told(self, folder: Path | None, prompt: Sequence[int]) -> Told:
        """Answer a prompt with an adapter, or with the base model."""
        key = (folder, tuple(prompt))
        if key not in self._told:
            self._told[key] = _generate(self._of(folder), prompt)
        return self._told[key]

    def _of(self, folder: Path | None) -> Any:
        if not self._exact:
            return self._load(folder)
        if folder not in self._loaded:
            self._loaded[folder] = _widest(self._load(folder))
        return self._loaded[folder]

    def _load(self, folder: Path | None) -> Any:
        # SDPA of transformers 5.17 does not cap scores (Gemma 2).
        eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
        loaded = load(self._model, **(eager if self._exact else {}))
        return loaded if folder is None else _adapted(loaded, folder)


def load(model: Path, **options: Any) -> Any:
    """The model in float32 in eval mode; a larger one whole."""
    config = transformers.AutoConfig.from_pretrained(model)
    name = (config.architectures or [""])[0]
    build: Any = transformers.AutoModelForCausalLM
    if name.endswith("ForConditionalGeneration"):
        build = getattr(transformers, name)
    return build.from_pretrained(model, dtype=torch.float32, **options).eval()


@torch.no_grad()
def _widest(loaded: Any) -> Any:
    """Turn it to float64, unless its code mixes that with float32."""
    try:
        loaded.double()(input_ids=torch.tensor([[3, 4]]))
    except RuntimeError:
        return loaded.float()
    return loaded


def linears(model: Path) -> list[str]:
    """The linear maps inside the layers, but for those that PEFT takes no LoRA on."""
    loaded = load(model)
    refused = NOT_ADAPTED.get(loaded.config.model_type, "")
    return [name for name, module in loaded.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and any(p.isdigit() for p in name.split("."))
            and name.rsplit(".", 1)[-1] != refused]  # fmt: skip


def write_random_adapter(folder: Path, model: Path, targets: Sequence[str], seed: int) -> Path:
    """Write an adapter on modules of these names, whose rank the seed makes another."""
    # One expression: of names in a list PEFT makes fused experts' parameters for some models.
    paths = "|".join(map(re.escape, targets))
    config = LoraConfig(r=4 + 4 * seed, lora_alpha=8.0, target_modules=paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of what it turns into parameters.
        adapted = get_peft_model(load(model), config)
    if config.target_parameters:
        # For models whose experts are fused now, PEFT takes these names to be the experts'.
        kept = [name for name in targets if name.rsplit(".", 1)[-1] not in FUSED]
        return write_random_adapter(folder, model, kept, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def prompts(longest: int = 256) -> list[Prompt]:
    """Prompts of unequal lengths, `longest` tokens at most, and the adapter of each."""
    generator = torch.Generator().manual_seed(3)
    return [
        (name, torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()[:longest])
        for name, lengths in LENGTHS.items()
        for length in lengths
    ]


def _adapted(loaded: Any, folder: Path) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        adapted: Any = PeftModel.from_pretrained(loaded, str(folder)).eval()
    if any("missing adapter keys" in str(each.message) for each in told):
        raise NoTruthError("PEFT does not find the adapter's tensors in the file that it wrote")
    return adapted


@torch.no_grad()
def _generate(model: Any, prompt: Sequence[int]) -> Told:
    found = model.generate(
        input_ids=torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
        output_logits=True, return_dict_in_generate=True, use_cache=True,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    logits = torch.stack([each[0].float() for each in found.logits])
    return Told(found.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1))
