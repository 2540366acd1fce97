"""Merged adapters on a runner against transformers with PEFT's own merges."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from configs.adapters import AdaptersConfig
from configs.engine import EngineConfig
from configs.wire.adapters import FetchedAdapter
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from configs.wire.sampling import Sampling
from modeling.adapters import merge
from modeling.adapters.peft.config import LoraPlan
from modeling.runner.load_paged import load_paged
from sharding.group import TensorParallel
from tests.modeling.merges import fetched, write_merged, write_padded, write_part
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Comparison,
    Mismatch,
    Setting,
    World,
    engine_config,
    judge,
    poison,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import NUM_TOKENS, prompt_truth
from tests.ranks import run_ranks
from tests.sweeps import swept

# PEFT warns of a density of 1, and of embeddings that it does not save.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TIES = MergeStrategy.TIES
DARE_LINEAR, DARE_TIES = MergeStrategy.DARE_LINEAR, MergeStrategy.DARE_TIES


@dataclass(frozen=True)
class Blend:
    """A merge; padded: the rank that the oracle's parts are padded to, 0 for none."""

    parts: tuple[str, ...]
    rule: MergeRule
    padded: int = 0


BLENDS = {
    "linear": Blend(("one", "two"), MergeRule((0.7, 0.6))),
    "negative": Blend(("one", "two", "three"), MergeRule((1.2, -0.8, 0.5))),
    "ties": Blend(("one", "two", "three"), MergeRule((1.0, 0.7, 0.9), TIES, 0.4)),
    "frequency": Blend(
        ("one", "two", "three"), MergeRule((1.0, 0.7, -0.9), TIES, 0.6, SignMethod.FREQUENCY)
    ),
    "dare_linear": Blend(("one", "two"), MergeRule((0.5, 0.9), DARE_LINEAR, 1.0)),
    "dare_ties": Blend(("one", "two", "three"), MergeRule((0.5, 0.9, 1), DARE_TIES, 1.0)),
    "union": Blend(("columns", "rows", "columns"), MergeRule((0.8, 1.1, 0.3))),
    "ranks": Blend(("one", "narrow"), MergeRule((0.7, 0.9)), padded=8),
    "ties_of_ranks": Blend(("narrow", "one"), MergeRule((0.7, 0.9), TIES, 0.5), padded=8),
    "alone": Blend(("one",), MergeRule((0.5,), TIES, 0.5)),
}
ENDS = {
    "ends": Blend(("one", "ends", "ends"), MergeRule((0.7, 0.6, -0.3))),
    "ends_by_ties": Blend(("ends", "one"), MergeRule((0.7, 0.6), TIES, 0.5)),
}


