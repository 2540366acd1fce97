"""Llama's relatives and adapters of the vocabulary on a GPU: float32 gives the oracle's tokens."""

import pytest

from configs.adapters import AdaptersConfig
from configs.engine import Device
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from sharding.group import SingleRank
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    FAMILIES,
    NUM_BLOCKS,
    World,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.stepping import Asked, generate
from tests.oracle import NUM_TOKENS, prompt_truth

pytestmark = pytest.mark.gpu

MODELS = [
    ("relative", "mistral"),
    ("relative", "qwen2_window"),
    ("relative", "qwen3_window"),
    ("relative", "granite"),
    ("relative", "solar"),
    ("relative", "yarn"),
    ("fused", "phi3_partial"),
    ("vocabulary", "gqa"),
    ("vocabulary", "odd_vocab_tied"),
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_greedy_tokens_are_the_oracles(world: World, family: str, variant: str) -> None:
    """The base alone (captured steps where there are any), then everyone in one batch."""
    model = world.model(family, variant)
    adapters = AdaptersConfig(
        device_pages=40,
        max_device_adapters=16,
        max_rank=64,
        vocabulary=family == "vocabulary",
        host_bytes=2**26,
    )
    config = engine_config(model, device=Device.CUDA, adapters=adapters)
    runner = load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()
    poison(runner)
    folders = [world.adapter(family, variant, name) for name in (BASE, *FAMILIES[family].adapters)]
    place_all(runner, [folder for folder in folders if folder is not None])
    told = [prompt_truth(model, folder, 7 + 4 * i) for i, folder in enumerate(folders)]
    requests = [
        Asked(prompt, NUM_TOKENS, slot=i - 1, chunk=3 + i, joins_at=i)
        for i, (prompt, _) in enumerate(told)
    ]
    for asked in (requests[:1], requests):
        answers = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        expected = [truth.tokens for _, truth in told[: len(asked)]]
        assert [answer.tokens for answer in answers] == expected
