"""Runners over an fp8 cache: how far from float32, and that nothing but the cache changes them.

The bound, teacher-forced, on tiny models whose logits' std is about 3.5: a mean divergence of
1e-2 nats and no logprob off by more than 1. Faults in a scale go beyond it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.engine import AttentionKind, CacheConfig, CacheDType
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.attention.kv_cache import FP8, CacheScales, LayerCache
from modeling.runner.load_padded import load_padded
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import write_adapter
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.modeling.teacher import (
    SYSTEMS,
    Errors,
    adapter_recipe,
    errors,
    forced_logprobs,
    oracle_logprobs,
)
from tests.ranks import run_ranks
from tests.sweeps import swept

CPU = torch.device("cpu")
VOCAB_SIZE = 96
PAGED = [system for system in SYSTEMS if system != "padded"]
CACHE = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=CacheDType.FP8)
LENGTHS = (7, 3, 19, 5)
MIN_LEAD = 0.1
"""Of a token's logprob: a number that is rounded the other way must not decide."""


def within_bound(found: Errors) -> bool:
    return found.kl <= 1e-2 and found.largest <= 1.0


class Models:
    """Tiny models, an adapter and clear seeds for each, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seeds: dict[str, list[int]] = {}

    def model(self, system: str) -> Path:
        folder = self._root / system
        if not folder.exists():
            SYSTEMS[system][0](folder, 64)
        return folder

    def adapter(self, system: str) -> Path:
        folder = self._root / f"{system}-adapter"
        if not folder.exists():
            write_adapter(folder, self.model(system), adapter_recipe(system))
        return folder

    def runner(
        self, system: str, group: TensorParallel | None = None, **changes: Any
    ) -> ModelRunner:
        folder = changes.pop("folder", self.model(system))
        config = engine_config(folder, **{"cache": CACHE, **changes})
        runner = load_paged(config, group or SingleRank(), CPU).allocate()
        place_all(runner, [self.adapter(system)])
        poison(runner)
        place_all(runner, [self.adapter(system)])
        return runner

    def seeds(self, system: str) -> list[int]:
        """Of each of LENGTHS: the prompt whose answer is clear at every token."""
        if system not in self._seeds:
            self._seeds[system] = clear_seeds(self.runner(system))
        return self._seeds[system]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("slot", [-1, 0], ids=["base", "adapter"])
@pytest.mark.parametrize("system", PAGED)
def test_answers_are_within_the_bound(models: Models, system: str, slot: int) -> None:
    truth = oracle_logprobs(models.model(system), None if slot < 0 else models.adapter(system))
    runner = models.runner(system)
    for decode in (False, True):
        found = errors(forced_logprobs(runner, VOCAB_SIZE, slot, decode), truth)
        assert within_bound(found), found
        assert found.kl > 1e-5, "the cache was not fp8"
    assert not any(layer.clamped.any() for layer in runner._forward.cache)


def test_half_precision_over_fp8(models: Models) -> None:
    folder = models.model("llama")
    runner = models.runner("llama", model=ModelConfig(id=str(folder), dtype=DType.BFLOAT16))
    found = errors(forced_logprobs(runner, VOCAB_SIZE, -1, True), oracle_logprobs(folder, None))
    assert within_bound(found), found


def _keys_twice(real: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    keys, values = real(*args)
    return 2 * keys, values


def _values_an_eighth_more(real: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor]:
    keys, values = real(*args)
    return keys, 1.125 * values


@pytest.mark.parametrize("fault", [_keys_twice, _values_an_eighth_more])
def test_a_wrong_scale_is_noticed(
    models: Models,
    fault: Callable[..., tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, real = models.runner("llama"), LayerCache.read
    monkeypatch.setattr(LayerCache, "read", lambda *args: fault(real, *args))
    truth = oracle_logprobs(models.model("llama"), None)
    found = errors(forced_logprobs(runner, VOCAB_SIZE, -1, True), truth)
    assert not within_bound(found), found


def asked(index: int, seed: int = 0, **fields: Any) -> Asked:
    generator = torch.Generator().manual_seed(100 * seed + index)
    prompt = torch.randint(3, VOCAB_SIZE, (LENGTHS[index],), generator=generator).tolist()
    return Asked(prompt, 16, slot=index % 2 - 1, sampling=Sampling(logprobs=2), **fields)


def run(runner: ModelRunner, requests: list[Asked]) -> list[Answer]:
    return generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)


def leads(answer: Answer) -> float:
    """By how much the tokens of an answer lead, at least."""
    own = [found.top_logprobs for found in answer.logprobs if found is not None]
    return min(best - second for best, second in own)


def clear_seeds(runner: ModelRunner) -> list[int]:
    """For each index the first seed whose answer is clear at every token."""
    found = [
        next((s for s in range(60) if leads(run(runner, [asked(i, s)])[0]) > MIN_LEAD), None)
        for i in range(len(LENGTHS))
    ]
    assert None not in found, found
    return [seed for seed in found if seed is not None]


@pytest.mark.parametrize("system", PAGED)
def test_chunks_preemption_and_company_change_no_token(models: Models, system: str) -> None:
    runner = models.runner(system)
    seeds = list(enumerate(models.seeds(system)))
    alone = [run(runner, [asked(i, seed)])[0].tokens for i, seed in seeds]
    together = [asked(i, seed, chunk=2 + i, joins_at=3 - i, rejoins_at=4 + i) for i, seed in seeds]
    assert [answer.tokens for answer in run(runner, together)] == alone


@pytest.mark.parametrize("ranks", swept([2, 4], lambda ranks: ranks == 2))
@pytest.mark.parametrize("system", ["llama", "gpt_neox"])
def test_ranks_change_no_token(models: Models, system: str, ranks: int) -> None:
    requests = [asked(i, seed, chunk=4) for i, seed in enumerate(models.seeds(system))]

    def tokens(group: TensorParallel) -> list[list[int]]:
        return [answer.tokens for answer in run(models.runner(system, group), requests)]

    (one,) = run_ranks(1, tokens)
    assert run_ranks(ranks, tokens) == [one] * ranks


def test_as_much_memory_holds_twice_the_blocks(models: Models) -> None:
    folder = models.model("llama")
    half = ModelConfig(id=str(folder), dtype=DType.BFLOAT16)
    bytes_of = {}
    for dtype in (CacheDType.AUTO, CacheDType.FP8):
        config = engine_config(folder, model=half, cache=CACHE.model_copy(update={"dtype": dtype}))
        report = load_paged(config, SingleRank(), CPU).allocate().report
        bytes_of[dtype] = report.kv_bytes / report.num_blocks
        assert ("fp8 cache, scales measured at start" in report.attention_reason) == (
            dtype is CacheDType.FP8
        )
    assert bytes_of[CacheDType.AUTO] == 2 * bytes_of[CacheDType.FP8]


def with_scales(model: Path, folder: Path, scale: float) -> Path:
    """The same checkpoint with scales for all layers, as llm-compressor writes them."""
    weights = load_file(model / "model.safetensors")
    for layer in range(2):
        for part in "kv":
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale])
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_checkpoints_scales_are_taken(models: Models, tmp_path: Path) -> None:
    folder = with_scales(models.model("llama"), tmp_path / "model", 0.02)
    runner = models.runner("llama", folder=folder)
    taken = float(torch.tensor(0.02))
    assert runner._parts.cache.groups[0].spec.scales == (CacheScales(taken, taken),) * 2
    assert runner.report.attention_reason.endswith("fp8 cache, scales from the checkpoint")
    truth = oracle_logprobs(models.model("llama"), None)
    found = errors(forced_logprobs(runner, VOCAB_SIZE, -1, True), truth)
    assert within_bound(found), found


def test_scales_that_are_too_small_leave_a_mark(models: Models, tmp_path: Path) -> None:
    folder = with_scales(models.model("llama"), tmp_path / "model", 1e-3)
    runner = models.runner("llama", folder=folder)
    run(runner, [asked(0)])
    assert all(layer.clamped.all() for layer in runner._forward.cache)


def test_another_cache_does_not_read_them(models: Models, tmp_path: Path) -> None:
    folder = with_scales(models.model("llama"), tmp_path / "model", -1.0)
    plain = CACHE.model_copy(update={"dtype": CacheDType.AUTO})
    runner = models.runner("llama", folder=folder, cache=plain)
    (found,) = run(runner, [asked(0)])
    assert found.tokens == run(models.runner("llama", cache=plain), [asked(0)])[0].tokens
    with pytest.raises(CheckpointError, match="a scale is a positive number"):
        models.runner("llama", folder=folder)


def test_pages_are_bytes(models: Models) -> None:
    runner = models.runner("llama")
    assert all(layer.keys.dtype == layer.values.dtype == FP8 for layer in runner._forward.cache)


def test_a_padded_model_has_no_such_cache(models: Models) -> None:
    config = engine_config(models.model("padded"), cache=CACHE)
    with pytest.raises(ValueError, match=r"cache\.dtype: fp8: .* set it to auto"):
        load_padded(config, SingleRank(), CPU)


def test_a_backend_without_it_is_refused(models: Models) -> None:
    config = engine_config(models.model("llama"), cache=CACHE, attention=AttentionKind.FLASH_ATTN)
    with pytest.raises(ValueError, match="flash_attn"):
        load_paged(config, SingleRank(), CPU)