@pytest.fixture(scope="module")
def root(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merges")
    (folder / "model").symlink_to(world.model("llama", "gqa"))
    return folder


def oracle(root: Path, name: str, blend: Blend) -> Path:
    """The folder of PEFT's merge, written when first asked for."""
    folder = root / "oracle" / name
    if (folder / "merged").exists():
        return folder / "merged"
    model = root / "model"
    parts = [write_part(root, model, part) for part in blend.parts]
    if blend.padded:
        parts = [write_padded(folder / f"{i}", p, blend.padded) for i, p in enumerate(parts)]
    return write_merged(folder, model, parts, blend.rule)


def compare(root: Path, names: Sequence[str], ranks: int, blends: dict[str, Blend]) -> None:
    """All merges and the base model in one batch; Mismatch where the oracle differs."""
    model = root / "model"
    merged = [oracle(root, name, blends[name]) for name in names]
    told = [prompt_truth(model, folder, 6 + 3 * i) for i, folder in enumerate([None, *merged])]
    adapters = [
        fetched(i + 1, [write_part(root, model, p) for p in blends[name].parts], blends[name].rule)
        for i, name in enumerate(names)
    ]
    every = Sampling(logprobs=told[0][1].logits.shape[1])
    requests = [
        Asked(prompt, NUM_TOKENS, slot=i - 1, sampling=every, chunk=5 + i, joins_at=i)
        for i, (prompt, _) in enumerate(told)
    ]
    opened = AdaptersConfig(
        device_pages=40, max_device_adapters=12, host_bytes=2**26, vocabulary=blends is ENDS
    )
    config = engine_config(model, adapters=opened)
    results = run_ranks(ranks, partial(_answers, config, adapters, requests))
    seen = Comparison(Setting("llama", "gqa", ranks, ["base", *names]), "merges")
    judge(seen, results, [truth for _, truth in told])


def _answers(
    config: EngineConfig,
    adapters: list[FetchedAdapter],
    requests: list[Asked],
    group: TensorParallel,
) -> list[Answer]:
    runner = load_paged(config, group, torch.device("cpu")).allocate()
    poison(runner)
    free = [list(range(count)) for count in runner._bank.pool_pages]
    for slot, adapter in enumerate(adapters):
        shape = runner.stage(adapter)
        pages = [
            [pool.pop() for _ in range(n)] for pool, n in zip(free, shape.num_pages, strict=True)
        ]
        runner.load_adapter(adapter.key, slot, pages)
    answers = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    runner.check()
    return answers


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_merges_of_every_kind_in_one_batch(root: Path, ranks: int) -> None:
    compare(root, list(BLENDS), ranks, BLENDS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_embedding_and_head(root: Path, ranks: int) -> None:
    compare(root, list(ENDS), ranks, ENDS)


def expect_mismatch(root: Path, *names: str) -> None:
    with pytest.raises(Mismatch):
        compare(root, names, 1, BLENDS)


@pytest.mark.parametrize("name", ["linear", "ties", "union"])
def test_a_scaling_left_out_is_noticed(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(LoraPlan, "scaling_of", lambda self, module: 1.0)
    expect_mismatch(root, name)


@pytest.mark.parametrize("name", ["linear", "frequency"])
def test_weights_on_one_factor_alone_are_noticed(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(merge, "sqrt", lambda scale: scale)
    expect_mismatch(root, name)


def test_a_lost_sign_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "copysign", lambda size, sign: size)
    expect_mismatch(root, "negative")


def test_padding_before_the_rows_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(factor: torch.Tensor, sides: tuple[int, ...]) -> torch.Tensor:
        return pad(factor, (*sides[:-2], sides[-1], 0) if len(sides) == 4 else sides)

    monkeypatch.setattr(merge, "pad", first)
    expect_mismatch(root, "ranks")


def test_padding_after_pruning_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The density counts the zeros of the padding too."""
    real = merge.prune

    def without_zeros(tensor: torch.Tensor, rule: MergeRule, seed: int) -> torch.Tensor:
        rows = int((tensor != 0).any(1).sum())
        columns = int((tensor != 0).any(0).sum())
        pruned = torch.zeros_like(tensor)
        pruned[:rows, :columns] = real(tensor[:rows, :columns].contiguous(), rule, seed)
        return pruned

    monkeypatch.setattr(merge, "prune", without_zeros)
    compare(root, ["ties"], 1, BLENDS)
    expect_mismatch(root, "ties_of_ranks")


@pytest.mark.parametrize("name", ["ties", "frequency", "dare_ties"])
def test_another_election_is_noticed(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = merge.agreeing
    other = {SignMethod.TOTAL: SignMethod.FREQUENCY, SignMethod.FREQUENCY: SignMethod.TOTAL}
    monkeypatch.setattr(merge, "agreeing", lambda stacked, by: real(stacked, other[by]))
    expect_mismatch(root, name)


def test_a_mean_over_all_parts_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = merge.agreeing

    def everybody(stacked: torch.Tensor, by: SignMethod) -> torch.Tensor:
        return torch.ones_like(real(stacked, by))

    monkeypatch.setattr(merge, "agreeing", everybody)
    expect_mismatch(root, "ties")


def test_a_merge_of_this_ranks_part_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values pruned by what the half of a tensor holds are others than by the whole."""
    real = merge.prune

    def by_halves(tensor: torch.Tensor, rule: MergeRule, seed: int) -> torch.Tensor:
        return torch.cat([real(half, rule, seed) for half in tensor.chunk(2, dim=-1)], dim=-1)

    monkeypatch.setattr(merge, "prune", by_halves)
    expect_mismatch(root, "ties")
