"""Layers that see the positions which an index chooses, against transformers + PEFT.

The tiny models see eight positions, and their contexts have 7 to 60.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.engine import CacheConfig, CacheDType
from modeling.attention import sparse
from modeling.attention.sparse import TokenIndex
from modeling.models.generic import indexed
from modeling.runner.load_paged import load_paged
from scheduler.drafts import Drafter
from sharding.group import SingleRank, TensorParallel
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
)
from tests.modeling.parity.test_speculation import informed
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer, Asked
from tests.sweeps import swept, swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

VARIANTS = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")
"""The second and the last have a layer that takes the choice of the one before."""

NAMES = [BASE, "r8", "index"]

GLM = Setting("indexed", "glm_moe_dsa", 1, NAMES)


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(
        product(VARIANTS, (1, 2, 4)),
        lambda variant, ranks: (variant, ranks) in (("deepseek_v32", 2), ("glm_moe_dsa", 1)),
    ),
)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting("indexed", variant, ranks, NAMES, rejoins_at=3))


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(
        product(VARIANTS, (1, 2)),
        lambda variant, ranks: (variant, ranks) == ("glm_moe_dsa", 2),
    ),
)
def test_scheduled(world: World, variant: str, ranks: int) -> None:
    """Prompts that come twice, preempted requests, and ranks that are lost."""
    lengths = (37, 37, 35, 35, 21)
    names = [BASE, BASE, "r8", "r8", "index"]
    asked = Setting("indexed", variant, ranks, names, lengths=lengths, lost_at=9, blocks=8)
    compare(world, asked)
    compare(world, Setting("indexed", variant, ranks, names, lengths=lengths, hits=2, chunk=WHOLE))


@pytest.mark.parametrize("variant", swept(VARIANTS, lambda variant: variant == "axk2"))
def test_computed_a_few_numbers_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(sparse, "MOST", 100)
    compare(world, Setting("indexed", variant, 1, NAMES))


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_experts(world: World, variant: str) -> None:
    compare(world, Setting("mixture", variant, 2, [BASE, "everything"], spread=True))


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_what_peft_converts(world: World, variant: str) -> None:
    names = [BASE, "trained", "modules", "joined", "few", "shared"]
    compare(world, Setting("converted", variant, 2, names))


def test_drafts_change_no_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts every sixth token is wrong, so index keys are written again."""
    config = engine_config(world.model("indexed", "glm_moe_dsa"))
    requests = [Asked([*range(30, 30 + n)], 24) for n in (6, 19)]

    def answers(num_drafts: int, group: TensorParallel) -> list[Answer]:
        start = partial(_start, config, group)
        return generate_scheduled(Ranks(start, [], 7, group, num_drafts), requests, None)

    [plain] = world.run(1, partial(answers, 0))
    texts = [[*r.prompt, *a.tokens] for r, a in zip(requests, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    [drafted] = world.run(1, partial(answers, 4))
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]


def _start(config: Any, group: TensorParallel) -> Any:
    return load_paged(config, group, torch.device("cpu")).allocate()


def test_an_fp8_cache_is_refused(world: World) -> None:
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=CacheDType.FP8)
    config = engine_config(world.model("indexed", "deepseek_v32"), cache=cache)
    with pytest.raises(
        ValueError, match=r"index are kept in the model's own type: set cache.dtype"
    ):
        load_paged(config, SingleRank(), torch.device("cpu"))


def test_all_keys_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "TokenIndex", lambda q, w, k, _: TokenIndex(q, w, k, 64))
    expect_mismatch(world, GLM)


def test_the_latest_keys_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def latest(_q: Tensor, _w: Tensor, _k: Tensor, positions: Tensor, topk: int) -> Tensor:
        return (positions[..., None] - torch.arange(topk)).clamp(0).int()

    monkeypatch.setattr(sparse, "select", latest)
    expect_mismatch(world, GLM)


def test_each_layer_chooses_for_itself_from_stale_keys(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the index keys of the step alone: those of earlier steps are forgotten."""
    real = sparse._index_keys

    def keys(cache: Any, slots: Tensor, width: int) -> Tensor:
        found = real(cache, slots, width)
        found[:, : found.shape[1] // 2] = 0
        return found

    monkeypatch.setattr(sparse, "_index_keys", keys)
    expect_mismatch(world, GLM)


@pytest.mark.parametrize("name", swept(["wq_b", "wk", "weights_proj"], lambda name: name == "wk"))
def test_an_index_without_its_adapters(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = indexed._compute

    def compute(module: Any, *given: Any, **options: Any) -> TokenIndex:
        linear = getattr(module, name)
        kept = linear._step
        linear._step = type(kept)()
        try:
            return real(module, *given, **options)
        finally:
            linear._step = kept

    monkeypatch.setattr(indexed, "_compute", compute)
    expect_mismatch(world, GLM)
