"""What models with recurrent layers cost and lack; the parity tests compare their answers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import CacheConfig, CacheDType, SpeculationConfig, SpeculationKind
from configs.wire.sampling import Sampling
from deployments.rank.host import capacity_of
from modeling.adapters.kernels.reference import NO_DELTAS
from modeling.runner.input_batch import StepLayout
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from modeling.runner.state_rows import state_rows
from sharding.group import SingleRank
from tests.checkpoints_generic import VOCAB_SIZE, write_generic
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, engine_config, full_logprobs
from tests.modeling.stepping import Asked, generate

PROMPT = [5, 17, 2, 80, 33, 5, 61, 9, 44]


def loaded(folder: Path, **changes: Any) -> ModelRunner:
    model = folder / "model"
    if not model.exists():
        write_generic(model, "qwen3_5_text")
    return load_paged(engine_config(model, **changes), SingleRank(), torch.device("cpu")).allocate()


def test_prefixes_are_shared_where_states_are_kept_and_no_token_is_guessed(tmp_path: Path) -> None:
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kept_states=0)
    report = loaded(tmp_path, cache=cache).report
    capacity = capacity_of(report)
    assert capacity.chunked
    assert capacity.kept_states == 0
    assert not capacity.prefix_caching
    assert not capacity.drafts
    # Two layers: 2 keys' heads of 8 numbers, twice, and 4 values' heads of 12, for 4 positions;
    # 4 heads of 8 x 12.
    assert report.state_bytes == 16 * 2 * 4 * (4 * (2 * 16 + 48) + 4 * 8 * 12)


def test_heads_that_guess_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    heads = SpeculationConfig(kind=SpeculationKind.MEDUSA, model=str(tmp_path))
    with pytest.raises(ValueError, match=r"speculation\.kind medusa.*recurrent.*set it to none"):
        loaded(tmp_path, speculation=heads)


def test_an_fp8_caches_scales_are_measured(tmp_path: Path) -> None:
    """The layers that attend have them; a step without states is computed for it."""
    found = []
    for dtype in (CacheDType.AUTO, CacheDType.FP8):
        cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
        asked = Asked(PROMPT, 1, sampling=Sampling(logprobs=VOCAB_SIZE), chunk=4)
        (answer,) = generate(loaded(tmp_path, cache=cache), [asked], NUM_BLOCKS, BLOCK_SIZE)
        found.append(full_logprobs(answer)[0])
    assert 0 < (found[0] - found[1]).abs().max() < 0.5


def test_neighbours_go_together_where_all_have_a_state_or_none() -> None:
    """Rows of one token: one that begins, two that go on, one that begins; then longer ones."""
    none = torch.zeros(0).long().numpy()
    bounds = torch.tensor([0, 1, 2, 3, 4, 7, 9]).numpy()
    starts = torch.tensor([0, 5, 8, 0, 0, 6]).numpy()
    layout = StepLayout(
        none, none, bounds, torch.arange(6).numpy(), starts, (), none, none, [], [],
        adapter_slots=[-1, 2, -1, 3], adapter_lengths=[1, 2, 2, 4],
    )  # fmt: skip
    seen: list[tuple[list[int], list[int]]] = []

    def adapters(slots: Any, lengths: Any) -> Any:
        seen.append((list(slots), list(lengths)))
        return NO_DELTAS

    rows = state_rows(layout, torch.arange(6) + 10, adapters)
    assert [(r.tokens.start, r.tokens.stop, r.single, r.begins) for r in rows] == [
        (0, 1, True, True), (1, 3, True, False), (3, 4, True, True), (4, 7, False, True),
        (7, 9, False, False),
    ]  # fmt: skip
    assert [r.slots.tolist() for r in rows if r.slots is not None] == [
        [10], [11, 12], [13], [14], [15],
    ]  # fmt: skip
    assert [r.adapter_data is None for r in rows] == [True, False, True, False, False]
    assert seen == [([2], [2]), ([-1, 3], [1, 2]), ([3], [2])]


@pytest.mark.parametrize("dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_a_model_without_attention_takes_no_memory_for_keys(
    tmp_path: Path, dtype: CacheDType
) -> None:
    """Its blocks, as many as all requests and kept prefixes can need, count positions alone."""
    model = write_generic(tmp_path / "model", "mamba")
    cache = CacheConfig(block_size=BLOCK_SIZE, dtype=dtype, kept_states=2)
    config = engine_config(model, cache=cache)
    limits = config.limits.model_copy(update={"max_total_tokens": 5 * BLOCK_SIZE})
    config = config.model_copy(update={"limits": limits})
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    report, capacity = runner.report, capacity_of(runner.report)
    assert (report.kv_bytes, report.num_blocks) == (0, (16 + 2) * 5)
    assert capacity.longest_sequence == capacity.max_total_tokens == 5 * BLOCK_SIZE
    # Four layers: 48 channels, for 4 positions and of 8 numbers.
    assert report.state_bytes == (16 + 2) * 4 * 4 * 48 * (4 + 8)
    (answer,) = generate(runner, [Asked(PROMPT, 4)], report.num_blocks, BLOCK_SIZE)
    assert len(answer.tokens) == 4
