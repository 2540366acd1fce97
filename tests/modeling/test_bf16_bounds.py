"""Teacher-forced bfloat16 against float32 on the CPU, and a fault that the bound notices."""

from pathlib import Path

import pytest
import torch

from configs.model import DType, ModelConfig
from modeling.models.llama import FlashLlamaForCausalLM
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import write_adapter
from tests.modeling.parity.comparison import engine_config, place_all
from tests.modeling.teacher import (
    SYSTEMS,
    Errors,
    adapter_recipe,
    bounded,
    errors,
    forced_logprobs,
    oracle_logprobs,
)

VOCAB_SIZE = 96


def test_what_the_errors_say() -> None:
    truth = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]).log()
    assert errors(truth, truth) == Errors(0.0, 0.0, 0.0)
    found = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]]).log()
    far = errors(found, truth)
    assert far.largest == pytest.approx(0.6931, abs=1e-4)
    assert far.kl == pytest.approx(0.25 * 0.6931 / 2, abs=1e-4)
    assert far.flips == 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SYSTEMS["llama"][0](tmp_path_factory.mktemp("llama") / "model", 64)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return write_adapter(model.parent / "adapter", model, adapter_recipe("llama"))


def runner_for(model: Path, adapter: Path) -> ModelRunner:
    config = engine_config(model, model=ModelConfig(id=str(model), dtype=DType.BFLOAT16))
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    place_all(runner, [adapter])
    return runner


def test_base_and_adapter_are_within_the_bound(model: Path, adapter: Path) -> None:
    runner = runner_for(model, adapter)
    for slot, folder in ((-1, None), (0, adapter)):
        truth = oracle_logprobs(model, folder)
        theirs = errors(oracle_logprobs(model, folder, "bfloat16"), truth)
        for decode in (False, True):
            ours = errors(forced_logprobs(runner, VOCAB_SIZE, slot, decode), truth)
            assert bounded(ours, theirs), f"slot {slot}: {ours}; transformers: {theirs}"


def test_a_scale_that_is_off_by_a_tenth_is_noticed(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FlashLlamaForCausalLM.__init__

    def scaled(self: FlashLlamaForCausalLM, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        self.attention_scale *= 1.1

    monkeypatch.setattr(FlashLlamaForCausalLM, "__init__", scaled)
    truth = oracle_logprobs(model, None)
    theirs = errors(oracle_logprobs(model, None, "bfloat16"), truth)
    found = forced_logprobs(runner_for(model, adapter), VOCAB_SIZE, -1, decode=True)
    assert not bounded(errors(found, truth), theirs)
