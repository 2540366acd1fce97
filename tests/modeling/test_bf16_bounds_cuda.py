"""Every system in bfloat16 on a GPU, on each attention backend: how far it is from float32.

Each test prints its figures. The bound is that of `bounded`: about transformers' own distance.
"""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from configs.engine import (
    AdaptersConfig,
    AttentionBackend,
    CacheConfig,
    Device,
    EngineConfig,
    LimitsConfig,
)
from configs.model import DType, ModelConfig
from modeling.loading import pick_device
from modeling.padded_runner import PaddedRunner
from modeling.runner import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import write_adapter
from tests.modeling.parity import (
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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB_SIZE = 96
ADAPTED_DIM = 64
"""Where adapters take part: their kernels are compiled for each width, the attention is not."""

BACKENDS = [AttentionBackend.SDPA, AttentionBackend.FLASHINFER, AttentionBackend.FLASH_ATTN]
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


def block_size(backend: AttentionBackend) -> int:
    return FLASH_ATTN_BLOCK_SIZE if backend is AttentionBackend.FLASH_ATTN else BLOCK_SIZE


def config_for(model: Path, backend: AttentionBackend, adapters: bool) -> EngineConfig:
    return engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=DType.BFLOAT16),
        device=Device.CUDA,
        attention=backend,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=block_size(backend)),
        limits=LimitsConfig(max_running=TOGETHER, max_step_tokens=512),
        adapters=AdaptersConfig(enabled=adapters, device_pages=4, max_device_adapters=2),
    )


def check(
    models: Models,
    runner: ModelRunner,
    folders: list[Path | None],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Print and judge the base and the adapters, by whole prefills and by decode steps."""
    model, *askers = folders
    assert model is not None
    place_all(runner, [folder for folder in askers if folder is not None])
    far = []
    for slot, folder in enumerate(askers, -1):
        exact, half = models.told(model, folder)
        theirs = errors(half, exact)
        for decode in (False, True):
            size = runner._config.cache.block_size
            found = forced_logprobs(runner, VOCAB_SIZE, slot, decode, size)
            ours = errors(found, exact)
            way = f"{'adapter' if folder else 'base':8}{'decode' if decode else 'prefill':8}"
            line = f"{name:28}{way}{ours}  (transformers: {theirs})"
            with capsys.disabled():
                print(f"\n{line}", end="")
            if not bounded(ours, theirs):
                far.append(line)
    assert not far, "\n".join(far)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("system", PAGED)
def test_paged_systems(
    models: Models,
    system: str,
    backend: AttentionBackend,
    head_dim: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = models.folders(system, head_dim)
    model = folders[0]
    assert model is not None
    config = config_for(model, backend, adapters=len(folders) > 2)
    runner = ModelRunner(config, SingleRank(), pick_device(Device.CUDA))
    try:
        report = runner.load()
    except ValueError as lack:
        pytest.skip(str(lack))
    assert report.attention == backend.value
    check(models, runner, folders, f"{system} {head_dim} {backend.value}", capsys)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_padded_system(
    models: Models, head_dim: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = models.folders("padded", head_dim)
    model = folders[0]
    assert model is not None
    config = config_for(model, AttentionBackend.AUTO, adapters=len(folders) > 2)
    runner = PaddedRunner(config, SingleRank(), pick_device(Device.CUDA))
    runner.load()
    check(models, cast(ModelRunner, runner), folders, f"padded {head_dim}", capsys)
