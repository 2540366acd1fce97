"""Padded models on a GPU, and on several: float32 there gives the oracle's tokens too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.engine import CacheConfig, LimitsConfig
from configs.model import DType, ModelConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.padded import PaddedRunner
from tests.checkpoints_padded import write_padded
from tests.modeling.padded import PaddedWorld, generate_padded, padded_runner
from tests.modeling.stepping import Asked
from tests.oracle import NUM_TOKENS, prompt_truth

pytestmark = pytest.mark.gpu

NAMES = [None, "r4", "r16", "rows"]
KINDS = ["bloom", "gptj", "stablelm", "gpt2"]


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


def check_tokens(padded: PaddedWorld, kind: str, spread: bool) -> PaddedRunner:
    """Base and adapters in one batch, against the oracle on the CPU."""
    model = padded.model(kind)
    folders = [None if name is None else padded.adapter(kind, name) for name in NAMES]
    told = [prompt_truth(model, folder, 3 + 6 * i) for i, folder in enumerate(folders)]
    requests = [
        Asked(prompt, NUM_TOKENS - i, slot=i - 1, joins_at=2 * i)
        for i, (prompt, _) in enumerate(told)
    ]
    runner = padded_runner(
        model,
        [folder for folder in folders if folder is not None],
        device=torch.device("cuda", 0),
        spread=spread,
        model=ModelConfig(id=str(model), dtype=DType.FLOAT32),
    )
    answers = generate_padded(runner, requests)
    for name, answer, (_, truth) in zip(NAMES, answers, told, strict=True):
        assert answer.tokens == truth.tokens[: len(answer.tokens)], name
    return runner


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_oracles(padded: PaddedWorld, kind: str) -> None:
    check_tokens(padded, kind, spread=False)


class DeepWorld(PaddedWorld):
    """Models of so many layers that they are worth spreading."""

    def model(self, kind: str) -> Path:
        folder = self._root / kind / "model"
        return folder if folder.exists() else write_padded(folder, kind, n_layer=12)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["bloom", "gptj"])
def test_a_model_may_lie_on_several_gpus(tmp_path: Path, kind: str) -> None:
    model = check_tokens(DeepWorld(tmp_path), kind, spread=True)._model.model
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}


def test_the_token_budget_is_measured(padded: PaddedWorld) -> None:
    """As many blocks as the memory's fraction leaves; AUTO is the checkpoint's own type."""
    runner = padded_runner(
        padded.model("gptj"),
        [padded.adapter("gptj", "r16")],
        device=torch.device("cuda", 0),
        cache=CacheConfig(device_memory_fraction=0.3),
        limits=LimitsConfig(max_running=16, max_step_tokens=256),
    )
    report = runner.report
    assert report.dtype == "float32"
    assert report.num_blocks > 1000
    join = RequestJoin(0, [5, 6, 7], 3, -1, Sampling(temperature=1.0, seed=3))
    batch = ForwardBatch([join], [StepRow(0, 0, 3, [], True)])
    assert 0 <= runner.step(batch).wait().tokens[0] < 96
