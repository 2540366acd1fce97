"""What a runner promises beside the right numbers: invariances, lifetimes, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, CacheDType, Device, LimitsConfig
from configs.kv_groups import KvGroup
from configs.model import DType, LoadFormat, ModelConfig
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from modeling.runner.report import RunnerReport
from sharding.group import SingleRank, TensorParallel
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, World, engine_config, place_all
from tests.modeling.stepping import Answer, Asked, generate
from tests.ranks import run_ranks

PROMPTS = [[5, 9, 33, 71, 8, 60, 12], [44, 3, 17], [80] * 19, [9, 8, 7, 6, 5]]
CPU = torch.device("cpu")


def make_runner(
    world: World,
    group: TensorParallel | None = None,
    adapters: tuple[str, ...] = ("r8", "r24"),
    **changes: Any,
) -> ModelRunner:
    config = engine_config(world.model("llama", "gqa"), **changes)
    runner = load_paged(config, group or SingleRank(), CPU).allocate()
    place_all(runner, [folder(world, name) for name in adapters])
    return runner


def folder(world: World, name: str) -> Path:
    found = world.adapter("llama", "gqa", name)
    assert found is not None
    return found


def asked(index: int, **fields: Any) -> Asked:
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1000 + index)
    return Asked(PROMPTS[index], 12, **{"slot": index % 3 - 1, "sampling": sampling, **fields})


def run(runner: ModelRunner, requests: list[Asked]) -> list[list[int]]:
    return [answer.tokens for answer in generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)]


def test_sampled_tokens_depend_on_their_request_alone(world: World) -> None:
    runner = make_runner(world)
    alone = [run(runner, [asked(i)])[0] for i in range(4)]
    together = run(runner, [asked(i, chunk=2 + i, joins_at=3 - i) for i in range(4)])
    assert together == alone
    assert run(runner, [asked(3), asked(0), asked(2)]) == [alone[3], alone[0], alone[2]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_sampled_tokens_are_those_of_one_rank(world: World, ranks: int) -> None:
    requests = [asked(i, chunk=3) for i in range(4)]

    def tokens(group: TensorParallel) -> list[list[int]]:
        return run(make_runner(world, group), requests)

    (one,) = run_ranks(1, tokens)
    assert all(found == one for found in run_ranks(ranks, tokens))


@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_the_block_size_changes_nothing(world: World, block_size: int) -> None:
    requests = [asked(i, chunk=4) for i in range(4)]
    expected = run(make_runner(world), requests)
    runner = make_runner(world, cache=CacheConfig(num_blocks=200, block_size=block_size))
    answers = generate(runner, requests, 200, block_size)
    assert [answer.tokens for answer in answers] == expected


def test_a_preempted_request_goes_on_as_if_nothing_was(world: World) -> None:
    runner = make_runner(world)
    (whole,) = run(runner, [asked(1)])
    # Back at another place with its first five tokens, to be computed again.
    tokens = [*PROMPTS[1], *whole[:5]]
    sampling = asked(1).sampling
    join = RequestJoin(6, tokens, len(PROMPTS[1]), asked(1).slot, sampling)
    found = runner.step(ForwardBatch([join], [StepRow(6, 0, len(tokens), [50], True)])).wait()
    assert found.tokens == [whole[5]]


def test_steps_in_flight_keep_their_own_tokens(world: World) -> None:
    runner = make_runner(world)
    (whole,) = run(runner, [asked(0)])
    join = RequestJoin(2, PROMPTS[0], 7, asked(0).slot, asked(0).sampling)
    outputs = [runner.step(ForwardBatch([join], [StepRow(2, 0, 7, [9], True)]))]
    outputs += [runner.step(ForwardBatch([], [StepRow(2, 7 + i, 1, [], True)])) for i in range(4)]
    assert [output.wait().tokens for output in reversed(outputs)] == [[t] for t in whole[4::-1]]


def test_steps_that_sample_nothing(world: World) -> None:
    runner = make_runner(world)
    assert runner.step(ForwardBatch([], [])).wait().tokens == []
    join = RequestJoin(0, PROMPTS[2], 19, -1, Sampling(logprobs=1))
    halfway = runner.step(ForwardBatch([join], [StepRow(0, 0, 8, [0], False)])).wait()
    assert halfway.tokens == []
    assert halfway.logprobs is None


def test_each_row_gets_the_logprobs_it_asked_for(world: World) -> None:
    runner = make_runner(world)
    params = [Sampling(logprobs=3), Sampling(), Sampling(temperature=1.0, logprobs=0)]
    requests = [Asked(PROMPTS[i], 2, sampling=params[i]) for i in range(3)]
    answers: list[Answer] = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    assert answers[1].logprobs == [None, None]
    for token, own in zip(answers[0].tokens, answers[0].logprobs, strict=True):
        assert own is not None
        assert own.top_ids[0] == token
        assert own.top_logprobs[0] == own.logprob < 0
        assert len(own.top_ids) == len(own.top_logprobs) == 3
    assert all(own is not None and own.top_ids == [] for own in answers[2].logprobs)
    assert runner.step(ForwardBatch([], [StepRow(1, 4, 1, [], True)])).wait().logprobs is None


def test_a_slot_is_given_to_another_adapter(world: World) -> None:
    runner = make_runner(world)
    greedy = [Asked(PROMPTS[0], 8, slot=slot) for slot in (0, 1)]
    first, second = (run(runner, [request])[0] for request in greedy)
    assert first != second
    key = AdapterKey(2)
    other = folder(world, "r24")
    shape = runner.stage(FetchedAdapter(key, "r24", str(other), "r24"))
    runner.load_adapter(key, 0, [list(range(count)) for count in shape.num_pages])
    runner.drop(key)
    assert run(runner, greedy[:1]) == [second]


def test_rows_beyond_their_blocks_are_stopped(world: World) -> None:
    runner = make_runner(world)
    join = RequestJoin(0, PROMPTS[2], 19, -1, Sampling())
    with pytest.raises(AssertionError, match="not the blocks that a row needs"):
        runner.step(ForwardBatch([join], [StepRow(0, 0, 19, [0], True)]))


def test_the_report_counts_what_was_taken(world: World) -> None:
    config = engine_config(
        world.model("llama", "gqa"),
        cache=CacheConfig(),
        limits=LimitsConfig(max_running=3, max_total_tokens=50),
        adapters=AdaptersConfig(max_device_adapters=5, max_rank=16),
    )
    loaded = load_paged(config, SingleRank(), CPU)
    assert loaded.measure() == 3 * 4
    report = loaded.allocate(9).report
    kv_bytes_per_token = 2 * 2 * 2 * 8 * 4
    widths = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    # Of single tokens a row has the hidden size and three digits.
    rows = 2 * sum(inputs + outputs for inputs, outputs in widths) + 2 * (32 + 3) + 32
    ends, norms = 2 * (96 + 32), 32
    chunk = 2**12
    assert 4 * 2**30 - chunk < report.host_bytes <= 4 * 2**30, "whole chunks of the arena"
    assert report == RunnerReport(
        num_blocks=9,
        block_size=16,
        projections=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "embed_tokens",
            "lm_head",
            "embed_tokens.tokens",
            "lm_head.tokens",
            "score",
            "norms",
        ),
        adapter_pages=10,
        adapter_slots=5,
        host_bytes=report.host_bytes,
        max_total_tokens=50,
        dtype="float32",
        device="cpu",
        attention="sdpa",
        attention_reason=report.attention_reason,
        adapter_kernel="reference",
        adapter_kernel_reason=report.adapter_kernel_reason,
        weight_bytes_read=report.weight_bytes_read,
        weight_bytes_resident=report.weight_bytes_read,
        kv_bytes=9 * 16 * kv_bytes_per_token,
        adapter_pool_bytes=8 * 4 * (10 * rows + 2 * ends + 5 * norms),
        kv_groups=(KvGroup(16),),
        weight_forms={"float32": report.weight_bytes_read},
        paged=True,
        pool_pages=(*[10] * 7, 2, 2, *[10] * 3, 5),
    )


def test_two_ranks_share_the_bytes(world: World) -> None:
    model = world.model("llama", "gqa")

    def load(group: TensorParallel) -> RunnerReport:
        return load_paged(engine_config(model), group, CPU).allocate().report

    (one,) = run_ranks(1, load)
    two = run_ranks(2, load)
    norms = 5 * 32 * 4
    assert sum(r.weight_bytes_resident for r in two) == one.weight_bytes_resident + norms
    assert [r.kv_bytes for r in two] == [one.kv_bytes // 2] * 2
    assert all(r.adapter_pool_bytes < 0.8 * one.adapter_pool_bytes for r in two)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_precision_runs(world: World, dtype: DType) -> None:
    model = ModelConfig(id=str(world.model("llama", "gqa")), dtype=dtype)
    runner = make_runner(world, model=model)
    report = runner.report
    assert report.dtype == dtype.value
    wide = make_runner(
        world, model=model, cache=CacheConfig(num_blocks=8, dtype=CacheDType.FLOAT32)
    )
    assert wide.report.kv_bytes == 8 * report.kv_bytes * 2 // NUM_BLOCKS


def test_dummy_weights_need_only_a_config(world: World, tmp_path: Path) -> None:
    text = (world.model("llama", "gqa") / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    model = ModelConfig(id=str(tmp_path), load_format=LoadFormat.DUMMY)
    runner = load_paged(engine_config(tmp_path, model=model), SingleRank(), CPU).allocate()
    assert runner.report.weight_bytes_read == 0
    assert len(run(runner, [Asked(PROMPTS[0], 4)])[0]) == 4


def test_a_server_without_adapters_says_so(world: World) -> None:
    runner = make_runner(world, adapters=())
    off = load_paged(
        engine_config(world.model("llama", "gqa"), adapters=AdaptersConfig(enabled=False)),
        SingleRank(),
        CPU,
    ).allocate()
    report = off.report
    assert (report.adapter_pages, report.adapter_slots, report.adapter_pool_bytes) == (0, 0, 0)
    with pytest.raises(AdapterError, match=r"adapters\.enabled"):
        off.stage(FetchedAdapter(AdapterKey(1), "a", str(folder(world, "r4")), "d"))
    assert run(off, [Asked(PROMPTS[0], 5)]) == run(runner, [Asked(PROMPTS[0], 5)])


def test_a_length_beyond_the_model_is_refused(world: World) -> None:
    limits = LimitsConfig(max_running=2, max_total_tokens=257)
    config = engine_config(world.model("llama", "gqa"), limits=limits)
    with pytest.raises(ValueError, match=r"max_total_tokens \(257\).*\(256\)"):
        load_paged(config, SingleRank(), CPU)


def test_the_device_is_picked_or_refused() -> None:
    assert pick_device(Device.CPU) == CPU
    if torch.cuda.is_available():
        assert pick_device(Device.AUTO).type == "cuda"
        return
    assert pick_device(Device.AUTO) == CPU
    with pytest.raises(ValueError, match="device: cuda"):
        pick_device(Device.CUDA)
