"""Layers that predict a further token on a GPU: they guess as on a CPU, and change no token."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.engine import AttentionKind, CudaGraphs, Device
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.runner import loading
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import write_adapter
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_eagle3 import NUM_DRAFTS
from tests.modeling.parity.test_mtp import RECIPES, with_mtp
from tests.modeling.parity.test_speculation import NUM_TOKENS
from tests.modeling.test_eagle3_cuda import guess_without_waiting, guesses, watched_chains
from tests.modeling.test_medusa_cuda import answers
from tests.mtp import write_untrained
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = pytest.mark.gpu


def check_rank(
    model: Path,
    adapters: Sequence[Path],
    plain: Sequence[Sequence[int]],
    group: TensorParallel,
    device: torch.device,
) -> None:
    """Compare one rank's answers; in a process of its own."""
    assert group.size > 1
    loading.LAUNCHED_ON, speculation.MARGIN = ("cpu", device.type), 0.0
    made, run = answers(with_mtp(model), CudaGraphs.NONE, adapters, NUM_DRAFTS, group)
    assert [each.tokens for each in made] == plain
    half = with_mtp(model).model_copy(update={"model": half_precision(model)})
    made, run = answers(half, CudaGraphs.DECODE, adapters, NUM_DRAFTS, group)
    assert all(len(each.tokens) == NUM_TOKENS for each in made)
    assert run.runner.num_captured > 5
    assert run.drafted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_two_gpus(tmp_path: Path, kind: str) -> None:
    """In float32 tokens are those of one GPU without drafts."""
    model, adapters = written(tmp_path, kind)
    plain, _ = answers(engine_config(model), CudaGraphs.NONE, adapters, 0)
    told = [each.tokens for each in plain]
    run_cuda_ranks(2, partial(check_rank, model, adapters, told))


def written(folder: Path, kind: str) -> tuple[Path, list[Path]]:
    """A model with the layer, and two adapters."""
    model = write_untrained(folder / "model", kind)
    return model, [write_adapter(folder / f"a{i}", model, each) for i, each in enumerate(RECIPES)]


def half_precision(model: Path) -> ModelConfig:
    return ModelConfig(id=str(model), dtype=DType.BFLOAT16)


def runner(model: Path, device: str, dtype: DType, graphs: CudaGraphs) -> ModelRunner:
    settings = ModelConfig(id=str(model), dtype=dtype)
    kind = AttentionKind.TRITON if device == "cuda" else AttentionKind.AUTO
    changes = {"model": settings, "device": Device(device), "attention": kind}
    config = with_mtp(model).model_copy(update={**changes, "cuda_graphs": graphs})
    return load_paged(config, SingleRank(), torch.device(device)).allocate()


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_layers_guess_as_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In float32 launched, in bfloat16 captured too, where the host waits for nothing."""
    monkeypatch.setattr(loading, "LAUNCHED_ON", ("cpu", "cuda"))
    model = write_untrained(tmp_path / "model", kind)
    wanted = guesses(runner(model, "cpu", DType.FLOAT32, CudaGraphs.NONE), Sampling())
    assert guesses(runner(model, "cuda", DType.FLOAT32, CudaGraphs.NONE), Sampling()) == wanted
    launched = guesses(runner(model, "cuda", DType.BFLOAT16, CudaGraphs.NONE), Sampling())
    captured = runner(model, "cuda", DType.BFLOAT16, CudaGraphs.DECODE)
    found = guesses(captured, Sampling())
    assert captured.num_captured
    for others in (launched, wanted):
        pairs = [
            (one, other)
            for own, their in zip(found, others, strict=True)
            for row, beside in zip(own, their, strict=True)
            for one, other in zip(row, beside, strict=True)
        ]
        # A chain that rounding changed once goes on from another token.
        assert sum(one == other for one, other in pairs) > len(pairs) / 2, pairs
    for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=3)):
        guess_without_waiting(captured, sampling)


def test_answers_are_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over adapters and without: the same tokens in float32; drafts of graphs in bfloat16."""
    monkeypatch.setattr(loading, "LAUNCHED_ON", ("cpu", "cuda"))
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    chains = watched_chains(monkeypatch)
    model, adapters = written(tmp_path, "deepseek_v3")
    plain, _ = answers(engine_config(model), CudaGraphs.NONE, adapters, 0)
    made, run = answers(with_mtp(model), CudaGraphs.NONE, adapters, NUM_DRAFTS)
    assert [each.tokens for each in made] == [each.tokens for each in plain]
    assert len(run.drafted) > 20
    config = with_mtp(model).model_copy(update={"model": half_precision(model)})
    made, run = answers(config, CudaGraphs.DECODE, adapters, NUM_DRAFTS)
    assert all(len(each.tokens) == NUM_TOKENS for each in made)
    assert min(run.runner.num_captured, len(chains), len(run.drafted)) > 5
