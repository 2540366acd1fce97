"""CUDA graphs of decode steps: tokens, logits and memory are those of steps launch by launch."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, Device, LimitsConfig
from configs.model import DType, ModelConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.cuda_graphs import (
    DecodeGraphs,
)
from modeling.runner.forward import prepare
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from modeling.transfer import no_waits
from sharding.group import SingleRank
from tests.checkpoints import write_adapter, write_llama
from tests.modeling.parity.comparison import FAMILIES, engine_config, place_all
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, NUM_BLOCKS, requests
from tests.modeling.stepping import Answer, Asked, BlockPile, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, of biases
]

KINDS = ("plain", "dora", "biased")
ENDS = ("everything", "plain", "head")
RECIPES = {**FAMILIES["vocabulary"].adapters, **FAMILIES["llama_dora"].adapters}
OPEN = AdaptersConfig(
    device_pages=40, max_device_adapters=10, max_rank=64, host_bytes=2**26, vocabulary=True
)
WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 128, "num_hidden_layers": 2}


def make_runner(folder: Any, **changes: Any) -> ModelRunner:
    fields: dict[str, Any] = {
        "model": ModelConfig(id=str(folder), dtype=DType.BFLOAT16),
        "device": Device.CUDA,
        "attention": AttentionKind.FLASHINFER,
        "cache": CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        "limits": LimitsConfig(max_running=12, max_step_tokens=256),
        "adapters": AdaptersConfig(
            device_pages=40, max_device_adapters=10, max_rank=64, host_bytes=2**26
        ),
        **changes,
    }
    runner = load_paged(
        engine_config(folder, **fields), SingleRank(), pick_device(Device.CUDA)
    ).allocate()
    return runner


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose heads FlashInfer serves, and adapters for it."""
    pytest.importorskip("flashinfer")
    root = tmp_path_factory.mktemp("wide")
    write_llama(root / "model", "gqa", **WIDE)
    write_kinds(root)
    return root


def write_kinds(root: Path) -> None:
    """Adapters of all kinds for the model of a folder, in its subfolders."""
    for name in {*KINDS, *ENDS}:
        write_adapter(root / name, root / "model", RECIPES[name])


def tokens(runner: ModelRunner, asked: list[Asked]) -> list[list[int]]:
    answers: list[Answer] = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    return [answer.tokens for answer in answers]


