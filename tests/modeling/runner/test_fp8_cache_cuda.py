"""Every paged system over an fp8 cache on a GPU: within the bound, captured steps and all.

Each test prints its figures, those of the same model over a cache in its own type beside them.
"""

from pathlib import Path

import pytest

from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, CacheDType, Device, LimitsConfig
from configs.model import DType, ModelConfig
from modeling.runner.load_paged import LoadedPaged, load_paged
from modeling.runner.loading import pick_device
from sharding.group import SingleRank
from tests.checkpoints import write_adapter
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, engine_config, place_all
from tests.modeling.runner.test_fp8_cache import PAGED, VOCAB_SIZE, within_bound
from tests.modeling.teacher import (
    SYSTEMS,
    TOGETHER,
    Errors,
    adapter_recipe,
    errors,
    forced_logprobs,
    oracle_logprobs,
)

pytestmark = pytest.mark.gpu


def load(
    model: Path, dtype: CacheDType, backend: AttentionKind, num_blocks: int | None = NUM_BLOCKS
) -> LoadedPaged:
    config = engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=DType.BFLOAT16),
        device=Device.CUDA,
        attention=backend,
        cache=CacheConfig(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device_memory_fraction=0.5
        ),
        limits=LimitsConfig(max_running=TOGETHER, max_step_tokens=512),
        adapters=AdaptersConfig(device_pages=4, max_device_adapters=2),
    )
    return load_paged(config, SingleRank(), pick_device(Device.CUDA))


@pytest.mark.parametrize("backend", [AttentionKind.SDPA, AttentionKind.FLASHINFER])
@pytest.mark.parametrize("system", PAGED)
def test_answers_are_within_the_bound(
    system: str, backend: AttentionKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if backend is AttentionKind.FLASHINFER:
        pytest.importorskip("flashinfer")
    model = SYSTEMS[system][0](tmp_path / "model", 64)
    adapter = write_adapter(tmp_path / "adapter", model, adapter_recipe(system))
    found: dict[tuple[CacheDType, int, bool], Errors] = {}
    for dtype in (CacheDType.AUTO, CacheDType.FP8):
        runner = load(model, dtype, backend).allocate()
        assert runner.report.attention == backend.value
        place_all(runner, [adapter])
        for slot, folder in ((-1, None), (0, adapter)):
            truth = oracle_logprobs(model, folder)
            for decode in (False, True):
                logprobs = forced_logprobs(runner, VOCAB_SIZE, slot, decode)
                found[dtype, slot, decode] = errors(logprobs, truth)
        assert not any(layer.clamped.any() for layer in runner._forward.cache)
    with capsys.disabled():
        for (dtype, slot, decode), own in found.items():
            way = f"{'base' if slot < 0 else 'adapter'} {'decode' if decode else 'prefill'}"
            print(f"\n{system} {backend.value} {dtype.value:5}{way:16} {own}", end="")
    assert all(within_bound(own) for own in found.values()), found


def test_as_much_memory_holds_twice_the_blocks(tmp_path: Path) -> None:
    model = SYSTEMS["llama"][0](tmp_path / "model", 64)
    half, fp8 = (
        load(model, dtype, AttentionKind.AUTO, num_blocks=None).measure()
        for dtype in (CacheDType.AUTO, CacheDType.FP8)
    )
    assert 1.9 < fp8 / half < 2.1
