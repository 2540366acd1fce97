"""Numbers that are kept beside integers: which, how many bytes, and that no answer needs them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from configs.model import ModelConfig
from modeling.quantisation.integers import codes_alone, keep_dequantised, round_groups
from modeling.runner import load_paged as loading
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.modeling.parity.comparison import BLOCK_SIZE, engine_config
from tests.modeling.teacher import forced_logprobs

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def test_the_first_that_fit_are_kept() -> None:
    weights = [round_groups(torch.randn(outputs, 64), 4, 32) for outputs in (8, 100, 16)]
    model, size = nn.Sequential(nn.Linear(2, 2), *weights), 64 * 4
    assert keep_dequantised(model, 7 * size) == 0
    assert codes_alone(model) == weights
    assert keep_dequantised(model, 30 * size) == 24 * size
    assert codes_alone(model) == [weights[1]]
    for weight in weights:
        x = torch.randn(3, 64)
        numbers = weight.dequantised
        assert torch.equal(weight(x, None), x @ weight[:].t())
        assert numbers is None or torch.equal(numbers, weight[:])


@pytest.mark.parametrize("name", ["gptq", "gptq_act_order", "awq"])
def test_answers_are_those_of_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> ModelRunner:
        config = engine_config(CHECKPOINTS / name, model=ModelConfig(id=str(CHECKPOINTS / name)))
        return load_paged(config, SingleRank(), torch.device("cpu")).allocate()

    def said(runner: ModelRunner) -> torch.Tensor:
        return forced_logprobs(runner, 64, -1, False, BLOCK_SIZE)

    alone = load()
    monkeypatch.setattr(loading, "dequantised_bytes", lambda *_: 2**15)
    beside = load()
    kept = beside.report.weight_forms["float16 beside integers"]
    assert 0 < kept <= 2**15
    assert beside.report.weight_bytes_resident == alone.report.weight_bytes_resident + kept
    assert torch.equal(said(alone), said(beside))