def told_again(runner: ModelRunner, asked: Asked, known: list[int]) -> list[Answer]:
    """Each token once more, from one prefill of all before it: never a captured step."""
    found = []
    sampling = msgspec.structs.replace(asked.sampling, logprobs=5)
    for count in range(len(known)):
        whole = [*asked.prompt, *known[:count]]
        blocks = list(range(-(-len(whole) // BLOCK_SIZE)))
        join = RequestJoin(11, whole, len(asked.prompt), asked.slot, sampling)
        rows = [StepRow(11, 0, len(whole), blocks, True)]
        sampled = runner.step(ForwardBatch([join], rows)).wait()
        assert sampled.logprobs is not None
        found.append(Answer(sampled.tokens, sampled.logprobs))
    return found


@pytest.mark.parametrize(
    "slots", [(-1,), (-1, 0), (0,), (-1, 0, 1, 2)], ids=["base", "mixed", "adapter", "kinds"]
)
def test_captured_tokens_are_those_of_launches(wide: Any, slots: tuple[int, ...]) -> None:
    asked = requests(slots)
    runner = make_runner(wide / "model")
    place_all(runner, [wide / name for name in KINDS])
    found = tokens(runner, asked)
    assert runner.num_captured > runner.num_steps // 4
    equal = []
    for request, own in zip(asked, found, strict=True):
        for token, again in zip(own, told_again(runner, request, own), strict=True):
            equal.append(token == again.tokens[0])
            best = again.logprobs[0]
            assert best is not None
            # bfloat16 logits of other batch shapes may tip a near tie, and nothing else.
            gap = dict(zip(best.top_ids, best.top_logprobs, strict=True)).get(token, -1e9)
            assert best.top_logprobs[0] - gap < 1.0, (request, own)
    assert sum(equal) > 0.85 * len(equal)


def test_captured_sampling_and_logprobs_are_those_of_launches(wide: Any) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=3, logprobs=2)
    asked = requests([-1], sampling=sampling)
    runner = make_runner(wide / "model")
    answers = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured > 0
    equal = []
    for request, answer in zip(asked, answers, strict=True):
        again = told_again(runner, request, answer.tokens)
        for token, own, other in zip(answer.tokens, answer.logprobs, again, strict=True):
            equal.append(token == other.tokens[0])
            judged = other.logprobs[0]
            assert own is not None
            assert judged is not None
            assert own.top_logprobs[0] == pytest.approx(judged.top_logprobs[0], abs=0.7)
    assert sum(equal) > 0.85 * len(equal)


@pytest.mark.parametrize("names", [KINDS, ENDS])
def test_logits_of_a_replay_are_those_of_launches(wide: Any, names: tuple[str, ...]) -> None:
    runner = make_runner(wide / "model", **({"adapters": OPEN} if names is ENDS else {}))
    place_all(runner, [wide / name for name in names])
    captured = runner._decode_graphs
    assert captured is not None
    pile = BlockPile(NUM_BLOCKS, BLOCK_SIZE)
    for count in (3, 1, 7):  # 7 rows replay as 8: the last one is padding
        slots = [p % (len(KINDS) + 1) - 1 for p in range(count)]
        joins = [
            RequestJoin(p, [5 + p, 9, 33 + p], 3, slot, Sampling()) for p, slot in enumerate(slots)
        ]
        blocks = [pile.reach(count * 20 + p, 4) for p in range(count)]
        first = [StepRow(p, 0, 3, blocks[p], True) for p in range(count)]
        runner.step(ForwardBatch(joins, first)).wait()
        rows = [StepRow(p, 3, 1, [], True) for p in range(count)]
        layout = runner._input_batch.layout(rows)
        with torch.inference_mode():
            output = captured.run(layout)
            assert output is not None
            found = output.logits.float().clone()
            inputs = runner._input_batch.inputs(layout)
            step = prepare(runner._backends, inputs)
            adapters = runner._step_adapters(layout)
            expected = runner._forward.logits(inputs, step, adapters).float()
            base = runner._forward.logits(inputs, step, None).float()
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() < 5e-2, (count, errors.tolist())
        moved = (base - expected).norm(dim=1) / expected.norm(dim=1)
        assert all(far > 0.06 for far, slot in zip(moved.tolist(), slots, strict=True) if slot >= 0)


def test_padding_rows_touch_no_place_and_no_page(wide: Any) -> None:
    runner = make_runner(wide / "model")
    join = RequestJoin(0, [5, 9, 33], 3, -1, Sampling())
    joins = [join, *(RequestJoin(p, [8, 8, 8], 3, -1, Sampling()) for p in (1, 2))]
    rows = [StepRow(p, 0, 3, [p], True) for p in range(3)]
    runner.step(ForwardBatch(joins, rows)).wait()
    state, cache = runner._input_batch, runner._forward.cache
    before = state.tokens[: state.dummy_token].clone()
    pages = [layer.keys[:NUM_BLOCKS].clone() for layer in cache]
    runner.step(ForwardBatch([], [StepRow(p, 3, 1, [], True) for p in range(3)])).wait()
    changed = (state.tokens[: state.dummy_token] != before).nonzero().flatten().tolist()
    width = state.size.max_total_tokens + 1
    assert set(changed) <= {p * width + 4 for p in range(3)}
    for layer, was in zip(cache, pages, strict=True):
        touched = (layer.keys[:NUM_BLOCKS] != was).flatten(2).any(-1).nonzero().tolist()
        assert touched == [[0, 3], [1, 3], [2, 3]]


def test_one_step_ahead_is_step_by_step(wide: Any) -> None:
    runner = make_runner(wide / "model")
    join = RequestJoin(2, [5, 9, 33], 3, -1, Sampling())

    def batches() -> list[ForwardBatch]:
        first = ForwardBatch([join], [StepRow(2, 0, 3, [9], True)])
        blocks = {BLOCK_SIZE: [3]}
        rows = [StepRow(2, at, 1, blocks.get(at, []), True) for at in range(3, 23)]
        return [first, *(ForwardBatch([], [row]) for row in rows)]

    slow = [runner.step(batch).wait().tokens for batch in batches()]
    flying = [runner.step(batch) for batch in batches()]
    assert [output.wait().tokens for output in flying] == slow


def test_a_step_never_waits_for_the_device(wide: Any) -> None:
    """Torch refuses synchronising calls here; none may come from a step once it is warm."""
    runner = make_runner(wide / "model")
    place_all(runner, [wide / "plain"])
    sampled = Sampling(temperature=0.7, top_p=0.9, top_k=7, seed=3, logprobs=1)
    for params in (Sampling(), sampled):
        asked = requests([-1, 0], sampling=params)
        generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        with no_waits():
            generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)


def test_the_measured_memory_is_enough(wide: Any) -> None:
    runner = make_runner(wide / "model", cache=CacheConfig(device_memory_fraction=0.5))
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.55 * total
    assert isinstance(runner._decode_graphs, DecodeGraphs)
    assert tokens(runner, requests([-1]))[0]
