"""The same stories on a GPU: float32 there gives the oracle's tokens too."""

from collections.abc import Iterator

import pytest
import torch

from configs.engine import AdaptersConfig, CacheConfig, Device, LimitsConfig
from configs.model import DType, ModelConfig
from configs.sampling import Sampling
from modeling.loading import pick_device
from modeling.runner import ModelRunner
from sharding.group import SingleRank
from tests.modeling.parity import ADAPTERS, BASE, World, engine_config, place_all, poison
from tests.modeling.stepping import Asked, generate
from tests.oracle import prompt_truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = [BASE, *ADAPTERS]


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_runner(
    world: World, dtype: DType = DType.FLOAT32, num_blocks: int | None = 64
) -> ModelRunner:
    model = world.model("llama", "gqa")
    config = engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=dtype),
        device=Device.CUDA,
        cache=CacheConfig(num_blocks=num_blocks, device_memory_fraction=0.5),
        limits=LimitsConfig(max_running=16, max_step_tokens=256),
        adapters=AdaptersConfig(device_pages=40, max_device_adapters=10, max_rank=64),
    )
    return ModelRunner(config, SingleRank(), pick_device(Device.CUDA))


def test_greedy_tokens_are_the_oracles(world: World) -> None:
    runner = make_runner(world)
    runner.load()
    poison(runner)
    folders = [world.adapter("llama", "gqa", name) for name in NAMES]
    place_all(runner, [folder for folder in folders if folder is not None])
    told = [
        prompt_truth(world.model("llama", "gqa"), folder, 7 + 4 * i)
        for i, folder in enumerate(folders)
    ]
    requests = [
        Asked(prompt, len(truth.tokens), slot=i - 1, chunk=3 + i, joins_at=i)
        for i, (prompt, truth) in enumerate(told)
    ]
    answers = generate(runner, requests, 64, 16)
    assert [answer.tokens for answer in answers] == [truth.tokens for _, truth in told]


def test_sampled_tokens_are_those_of_the_cpu(world: World) -> None:
    requests = [
        Asked([5 + i, 9, 33], 20, sampling=Sampling(temperature=0.7, top_p=0.9, seed=i))
        for i in range(8)
    ]
    runner = make_runner(world)
    runner.load()
    host = ModelRunner(
        engine_config(world.model("llama", "gqa")), SingleRank(), torch.device("cpu")
    )
    host.load()
    expected = [answer.tokens for answer in generate(host, requests, 64, 16)]
    assert [answer.tokens for answer in generate(runner, requests, 64, 16)] == expected


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_memory_is_measured_and_taken(world: World, dtype: DType) -> None:
    runner = make_runner(world, dtype, num_blocks=None)
    total = torch.cuda.get_device_properties(0).total_memory
    report = runner.allocate(runner.measure())
    assert 0.3 * total < report.kv_bytes < 0.5 * total
    assert len(generate(runner, [Asked([5, 6, 7], 5)], 64, 16)[0].tokens) == 5
