"""Numbers that are kept beside integers: which, how many bytes, and that no answer needs them."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from configs.model import ModelConfig
from modeling.quantisation import coded
from modeling.quantisation.coded import CodedWeight, codes_alone, keep_dequantised
from modeling.quantisation.fp4 import MXFP4, NVFP4, round_fp4
from modeling.quantisation.integers import IntegerWeight, local_groups, round_groups
from modeling.quantisation.products import GpuProducts
from modeling.runner import load_paged as loading
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from sharding.linear_weight import Operands
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


def of_blocks(size: int, table: torch.Tensor | None) -> IntegerWeight:
    codes, group_of = torch.zeros(16, 128, dtype=torch.uint8), torch.arange(128) // size
    groups = local_groups(torch.ones(16, 128 // size), None, group_of, 0)
    return IntegerWeight(codes, groups, 4, torch.float32, table)


@pytest.mark.parametrize(
    ("weight", "most"),
    [
        (of_blocks(64, None), 64),
        (of_blocks(32, None), 0),
        (of_blocks(64, torch.ones(16)), 0),
        (round_fp4(torch.randn(16, 128).bfloat16(), NVFP4, False), 32),
        (round_fp4(torch.randn(16, 128).bfloat16(), MXFP4, False), 64),
        (round_fp4(torch.randn(16, 128).bfloat16() * 2**20, MXFP4, False), 0),
        (round_fp4(torch.randn(16, 128).half(), NVFP4, False), 0),
    ],
    ids=[
        "blocks of 64", "blocks of 32", "from a table",
        "nvfp4", "mxfp4", "mxfp4 with large scales", "nvfp4 in float16",
    ],
)  # fmt: skip
def test_codes_are_multiplied_where_a_kernel_for_few_tokens_takes_them(
    weight: CodedWeight, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no numbers are beside them, always: by a kernel, or as a kernel makes numbers."""
    taken: list[int] = []

    def of_codes(operands: Operands, bias: Any, out: Any) -> torch.Tensor:
        taken.append(len(operands.x))
        return operands.x.new_zeros(len(operands.x), 16)

    def numbers_of(operands: Operands) -> torch.Tensor:
        taken.append(len(operands.x))
        return weight[:]

    gpu = GpuProducts(Mock(), Mock(), Mock(), of_codes, of_codes, numbers_of, Mock())
    monkeypatch.setattr(coded, "gpu_products", lambda x: gpu)
    sizes = (1, 3, 32, 33, 64, 65, 300)
    for tokens in sizes:
        weight(torch.zeros(tokens, 128, dtype=weight.dtype), None)
    assert taken == [*sizes]
    weight.dequantise()
    for tokens in sizes:
        weight(torch.zeros(tokens, 128, dtype=weight.dtype), None)
    assert taken[len(sizes) :] == [tokens for tokens in sizes if tokens <= most]


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
    kept = beside.report.weight_forms["dequantised float16"]
    assert 0 < kept <= 2**15
    assert beside.report.weight_bytes_resident == alone.report.weight_bytes_resident + kept
    assert torch.equal(said(alone), said(beside))
