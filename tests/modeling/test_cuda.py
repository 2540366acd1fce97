"""The same stories on a GPU: float32 there gives the oracle's tokens too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, CudaGraphs, Device, LimitsConfig
from configs.model import DType, ModelConfig
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from modeling.sampling import prompt_scores as prompts
from sharding.group import SingleRank
from tests.modeling.kinds import WHOLE_LINEARS
from tests.modeling.parity.comparison import (
    ADAPTERS,
    BASE,
    VOCABULARY_ADAPTERS,
    Comparison,
    Setting,
    World,
    engine_config,
    judge,
    place_all,
    poison,
)
from tests.modeling.prompts import Prompts, check_answers, prompt_of, questions
from tests.modeling.stepping import Asked, generate
from tests.oracle import NUM_TOKENS, prompt_truth

pytestmark = pytest.mark.gpu

NAMES = [BASE, *ADAPTERS]
CHANGING = ("plain", "dora", "some", "biased", "trained")
CAPTURED = (
    "llama_dora",
    "vocabulary",
    "llama_norms",
    "generic_norms",
    "llama_tokens",
    "gpt2_tokens",
)
NORMS = ("norms", "plain", "last", "scarce")
ADAPTERS_BY_TURNS = ("r8", "r24", "patterns")


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_runner(
    world: World,
    dtype: DType = DType.FLOAT32,
    num_blocks: int | None = 64,
    kind: tuple[str, str] = ("llama", "gqa"),
    **changes: Any,
) -> ModelRunner:
    model = world.model(*kind)
    config = engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=dtype),
        device=Device.CUDA,
        cache=CacheConfig(num_blocks=num_blocks, device_memory_fraction=0.5),
        limits=LimitsConfig(max_running=16, max_step_tokens=256),
        adapters=AdaptersConfig(
            device_pages=40,
            max_device_adapters=10,
            max_rank=64,
            host_bytes=2**26,
            whole_linears=dict.fromkeys(WHOLE_LINEARS.get(kind, ()), 5),
            vocabulary_copies=int(kind[0] == "longlora"),
        ),
        **changes,
    )
    return load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()


KINDS = [
    (("llama", "gqa"), NAMES),
    (("llama_tokens", "odd_vocab_tied"), [BASE, "tokens", "embedding", "both", "plain", "head"]),
    (("gpt2_tokens", "plain"), [BASE, "tokens", "plain", "head"]),
    (("gpt2_parameters", "plain"), [BASE, "parameters", "some", "plain"]),
    (("llama_dora", "gqa"), [BASE, *CHANGING]),
    (("gpt2_dora", "plain"), [BASE, *CHANGING]),
    (("vocabulary", "gqa"), [BASE, *VOCABULARY_ADAPTERS]),
    (("llama_norms", "gqa"), [BASE, *NORMS]),
    (("generic_norms", "olmo2"), [BASE, *NORMS]),
]
CAPTURED_KINDS = [each for each in KINDS if each[0][0] in CAPTURED]
LAUNCHED_KINDS = [
    *((kind, [BASE, "whole", "one", "plain"]) for kind in WHOLE_LINEARS),
    (("gpt2_norms", "plain"), [BASE, *NORMS, "biases"]),
    (("longlora", "gemma2_untied"), [BASE, "longlora", "plain"]),
]
"""What captured steps leave as it is: steps of others are captured beside."""


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
@pytest.mark.parametrize(("kind", "names"), KINDS)
def test_greedy_tokens_are_the_oracles(
    world: World, kind: tuple[str, str], names: list[str]
) -> None:
    runner = make_runner(world, kind=kind)
    poison(runner)
    folders = [world.adapter(*kind, name) for name in names]
    place_all(runner, [folder for folder in folders if folder is not None])
    told = [prompt_truth(world.model(*kind), folder, 7 + 4 * i) for i, folder in enumerate(folders)]
    requests = [
        Asked(prompt, len(truth.tokens), slot=i - 1, chunk=3 + i, joins_at=i)
        for i, (prompt, truth) in enumerate(told)
    ]
    answers = generate(runner, requests, 64, 16)
    assert [answer.tokens for answer in answers] == [truth.tokens for _, truth in told]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
@pytest.mark.parametrize(("kind", "names"), CAPTURED_KINDS)
def test_logprobs_of_captured_steps_are_the_oracles(
    world: World, kind: tuple[str, str], names: list[str]
) -> None:
    """In float32, so that nothing but an error can make a difference; all steps are replays."""
    runner = compare_logprobs(world, kind, names, CudaGraphs.ALL)
    assert runner.num_captured == runner.num_steps > NUM_TOKENS


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
@pytest.mark.parametrize(("kind", "names"), LAUNCHED_KINDS)
def test_logprobs_of_launched_steps_are_the_oracles(
    world: World, kind: tuple[str, str], names: list[str]
) -> None:
    runner = compare_logprobs(world, kind, names, CudaGraphs.ALL)
    assert 0 < runner.num_captured < runner.num_steps - NUM_TOKENS


@pytest.mark.parametrize("kind", [("llama_norms", "gqa"), ("generic_norms", "olmo2")])
def test_logprobs_of_norms_that_are_launched(world: World, kind: tuple[str, str]) -> None:
    runner = compare_logprobs(world, kind, [BASE, *NORMS], CudaGraphs.NONE)
    assert not runner.num_captured


def compare_logprobs(
    world: World, kind: tuple[str, str], names: list[str], graphs: CudaGraphs
) -> ModelRunner:
    """All in one batch, prompts in chunks beside rows that decode; the runner that answered."""
    runner = make_runner(world, kind=kind, attention=AttentionKind.TRITON, cuda_graphs=graphs)
    poison(runner)
    folders = [world.adapter(*kind, name) for name in names]
    place_all(runner, [folder for folder in folders if folder is not None])
    told = [prompt_truth(world.model(*kind), folder, 7 + 4 * i) for i, folder in enumerate(folders)]
    sampling = Sampling(logprobs=told[0][1].logits.shape[1])
    requests = [
        Asked(prompt, NUM_TOKENS, slot=i - 1, sampling=sampling, chunk=3 + i, joins_at=i)
        for i, (prompt, _) in enumerate(told)
    ]
    answers = generate(runner, requests, 64, 16)
    seen = Comparison(Setting(*kind, ranks=1, names=names), "")
    judge(seen, [answers], [truth for _, truth in told])
    return runner


def test_sampled_tokens_are_those_of_the_cpu(world: World) -> None:
    requests = [
        Asked([5 + i, 9, 33], 20, sampling=Sampling(temperature=0.7, top_p=0.9, seed=i))
        for i in range(8)
    ]
    runner = make_runner(world)
    host = load_paged(
        engine_config(world.model("llama", "gqa")), SingleRank(), torch.device("cpu")
    ).allocate()
    expected = [answer.tokens for answer in generate(host, requests, 64, 16)]
    assert [answer.tokens for answer in generate(runner, requests, 64, 16)] == expected


@pytest.mark.parametrize("rejoins_at", [None, 2])
def test_prompts_are_told_about_as_on_the_cpu(
    world: World, monkeypatch: pytest.MonkeyPatch, rejoins_at: int | None
) -> None:
    monkeypatch.setattr(prompts, "SLICE_BYTES", 4 * 4 * 96)
    runner = make_runner(world)
    poison(runner)
    told: Prompts = [
        (world.adapter("llama", "gqa", name), prompt_of(9 + 4 * i, 96))
        for i, name in enumerate([BASE, "r8", "rows"])
    ]
    place_all(runner, [folder for folder, _ in told if folder is not None])
    asked = questions(told, 5, rejoins_at)
    answers = generate(runner, asked, 64, 16)
    check_answers(world.model("llama", "gqa"), told, asked, answers, tolerance=1e-3)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_memory_is_measured_and_taken(world: World, dtype: DType) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    runner = make_runner(world, dtype, num_blocks=None)
    report = runner.report
    assert 0.3 * total < report.kv_bytes < 0.5 * total
    assert len(generate(runner, [Asked([5, 6, 7], 5)], 64, 16)[0].tokens) == 5


def test_adapters_that_take_each_others_pages_keep_their_tokens(world: World) -> None:
    """One place for three adapters, filled anew before every request, captured steps and all."""
    names = ADAPTERS_BY_TURNS
    folders = [folder for name in names if (folder := world.adapter("llama", "gqa", name))]
    prompt = [5, 9, 33, 71, 8]
    alone = make_runner(world)
    place_all(alone, folders)
    expected = [
        generate(alone, [Asked(prompt, 12, slot=slot)], 64, 16)[0].tokens
        for slot in range(len(folders))
    ]
    runner = make_runner(world)
    poison(runner)
    shapes = [
        runner.stage(FetchedAdapter(AdapterKey(1 + i), folder.name, str(folder), str(i)))
        for i, folder in enumerate(folders)
    ]
    for turn in range(12):
        index = turn % len(folders)
        pages = [list(range(turn % 3, turn % 3 + count)) for count in shapes[index].num_pages]
        runner.load_adapter(AdapterKey(1 + index), 0, pages)
        (answer,) = generate(runner, [Asked(prompt, 12, slot=0)], 64, 16)
        assert answer.tokens == expected[index], turn
