"""Every causal class of the installed transformers, padded and mixed, beside transformers + PEFT.

    python -m tests.modeling.models.sweep [--variant plain|longrope|dynamic] [KIND ...]

One batch of the base model and two adapters on all linear maps, unequal rows, a prefill and
decode steps; the truth is `generate` of one request at a time. An outcome is exact, refused with
its sentence, or wrong; the command fails when anything is wrong.
"""

import argparse
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from configs.wire.sampling import Sampling
from modeling.runner.padded import PaddedRunner
from sharding.checkpoint import CheckpointError
from tests.modeling.models.tiny_causal import VARIANTS, kinds, write_tiny
from tests.modeling.padded import generate_padded, padded_runner
from tests.modeling.stepping import Answer, Asked

NUM_TOKENS = 9
"""The prefill's, and eight decoded ones."""

LENGTHS = {"base": (3, 14), "one": (20, 5), "two": (11, 2)}
"""Prompts of each: beyond every window and the short frequencies, below them, and across."""

PREEMPTED = {1: 4, 4: 7}
"""Requests, and after how many tokens of its answer each is computed anew."""

TOLERANCE = 2e-3
"""On logprobs in float32, against sums taken in another order."""

VOCAB_SIZE = 96

FUSED = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""Names that PEFT turns into parameters of fused experts."""


Prompt = tuple[str, list[int]]
"""Whose it is (an adapter's name, or "base"), and its tokens."""


@dataclass(frozen=True)
class Outcome:
    """How a kind fared: "exact", "refused", "wrong" or "not built", and what there is to say."""

    word: str
    why: str = ""


@dataclass(frozen=True)
class Told:
    """The truth of one request: greedy tokens, and logprobs [tokens, vocab]."""

    tokens: list[int]
    logprobs: Tensor


def sweep(root: Path, kind: str, variant: str = "plain") -> Outcome:
    """Judge one kind; writes its model and adapters below `root`."""
    try:
        model = write_tiny(root / "model", kind, variant)
    except Exception as error:
        return Outcome("not built", _short(error))
    try:
        _truths(model, [], prompts())
    except Exception as error:
        return Outcome("no truth", _short(error))
    try:
        runner = padded_runner(model)
    except (ValueError, CheckpointError) as error:
        return Outcome("refused", _short(error))
    except Exception as error:
        return Outcome("wrong", f"the start ends: {_short(error)}")
    targets = [name for p in runner._model.projections
               for layer in range(p.num_layers) for name in p.modules(layer)]  # fmt: skip
    left_out = sorted(set(_linears(model)) - set(targets))
    if not targets:
        return _outcome(_worst(model, []), "takes no adapters")
    folders = [_write_adapter(root / name, model, targets, seed)
               for seed, name in enumerate(("one", "two"))]  # fmt: skip
    note = f"; takes no adapters: {', '.join(left_out[:4])}" if left_out else ""
    try:
        return _outcome(_worst(model, folders), note)
    except NoTruthError as error:
        return Outcome("no truth", str(error))


class NoTruthError(Exception):
    """PEFT does not read what it wrote."""


def _outcome(worst: float, note: str) -> Outcome:
    return Outcome("exact" if worst <= TOLERANCE else "wrong", f"error {worst:.2g}{note}")


def _worst(model: Path, folders: Sequence[Path]) -> float:
    """The largest error of all requests."""
    runner = padded_runner(model, folders)
    asked = prompts(runner._size.max_total_tokens - NUM_TOKENS)
    told, answers = _truths(model, folders, asked), _serve(runner, folders, asked)
    return max(_error(answer, truth) for answer, truth in zip(answers, told, strict=True))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def _linears(model: Path) -> list[str]:
    """The linear maps inside the layers."""
    loaded = load(model)
    return [name for name, module in loaded.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and any(p.isdigit() for p in name.split("."))
            ]  # fmt: skip


def load(model: Path) -> Any:
    build: Any = transformers.AutoModelForCausalLM
    return build.from_pretrained(model, dtype=torch.float32).eval()


def _write_adapter(folder: Path, model: Path, targets: Sequence[str], seed: int) -> Path:
    # One expression: of names in a list PEFT makes fused experts' parameters for some models.
    paths = "|".join(map(re.escape, targets))
    config = LoraConfig(r=4 + 4 * seed, lora_alpha=8.0, target_modules=paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It tells of what it turns into parameters.
        adapted = get_peft_model(load(model), config)
    if config.target_parameters:
        # For models whose experts are fused now, PEFT takes these names to be the experts'.
        kept = [name for name in targets if name.rsplit(".", 1)[-1] not in FUSED]
        return _write_adapter(folder, model, kept, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def prompts(longest: int = 256) -> list[Prompt]:
    """Whose each prompt is, and its tokens, `longest` at most."""
    generator = torch.Generator().manual_seed(3)
    return [
        (name, torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()[:longest])
        for name, lengths in LENGTHS.items()
        for length in lengths
    ]


def _truths(model: Path, folders: Sequence[Path], asked: Sequence[Prompt]) -> list[Told]:
    """Each request by itself, in a model of its own: some keep state between calls."""
    named = {folder.name: folder for folder in folders}
    told = []
    for name, prompt in asked:
        loaded = load(model)
        if name in named:
            loaded = _adapted(loaded, named[name])
        told.append(_generate(loaded, prompt))
    return told


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


def _serve(
    runner: PaddedRunner, folders: Sequence[Path], prompts: Sequence[Prompt]
) -> list[Answer]:
    """All in one batch; every other one joins while the others decode."""
    slots = {folder.name: slot for slot, folder in enumerate(folders)}
    asked = [
        Asked(
            prompt, NUM_TOKENS, slot=slots.get(name, -1), joins_at=2 * (index % 2),
            rejoins_at=PREEMPTED.get(index), sampling=Sampling(logprobs=VOCAB_SIZE),
        )
        for index, (name, prompt) in enumerate(prompts)
    ]  # fmt: skip
    return generate_padded(runner, asked)


def _error(answer: Answer, told: Told) -> float:
    """The largest difference of logprobs, up to where the tokens part."""
    worst = 0.0
    for step, token in enumerate(told.tokens):
        own = answer.logprobs[step]
        assert own is not None
        found = torch.tensor(own.top_logprobs)
        worst = max(worst, float((found - told.logprobs[step][own.top_ids]).abs().max()))
        if worst != worst:
            return float("inf")
        if answer.tokens[step] != token:
            break
    return worst


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Sweep what the arguments name; the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    options = parser.parse_args(arguments)
    num_wrong = 0
    for kind in options.kinds or kinds():
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = sweep(Path(folder), kind, options.variant)
            except Exception as error:
                outcome = Outcome("wrong", f"it ends: {_short(error)}")
        num_wrong += outcome.word == "wrong"
        say(f"{outcome.word:9} {kind:24} {outcome.why}")
    return num_wrong


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    torch.set_num_threads(1)
    sys.exit(min(main(sys.argv[1:]), 1))
