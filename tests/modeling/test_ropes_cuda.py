"""Longrope's two sets on a GPU: the oracle's tokens in float32, and captured steps as launched."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3ForCausalLM

from configs.engine import (
    AttentionKind,
    CacheConfig,
    CudaGraphs,
    Device,
    EngineConfig,
    LimitsConfig,
)
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import ROPE_BORDER, write_adapter, write_llama
from tests.modeling.parity.comparison import World, engine_config
from tests.modeling.parity.test_ropes import LENGTHS, LONGROPES, NAMES, RECOMPUTED
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.scheduled import MAX_RUNNING, Ranks, generate_scheduled
from tests.modeling.stepping import Answer, Asked
from tests.oracle import NUM_TOKENS, prompt_truth

pytestmark = pytest.mark.gpu


def runner(config: EngineConfig) -> ModelRunner:
    return load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()


def _oracle_recomputes() -> bool:
    """Whether `generate` computes all positions anew at the border, as since 5.18 or later."""
    prepare = Phi3ForCausalLM.prepare_inputs_for_generation
    return "next_sequence_length" in inspect.getsource(prepare)


@pytest.mark.parametrize(("family", "variant"), LONGROPES)
def test_greedy_tokens_are_the_oracles(world: World, family: str, variant: str) -> None:
    """Every length in one batch, with and without adapters."""
    if (family, variant) == RECOMPUTED and not _oracle_recomputes():
        pytest.skip("this transformers drops Phi-3's cache at the border and computes one token")
    model = world.model(family, variant)
    folders = [world.adapter(family, variant, name) for name in NAMES]
    adapters = [folder for folder in folders if folder is not None]
    told = [prompt_truth(model, *one) for one in zip(folders, LENGTHS, strict=True)]
    requests = [
        Asked(prompt, NUM_TOKENS, -1 if folder is None else adapters.index(folder), joins_at=2 * i)
        for i, (folder, (prompt, _)) in enumerate(zip(folders, told, strict=True))
    ]
    config = engine_config(model, device=Device.CUDA)
    answers = generate_scheduled(Ranks(partial(runner, config), adapters, chunk=5), requests)
    assert [answer.tokens for answer in answers] == [truth.tokens for _, truth in told]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with longrope and heads that FlashInfer serves, and an adapter for it."""
    pytest.importorskip("flashinfer")
    root = tmp_path_factory.mktemp("wide")
    half = WIDE["head_dim"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 100 for i in range(half)],
        "long_factor": [1.5 + i / 10 for i in range(half)],
        "original_max_position_embeddings": ROPE_BORDER,
    }
    write_llama(root / "model", "gqa", rope_parameters=rope, **WIDE)
    write_adapter(root / "adapter", root / "model")
    return root


def told(root: Path, graphs: CudaGraphs) -> tuple[list[Answer], int]:
    """What six requests of all lengths are answered, and how many steps were replayed."""
    changes: dict[str, Any] = {
        "model": ModelConfig(id=str(root / "model"), dtype=DType.BFLOAT16),
        "device": Device.CUDA,
        "attention": AttentionKind.FLASHINFER,
        "cache": CacheConfig(num_blocks=64, block_size=16),
        "limits": LimitsConfig(max_running=MAX_RUNNING, max_step_tokens=256),
        "cuda_graphs": graphs,
    }
    config = engine_config(root / "model", **changes)
    requests = [
        Asked([5 + i] * length, NUM_TOKENS, i % 2 - 1, Sampling(logprobs=96), joins_at=2 * i)
        for i, length in enumerate(LENGTHS)
    ]
    ranks = Ranks(partial(runner, config), [root / "adapter"], chunk=64)
    return generate_scheduled(ranks, requests), ranks.runner.num_captured


@pytest.mark.parametrize("graphs", [CudaGraphs.DECODE, CudaGraphs.ALL])
def test_captured_steps_take_each_rows_set(wide: Path, graphs: CudaGraphs) -> None:
    """Up to where bfloat16 tips a near tie, tokens and logprobs are those of launches."""
    found, num_captured = told(wide, graphs)
    expected, num_launched = told(wide, CudaGraphs.NONE)
    assert (num_captured > 20, num_launched) == (True, 0)
    compared = 0
    for ours, theirs in zip(found, expected, strict=True):
        for own, other, mine, yours in zip(
            ours.logprobs, theirs.logprobs, ours.tokens, theirs.tokens, strict=True
        ):
            assert own is not None
            assert other is not None
            given = dict(zip(own.top_ids, own.top_logprobs, strict=True))
            for token, logprob in zip(other.top_ids[:5], other.top_logprobs[:5], strict=True):
                assert given[token] == pytest.approx(logprob, abs=0.7)
            compared += 1
            if mine != yours:
                break
    assert compared > len(LENGTHS) * NUM_TOKENS // 2
