"""Processes that wait for a driver, on a node that says that it has GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group

from configs.engine import EngineConfig
from configs.observability import LogFormat
from deployments.rank.group import RayRanks
from deployments.rank.standby import Detached
from deployments.rank.waiting import (
    acquire,
    keep_spares,
    start_ahead,
    start_detached,
    waiting_ranks,
)
from tests.checkpoints import write_llama
from tests.end_to_end.clients import wait_for

pytestmark = pytest.mark.ray

TEXT = LogFormat.TEXT


@pytest.fixture(scope="module")
def ray_node() -> Iterator[None]:
    ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def node(ray_node: None) -> Iterator[None]:
    yield
    for each in ray.util.list_named_actors(all_namespaces=True):
        ray.kill(ray.get_actor(**each))


def engine(**given: object) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"id": "made"}, **given})


@pytest.mark.usefixtures("node")
def test_a_driver_takes_the_process_of_each_rank_and_says_its_gpu() -> None:
    start_ahead(engine(tensor_parallel=2), TEXT)
    wait_for(lambda: sorted(waiting_ranks(2, TEXT)) == [0, 1])
    there = waiting_ranks(2, TEXT)
    assert waiting_ranks(2, LogFormat.JSON) == {}
    for rank, gpu in ((0, "1"), (1, "0")):
        found = acquire(there[rank], (gpu,))
        assert found is not None
        assert found.known is None
        assert ray.get(found.actor.process.remote()).gpus == (gpu,)
        # It is of this GPU from now on.
        assert acquire(there[rank], ("7",)) is None
    assert waiting_ranks(2, TEXT) == {}


@pytest.mark.usefixtures("node")
def test_spares_wait_where_another_group_has_room() -> None:
    keep_spares(engine(tensor_parallel=2), TEXT)
    assert waiting_ranks(2, TEXT) == {}
    for _ in range(2):
        keep_spares(engine(), TEXT)
        wait_for(lambda: sorted(waiting_ranks(1, TEXT)) == [0])
    there = waiting_ranks(1, TEXT)
    assert len(there[0]) == 1
    assert acquire(there[0], ("1",)) is not None
    assert waiting_ranks(1, TEXT) == {}


@pytest.mark.usefixtures("node")
def test_a_group_takes_all_of_its_processes_or_none(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    given = {"model": {"id": str(model)}, "device": "cpu", "cache": {"num_blocks": 64}}
    config = engine(**given, tensor_parallel=2, recovery={"standby": True})
    bundles = placement_group([{"CPU": 0.1}] * 3)
    ray.get(bundles.ready())
    waiting = Detached(None, 600.0)
    lone = start_detached(0, TEXT, (), waiting, sees_gpus=False)
    pids = served_by(config, model, bundles)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(lone.process.remote())  # It was of no use, and takes nothing any more.
    both = [start_detached(rank, TEXT, (), waiting, sees_gpus=False) for rank in range(2)]
    expected = [process.process.pid for process in ray.get([x.process.remote() for x in both])]
    assert set(pids).isdisjoint(expected)
    assert served_by(config, model, bundles) == expected


def served_by(config: EngineConfig, model: Path, bundles: PlacementGroup) -> list[int]:
    """Start a group in these bundles and end it; returns the processes of its ranks."""
    group = RayRanks(config, str(model), bundles)
    try:
        _, reports = group.start()
        return [report.pid for report in reports]
    finally:
        group.release()


@pytest.mark.parametrize(
    "given",
    [{"device": "cpu"}, {"tensor_parallel": 3}, {"recovery": {"standby": False}}],
    ids=str,
)
@pytest.mark.usefixtures("node")
def test_none_where_no_driver_would_take_it(given: dict[str, object]) -> None:
    start_ahead(engine(**given), TEXT)
    assert waiting_ranks(3, TEXT) == {}
