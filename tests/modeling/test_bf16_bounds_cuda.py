"""Every system in bfloat16 on a GPU, on each attention backend: how far it is from float32.

Each test prints its figures. The bound is that of `bounded`: about transformers' own distance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, ModelConfig
from modeling.runner.load_padded import load_padded
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import write_adapter
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    FLASH_ATTN_BLOCK_SIZE,
    NUM_BLOCKS,
    engine_config,
    place_all,
)
from tests.modeling.teacher import (
    HEAD_DIMS,
    SYSTEMS,
    TOGETHER,
    adapter_recipe,
    bounded,
    errors,
    forced_logprobs,
    oracle_logprobs,
)
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 96
ADAPTED_DIM = 64
"""Where adapters take part: their kernels are compiled for each width, the attention is not."""

BACKENDS = [AttentionKind.SDPA, AttentionKind.FLASHINFER, AttentionKind.FLASH_ATTN]
PAGED = [system for system in SYSTEMS if system != "padded"]


class Models:
    """Tiny models and their adapters, written when first asked for; truths computed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._told: dict[tuple[Path, Path | None], tuple[Tensor, Tensor]] = {}

    def folders(self, system: str, head_dim: int) -> list[Path | None]:
        """The model's folder, and its adapters' after it: None is the base."""
        model = self._root / f"{system}-{head_dim}"
        if not model.exists():
            SYSTEMS[system][0](model, head_dim)
        adapter = self._root / f"{system}-{head_dim}-adapter"
        if head_dim == ADAPTED_DIM and not adapter.exists():
            write_adapter(adapter, model, adapter_recipe(system))
        return [model, None, *([adapter] if head_dim == ADAPTED_DIM else [])]

    def told(self, model: Path, adapter: Path | None) -> tuple[Tensor, Tensor]:
        """transformers' logprobs in float32 and in bfloat16."""
        if (model, adapter) not in self._told:
            exact, half = (
                oracle_logprobs(model, adapter, dtype) for dtype in ("float32", "bfloat16")
            )
            self._told[model, adapter] = exact, half
        return self._told[model, adapter]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def block_size(backend: AttentionKind) -> int:
    return FLASH_ATTN_BLOCK_SIZE if backend is AttentionKind.FLASH_ATTN else BLOCK_SIZE


def config_for(model: Path, backend: AttentionKind, adapters: bool) -> EngineConfig:
    return engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=DType.BFLOAT16),
        device=Device.CUDA,
        attention=backend,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=block_size(backend)),
        limits=LimitsConfig(max_running=TOGETHER, max_step_tokens=512),
        adapters=AdaptersConfig(enabled=adapters, device_pages=4, max_device_adapters=2),
    )


@dataclass(frozen=True)
class Case:
    """A model in one configuration, and what each of its askers should be told.

    adapters: their folders, in slots from 0. truths: for the base, then for each adapter,
    transformers' logprobs in float32 and in bfloat16.
    """

    name: str
    config: EngineConfig
    adapters: list[Path]
    truths: list[tuple[Tensor, Tensor]]


def case_of(models: Models, system: str, backend: AttentionKind, head_dim: int) -> Case:
    """Asks the oracle, on the CPU."""
    model, *askers = models.folders(system, head_dim)
    assert model is not None
    return Case(
        name=f"{system} {head_dim} {'' if system == 'padded' else backend.value}",
        config=config_for(model, backend, adapters=len(askers) > 1),
        adapters=[folder for folder in askers if folder is not None],
        truths=[models.told(model, folder) for folder in askers],
    )


def judged(runner: ModelRunner, case: Case) -> tuple[list[str], list[str]]:
    """A line for the base and each adapter, by whole prefills and by decode steps; the bad ones."""
    place_all(runner, case.adapters)
    lines, far = [], []
    for slot, (exact, half) in enumerate(case.truths, -1):
        theirs = errors(half, exact)
        for decode in (False, True):
            size = runner._config.cache.block_size
            ours = errors(forced_logprobs(runner, VOCAB_SIZE, slot, decode, size), exact)
            way = f"{'base' if slot < 0 else 'adapter':8}{'decode' if decode else 'prefill':8}"
            lines.append(f"{case.name:28}{way}{ours}  (transformers: {theirs})")
            if not bounded(ours, theirs):
                far.append(lines[-1])
    return lines, far


def check(runner: ModelRunner, case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Print and judge."""
    lines, far = judged(runner, case)
    with capfd.disabled():
        print("", *lines, sep="\n")
    assert not far, "\n".join(far)


def judge_all(cases: Sequence[Case], group: TensorParallel, device: torch.device) -> None:
    """As one rank of several; AssertionError names what is too far off."""
    lines, far = [], []
    for case in cases:
        runner = load_paged(case.config, group, device).allocate()
        assert runner.report.attention == case.config.attention.value
        both = judged(runner, case)
        lines += both[0]
        far += both[1]
    if group.rank == 0:
        print("", *(f"{group.size} ranks: {line}" for line in lines), sep="\n")
    assert not far, "\n".join(far)


def lack_of(case: Case) -> str:
    """Why this case cannot be on this machine; empty if it can."""
    try:
        load_paged(case.config, SingleRank(), pick_device(Device.CUDA)).allocate()
    except ValueError as lack:
        return str(lack)
    return ""


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("system", PAGED)
def test_paged_systems(
    models: Models,
    system: str,
    backend: AttentionKind,
    head_dim: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    case = case_of(models, system, backend, head_dim)
    try:
        runner = load_paged(case.config, SingleRank(), pick_device(Device.CUDA)).allocate()
    except ValueError as lack:
        pytest.skip(str(lack))
    assert runner.report.attention == backend.value
    check(runner, case, capfd)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_padded_system(
    models: Models, head_dim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    case = case_of(models, "padded", AttentionKind.AUTO, head_dim)
    runner = load_padded(case.config, SingleRank(), pick_device(Device.CUDA)).allocate()
    check(cast(ModelRunner, runner), case, capfd)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", BACKENDS)
def test_paged_systems_on_two_gpus(
    models: Models, backend: AttentionKind, capfd: pytest.CaptureFixture[str]
) -> None:
    """All that this backend can do in one group: processes take longer to start than to answer."""
    cases = [case_of(models, system, backend, dim) for system in PAGED for dim in HEAD_DIMS]
    lacks = {case.name: lack_of(case) for case in cases}
    able = [case for case in cases if not lacks[case.name]]
    if not able:
        pytest.skip(lacks[cases[0].name])
    with capfd.disabled():
        run_cuda_ranks(2, partial(judge_all, able))
