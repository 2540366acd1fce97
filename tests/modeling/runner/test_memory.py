from typing import Any

import pytest

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, EngineConfig
from configs.model import ModelConfig
from modeling.runner.block_tables import BatchSize
from modeling.runner.memory import (
    CPU_CACHE_BYTES,
    CPU_POOL_BYTES,
    DeviceMemory,
    adapter_pages,
    check_linears,
    check_states,
    cpu_blocks,
    cuda_blocks,
    dequantised_bytes,
    empty_blocks,
    expert_pages,
    vocabulary_copies,
    vocabulary_pages,
)

GIB = 2**30
ENGINE = EngineConfig(model=ModelConfig(id="m"))


def test_a_cpu_holds_all_slots_at_the_usual_rank() -> None:
    assert adapter_pages(AdaptersConfig(max_device_adapters=20), 1000, None) == 40
    assert adapter_pages(AdaptersConfig(max_device_adapters=20, max_rank=8), 1000, None) == 20


def test_a_cpu_stays_within_its_budget_but_takes_the_largest_rank() -> None:
    config = AdaptersConfig(max_device_adapters=500, max_rank=64)
    assert adapter_pages(config, 2**20, None) == CPU_POOL_BYTES // 2**20
    assert adapter_pages(config, GIB, None) == 8


def test_a_gpu_gives_its_share_and_no_more_than_slots_can_fill() -> None:
    config = AdaptersConfig(memory_fraction=0.25, max_device_adapters=10, max_rank=64)
    memory = DeviceMemory(total=80 * GIB, free=64 * GIB)
    assert adapter_pages(config, GIB // 2, memory) == 32
    assert adapter_pages(config, 2**20, memory) == 80


def test_given_pages_are_taken_as_given() -> None:
    assert adapter_pages(AdaptersConfig(device_pages=3), GIB, None) == 3
    assert adapter_pages(AdaptersConfig(device_pages=3, enabled=False), GIB, None) == 0


def test_a_cpu_caches_every_place_within_its_budget() -> None:
    assert cpu_blocks(BatchSize(4, 100, 16), 1000) == 28
    assert cpu_blocks(BatchSize(256, 4096, 16), 2**20) == CPU_CACHE_BYTES // 2**20
    assert cpu_blocks(BatchSize(256, 4096, 16), GIB) == 256


def test_blocks_without_memory_are_as_many_as_any_request_or_prefix_needs() -> None:
    assert empty_blocks(BatchSize(4, 100, 16), 3) == 49
    memory = DeviceMemory(total=80 * GIB, free=64 * GIB)
    assert cuda_blocks(ENGINE, memory, 0, 0, empty=49) == 49
    with pytest.raises(ValueError, match="no memory is left"):
        cuda_blocks(ENGINE, memory, 80 * GIB, 0, empty=49)


def test_numbers_beside_integers_take_their_part_of_what_the_cache_would_get() -> None:
    config = EngineConfig(model=ModelConfig(id="m", dequantised_fraction=0.25))
    memory = DeviceMemory(total=80 * GIB, free=48 * GIB)
    assert dequantised_bytes(config, memory, GIB) == 10 * GIB
    assert dequantised_bytes(config, DeviceMemory(total=80 * GIB, free=7 * GIB), GIB) == 0
    assert dequantised_bytes(config, None, GIB) == 0
    counted = config.model_copy(update={"cache": CacheConfig(num_blocks=20)})
    assert dequantised_bytes(counted, memory, GIB) == 5 * GIB


def test_a_gpu_caches_with_what_is_left() -> None:
    memory = DeviceMemory(total=80 * GIB, free=50 * GIB)
    assert cuda_blocks(ENGINE, memory, 2 * GIB, GIB) == 72 - 30 - 2
    with pytest.raises(ValueError, match=r"no memory is left.*device_memory_fraction is 0\.9"):
        cuda_blocks(ENGINE, memory, 42 * GIB, GIB)


def test_experts_get_half_of_the_pools_memory_at_most() -> None:
    config = AdaptersConfig(memory_fraction=0.25, max_device_adapters=10, max_rank=64)
    memory = DeviceMemory(total=8000, free=8000)
    assert expert_pages(config, 0, memory) == 0
    assert expert_pages(config, 300, memory) == 3
    assert adapter_pages(config, 10, memory, 900) == 80
    assert adapter_pages(config, 50, memory, 900) == 22
    assert expert_pages(config.model_copy(update={"expert_pages": 0}), 300, memory) == 0
    assert expert_pages(config.model_copy(update={"device_pages": 2}), 300, memory) == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 40),
        ({"max_rank": 512}, 64),
        ({"vocabulary": True}, 320),
        ({"vocabulary_pages": 3}, 3),
        ({"vocabulary": True, "vocabulary_pages": 3}, 3),
    ],
)
def test_embedding_and_head_have_pages_of_their_own(fields: dict[str, Any], expected: int) -> None:
    assert vocabulary_pages(AdaptersConfig(**fields), 320) == expected
    assert vocabulary_pages(AdaptersConfig(max_rank=512), 5) == 5


def test_whole_embeddings_and_heads_must_fit() -> None:
    config = AdaptersConfig(vocabulary=True, vocabulary_copies=3)
    assert vocabulary_copies(config, 100, None) == 3
    assert vocabulary_copies(config, 100, DeviceMemory(total=1000, free=300)) == 3
    with pytest.raises(
        ValueError, match=r"vocabulary_copies \(3\) takes 300 bytes .* 299 are free"
    ):
        vocabulary_copies(config, 100, DeviceMemory(total=1000, free=299))
    check_linears(300, DeviceMemory(total=1000, free=300))
    with pytest.raises(ValueError, match=r"whole_linears .* take 300 bytes .* 299 are free"):
        check_linears(300, DeviceMemory(total=1000, free=299))


def test_states_of_recurrent_layers_leave_room_for_a_cache() -> None:
    memory = DeviceMemory(total=80 * GIB, free=20 * GIB)
    check_states(256, 150_000_000, None)
    check_states(100, 150_000_000, memory)
    with pytest.raises(
        ValueError, match=r"150 MB for each of 256 .* 21\.5 GB free: let them be 100 at"
    ):
        check_states(256, 150_000_000, memory)
    with pytest.raises(ValueError, match="not even one fits"):
        check_states(1, 15 * GIB, memory)
