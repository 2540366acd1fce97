"""Weights in 8 and 4 bits by bitsandbytes: the tokens of transformers + PEFT over the same weights.

They run where the package is installed, on the CPU and on a GPU. Eight-bit products round each
row's inputs, and pick the columns that they do not round by all rows together, so answers are
compared one by one, as transformers' own generate computes them: prompt, then token by token.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from configs.model import DType, ModelConfig, Quantize
from modeling.runner.padded import PaddedRunner
from modeling.runner.padded_loading import load_causal_lm, quantization_config
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.checkpoints_padded import write_padded
from tests.modeling.padded import generate_padded, padded_runner
from tests.modeling.stepping import Asked

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes"
)

NUM_TOKENS = 16
MIN_MARGIN = 0.02
MIN_VARIETY = 4
"""Different tokens in an answer, so that it depends on more than its last one."""

KINDS = [Quantize.BITSANDBYTES, Quantize.BITSANDBYTES_NF4]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.gpu,
    ),
]

# Widths are multiples of 64, the values that share a scale in 4 bits.
MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], dict[str, Any]]] = {
    "gptj": (
        lambda path: write_padded(path, "gptj", n_embd=128, n_inner=256),
        ("q_proj", "out_proj", "fc_in", "fc_out"),
        {},
    ),
}
"""How to write a model, which modules to adapt, and more of PEFT's LoraConfig."""


@dataclass(frozen=True)
class Quantised:
    """A model on disk with an adapter, and how it is to be served."""

    model: Path
    adapter: Path
    quantize: Quantize
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @property
    def config(self) -> ModelConfig:
        name = DType(str(self.dtype).removeprefix("torch."))
        return ModelConfig(id=str(self.model), dtype=name, quantize=self.quantize)

    def runner(self) -> PaddedRunner:
        return padded_runner(self.model, [self.adapter], device=self.device, model=self.config)

    def truth(self, adapted: bool, length: int) -> tuple[list[int], list[int]]:
        """A prompt and its continuation, in which every token leads by MIN_MARGIN."""
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            prompt = torch.randint(3, 96, (1, length), generator=generator)
            told = oracle(self, adapted).generate(
                input_ids=prompt.to(self.device),
                attention_mask=torch.ones_like(prompt).to(self.device),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(told.logits).float().topk(2).values
            tokens = told.sequences[0, length:].tolist()
            is_clear = float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN
            if is_clear and len(set(tokens)) >= MIN_VARIETY:
                return prompt[0].tolist(), tokens
        raise AssertionError("no prompt leads to clear tokens: choose another seed")


@cache
def oracle(made: Quantised, adapted: bool) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        made.model,
        dtype=made.dtype,
        quantization_config=quantization_config(made.quantize, made.dtype),
        device_map={"": made.device},
    )
    if adapted:
        model = PeftModel.from_pretrained(model, str(made.adapter))
    return model.eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def quantised(root: Path, name: str, quantize: Quantize, device: torch.device) -> Quantised:
    write, modules, extra = MODELS[name]
    model, adapter = root / name / "model", root / name / "adapter"
    if not adapter.exists():
        recipe = AdapterRecipe(r=8, target_modules=modules, std=0.2, extra=extra)
        write_adapter(adapter, write(model), recipe)
    return Quantised(model, adapter, quantize, device)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_alone(root: Path, name: str, quantize: Quantize, device: torch.device) -> None:
    made = quantised(root, name, quantize, device)
    runner, answers = made.runner(), []
    for adapted in (False, True):
        prompt, tokens = made.truth(adapted, 9)
        (answer,) = generate_padded(runner, [Asked(prompt, NUM_TOKENS, slot=int(adapted) - 1)])
        assert answer.tokens == tokens
        answers.append(tokens)
    assert answers[0] != answers[1], "the adapter changes nothing"


@pytest.mark.parametrize("name", MODELS)
def test_together(root: Path, name: str, device: torch.device) -> None:
    """In 4 bits a row's products are its own: one batch, with and without the adapter."""
    made = quantised(root, name, Quantize.BITSANDBYTES_NF4, device)
    asked = enumerate((0, 1, 1, 0))
    told = [(adapted, *made.truth(bool(adapted), 4 + 5 * i)) for i, adapted in asked]
    requests = [
        Asked(prompt, NUM_TOKENS, slot=adapted - 1, joins_at=2 * i)
        for i, (adapted, prompt, _) in enumerate(told)
    ]
    answers = generate_padded(made.runner(), requests)
    assert [answer.tokens for answer in answers] == [tokens for _, _, tokens in told]


def test_a_model_in_which_nothing_is_quantised_is_refused(
    tmp_path: Path, device: torch.device
) -> None:
    config = ModelConfig(id=str(write_padded(tmp_path, "falcon")), quantize=Quantize.BITSANDBYTES)
    with pytest.raises(ValueError, match=r"nothing to quantise in FalconForCausalLM"):
        load_causal_lm(config, device, spread=False)
