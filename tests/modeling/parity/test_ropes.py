"""Rope kinds whose frequencies depend on a sequence's length: each request has its own.

Prompts below, at and beyond the border share batches, and some answers cross it, under the real
scheduler with its prefix cache. The truth is what each model's own `generate` says: Phi-3 computes
its keys anew at the border, the others keep them as they were written.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.architectures.base import ModelArchitecture
from configs.architectures.rope import Rope, RotaryArchitecture
from configs.architectures.select import load_architecture
from configs.engine import LimitsConfig
from configs.model import ModelConfig
from configs.wire.sampling import Sampling
from modeling.layers import rotary
from modeling.runner import loading
from modeling.runner.load_paged import load_paged
from scheduler.kv.prefix_cache import PrefixKey
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import ROPE_BORDER, load_oracle, oracle_greedy, oracle_logits
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
    full_logprobs,
)
from tests.modeling.scheduled import Ranks
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import TOLERANCE
from tests.sweeps import swept, swept_rows

CPU = torch.device("cpu")
FIXED = 200
"""Tokens that a dynamic rope is fixed to."""

LENGTHS = (7, ROPE_BORDER - 12, ROPE_BORDER - 1, ROPE_BORDER, ROPE_BORDER + 1, 50)
"""Of prompts whose answers have 24 tokens: short, across the border, at it, beyond it."""

NAMES = (BASE, "r1", "columns", BASE, "r16", "rows")
OTHERS = ("r16", BASE, BASE, "rows", BASE, "r1")
"""The adapters of those prompts: each length meets the base and an adapter."""

KEPT = ("relative", "longrope")
RECOMPUTED = ("fused", "phi3_longrope")
LONGROPES = [KEPT, RECOMPUTED, ("relative", "mistral_longrope"), ("gpt_neox", "longrope")]
DYNAMIC = [("relative", "dynamic"), ("gpt_neox", "dynamic")]


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(
        ((*model, ranks) for model in LONGROPES for ranks in (1, 2)),
        lambda *row: row in ((*KEPT, 2), (*RECOMPUTED, 1)),
    ),
)
def test_every_length_beside_every_other(
    world: World, family: str, variant: str, ranks: int
) -> None:
    for names in (NAMES, OTHERS):
        compare(world, Setting(family, variant, ranks, names, lengths=LENGTHS))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("family", "variant"), [KEPT, RECOMPUTED])
def test_every_length_alone(world: World, family: str, variant: str, length: int) -> None:
    compare(world, Setting(family, variant, 1, [BASE], WHOLE, lengths=(length,)))


def test_a_model_whose_generate_keeps_no_keys(world: World) -> None:
    """Its longrope recomputes at the border, as it does at every token."""
    compare(world, Setting("relative", "uncached_longrope", 1, [BASE, "r8"], lengths=(20, 31)))


@pytest.mark.parametrize("lost_at", swept([3, 40, 60], lambda lost_at: lost_at == 40))
@pytest.mark.parametrize(("family", "variant"), [KEPT, RECOMPUTED])
def test_ranks_that_are_rebuilt(world: World, family: str, variant: str, lost_at: int) -> None:
    """Before the border, at it and behind it, whoever is how far."""
    setting = Setting(family, variant, 2, NAMES, lengths=LENGTHS, lost_at=lost_at)
    compare(world, setting)


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
@pytest.mark.parametrize(("family", "variant"), DYNAMIC)
def test_dynamic_rope_up_to_the_models_own_length(
    world: World, family: str, variant: str, ranks: int
) -> None:
    compare(world, Setting(family, variant, ranks, NAMES[:3], lengths=(7, 20, 40)))


@pytest.mark.parametrize(("family", "variant"), DYNAMIC)
def test_dynamic_rope_of_a_fixed_length(
    world: World, tmp_path: Path, family: str, variant: str
) -> None:
    """A sequence of that length is as transformers reads it; shorter ones take the same theta."""
    folder = world.model(family, variant)
    longest = torch.randint(3, 96, (FIXED,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [longest, longest[:7], longest[:60]]
    same_theta = load_oracle(_with_theta_for(FIXED, folder, tmp_path / "same"))
    expected = [oracle_logits(same_theta, prompt)[-1] for prompt in prompts]
    told = oracle_logits(load_oracle(folder), longest)[-1]
    torch.testing.assert_close(expected[0], told, atol=1e-4, rtol=0)
    for answers in world.run(2, partial(_read, folder, prompts)):
        for answer, logits in zip(answers, expected, strict=True):
            found = full_logprobs(answer)[0]
            want = logits.double().log_softmax(-1)
            torch.testing.assert_close(found, want, atol=TOLERANCE, rtol=0)


def _with_theta_for(length: int, folder: Path, copy: Path) -> Path:
    """The same weights with plain rope, whose theta is dynamic rope's for that length."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    rope = config["rope_parameters"]
    heads = config["hidden_size"] // config["num_attention_heads"]
    width = int(heads * rope.get("partial_rotary_factor", 1.0))
    stretch = rope["factor"] * length / config["max_position_embeddings"] - (rope["factor"] - 1)
    theta = rope["rope_theta"] * stretch ** (width / (width - 2))
    config["rope_parameters"] = {**rope, "rope_type": "default", "rope_theta": theta}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _read(folder: Path, prompts: list[list[int]], group: TensorParallel) -> list[Answer]:
    model = ModelConfig(id=str(folder), dynamic_rope_length=FIXED)
    runner = load_paged(engine_config(folder, model=model), group, CPU).allocate()
    assert runner.report.max_total_tokens == FIXED
    asked = [Asked(prompt, 1, sampling=Sampling(logprobs=96), chunk=7) for prompt in prompts]
    return generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("dynamic", "lower it, or set model.dynamic_rope_length to the one length that"),
        ("longrope", "lower it$"),
    ],
)
def test_longer_sequences_are_refused_by_name(world: World, variant: str, said: str) -> None:
    folder = world.model("relative", variant)
    limits = LimitsConfig(max_running=16, max_step_tokens=256, max_total_tokens=300)
    with pytest.raises(ValueError, match=rf"limits\.max_total_tokens \(300\) is above .*: {said}"):
        load_paged(engine_config(folder, limits=limits), SingleRank(), CPU)


