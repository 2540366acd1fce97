"""Every type that is paged by transformers' modules loads, and computes what transformers does."""

from pathlib import Path

import pytest
import torch

from configs.architectures.generic import PAGED_TYPES
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank
from tests.checkpoints import load_oracle, oracle_logits
from tests.modeling.models.sweep_truth import VOCAB_SIZE, prompts
from tests.modeling.models.tiny_causal import write_tiny
from tests.modeling.parity import BLOCK_SIZE, NUM_BLOCKS, engine_config, full_logprobs, poison
from tests.modeling.stepping import Asked, generate

TOLERANCE = {DType.FLOAT32: 1e-4, DType.BFLOAT16: 0.5}
"""On any logprob; one of bfloat16 is off by more now and then, hence the second bound."""
CHUNK = 11
"""Of a prompt of more tokens, and fewer than two of it."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", sorted(PAGED_TYPES))
@pytest.mark.filterwarnings("ignore")
def test_a_prompt_in_two_chunks(tmp_path: Path, kind: str, dtype: DType) -> None:
    """The tiny model's windows are shorter than the prompt."""
    model = write_tiny(tmp_path / "model", kind)
    _, prompt = prompts()[1]
    assert CHUNK < len(prompt) < 2 * CHUNK
    config = engine_config(model, model=ModelConfig(id=str(model), dtype=dtype))
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    poison(runner)
    asked = Asked(prompt, 1, sampling=Sampling(logprobs=VOCAB_SIZE), chunk=CHUNK)
    (answer,) = generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)
    told = oracle_logits(load_oracle(model), prompt)[-1].double().log_softmax(-1)
    error = (full_logprobs(answer)[0] - told).abs()
    assert error.max() <= TOLERANCE[dtype]
    assert error.square().mean().sqrt() <= TOLERANCE[dtype] / 3