def test_a_conversation_finds_no_keys_of_another_set(world: World) -> None:
    """Its first turn is short; the second has the same first blocks, and is long."""
    folder = world.model(*RECOMPUTED)
    config = engine_config(folder)
    first, second = list(range(3, 31)), list(range(3, 51))
    oracle = load_oracle(folder)
    ranks = Ranks(lambda: load_paged(config, SingleRank(), CPU).allocate())
    for index, prompt in enumerate((first, second, second)):
        ranks.ask(index, Asked(prompt, 3))
        ranks.run()
        assert ranks.answers["r", index].tokens == oracle_greedy(oracle, prompt, 3)
    cached = [ranks.ended["r", index].cached_tokens for index in range(3)]
    assert cached == [0, 0, 48 // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE]


def test_blocks_that_name_no_set_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixKey, "of", lambda asked: PrefixKey(b"", 0, asked.adapter))
    with pytest.raises(AssertionError):
        test_a_conversation_finds_no_keys_of_another_set(world)


def test_one_set_for_all_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    frequencies = rotary.inverse_frequencies

    def long_ones(rope: Rope, head_dim: int) -> torch.Tensor:
        return frequencies(rope, head_dim)[-1:].expand(2, -1)

    monkeypatch.setattr(rotary, "inverse_frequencies", long_ones)
    expect_mismatch(world, Setting(*RECOMPUTED, 1, [BASE], lengths=(7,)))


@pytest.mark.parametrize(("family", "variant"), [KEPT, RECOMPUTED])
def test_one_way_of_crossing_for_all_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, family: str, variant: str
) -> None:
    """Keys kept where they are computed anew, and the other way about."""
    load = load_architecture

    def turned(folder: Path) -> ModelArchitecture:
        found = load(folder)
        assert isinstance(found, RotaryArchitecture)
        return found.model_copy(update={"rope_recompute": not found.rope_recompute})

    monkeypatch.setattr(loading, "load_architecture", turned)
    expect_mismatch(world, Setting(family, variant, 1, [BASE], lengths=(20,)))
