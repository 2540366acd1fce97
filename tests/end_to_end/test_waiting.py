"""Processes that wait for a driver, on a node that says that it has GPUs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group

from configs.engine import EngineConfig
from configs.observability import LogFormat
from deployments.rank.ahead import Expected, digest_of
from deployments.rank.group import RayRanks
from deployments.rank.messages import MeasuredMemory, StoreAddress
from deployments.rank.standby import Detached, expect
from deployments.rank.waiting import (
    acquire,
    keep_spares,
    start_ahead,
    start_detached,
    waiting_groups,
)
from tests.checkpoints import write_llama
from tests.end_to_end.clients import wait_for

pytestmark = pytest.mark.ray

TEXT = LogFormat.TEXT
ON_GPU = {"CPU": 1.0, "GPU": 1.0}


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


def waiting(size: int) -> list[list[int]]:
    """Return the ranks of each group that waits."""
    return [sorted(group) for group in waiting_groups(size, TEXT)]


@pytest.mark.usefixtures("node")
def test_a_driver_takes_the_process_of_a_rank_and_says_its_gpu() -> None:
    start_ahead(engine(), [ON_GPU], TEXT)
    wait_for(lambda: waiting(1) == [[0]])
    assert waiting_groups(1, LogFormat.JSON) == []
    [group] = waiting_groups(1, TEXT)
    assert ray.get(group[0].process.remote()).gpus == ()
    found = acquire(group[0], ("1",), "config")
    assert found is not None
    assert found.known is None
    assert ray.get(found.actor.process.remote()).gpus == ("1",)
    # It is of this GPU from now on.
    assert acquire(group[0], ("7",), "config") is None
    assert waiting(1) == []


@pytest.mark.usefixtures("node")
def test_ranks_that_need_all_gpus_have_them_before_their_driver_comes() -> None:
    start_ahead(engine(tensor_parallel=2), [ON_GPU] * 2, TEXT)
    wait_for(lambda: waiting(2) == [[0, 1]])
    [group] = waiting_groups(2, TEXT)
    assert [ray.get(group[rank].process.remote()).gpus for rank in (0, 1)] == [("0",), ("1",)]


@pytest.mark.usefixtures("node")
def test_spares_wait_where_another_group_has_room() -> None:
    keep_spares(engine(tensor_parallel=2), TEXT)
    assert waiting(2) == []
    for _ in range(2):
        keep_spares(engine(), TEXT)
        wait_for(lambda: waiting(1) == [[0]])
    [group] = waiting_groups(1, TEXT)
    assert acquire(group[0], ("1",), "config") is not None
    assert waiting(1) == []


def is_gone(actor: ActorHandle) -> bool:
    try:
        ray.get(actor.waits.remote())
    except ray.exceptions.RayError:
        return True
    return False


@pytest.mark.usefixtures("node")
def test_a_process_for_another_config_ends_where_it_may_hold_the_drivers_gpu() -> None:
    expected = Expected(engine(), "nowhere", "another")
    for gpus, ends in (((), False), (("1",), True)):
        actor = start_detached(0, TEXT, gpus, Detached("group", None, 600.0), sees_gpus=False)
        ray.get(expect([actor], [expected]))
        assert acquire(actor, gpus, "config") is None
        if ends:
            wait_for(partial(is_gone, actor))  # Ray kills it a little later.
        else:
            assert ray.get(actor.waits.remote())
        ray.kill(actor)


@pytest.mark.sweep
@pytest.mark.usefixtures("node")
def test_a_group_takes_all_of_its_processes_or_none(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    given = {"model": {"id": str(model)}, "device": "cpu", "cache": {"num_blocks": 64}}
    config = engine(**given, tensor_parallel=2, recovery={"standby": True})
    bundles = placement_group([{"CPU": 0.1}] * 3)
    ray.get(bundles.ready())
    # Of two groups, which do not know each other.
    lone = [started(rank, group) for rank, group in ((0, "a"), (1, "b"))]
    # A driver waits for no process that is still importing.
    assert all(ray.get([actor.waits.remote() for actor in lone]))
    pids = served_by(config, model, bundles)
    for actor in lone:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(actor.process.remote())  # It was of no use, and takes nothing any more.
    both = [started(rank, "c") for rank in range(2)]
    expected = [process.process.pid for process in ray.get([x.process.remote() for x in both])]
    assert set(pids).isdisjoint(expected)
    assert served_by(config, model, bundles) == expected


@pytest.mark.usefixtures("node")
def test_a_group_has_started_when_its_driver_comes(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    given = {"model": {"id": str(model)}, "device": "cpu", "cache": {"num_blocks": 64}}
    config = engine(**given, tensor_parallel=2, recovery={"standby": True})
    bundles = placement_group([{"CPU": 0.1}] * 3)
    ray.get(bundles.ready())
    ranks = [started(rank, "group") for rank in range(2)]
    for actor in ranks:
        actor.prepare.remote(config)
    memory = MeasuredMemory(64, None)
    start = Expected(config, str(model), digest_of(config, str(model)), memory, 64)
    ray.get(expect(ranks, [start] * 2))
    pids = [process.process.pid for process in ray.get([x.process.remote() for x in ranks])]
    # They have connected by their own store, not by this one.
    nowhere = StoreAddress("nowhere", 1, 2)
    assert ray.get([actor.measure.remote(nowhere, 60.0, None) for actor in ranks]) == [memory] * 2
    assert served_by(config, model, bundles) == pids


def started(rank: int, group: str) -> ActorHandle:
    return start_detached(rank, TEXT, (), Detached(group, None, 600.0), sees_gpus=False)


def served_by(config: EngineConfig, model: Path, bundles: PlacementGroup) -> list[int]:
    """Start a group in these bundles and end it; returns the processes of its ranks."""
    group = RayRanks(config, str(model), bundles)
    try:
        _, reports = group.start()
        return [report.pid for report in reports]
    finally:
        group.release()


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"device": "cpu"}, [{"CPU": 1.0}]),
        ({"tensor_parallel": 3}, [ON_GPU] * 3),
        ({"tensor_parallel": 2}, [{"CPU": 1.0, "GPU": 2.0}]),
        ({"recovery": {"standby": False}}, [ON_GPU]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("node")
def test_none_where_no_driver_would_take_it(
    given: dict[str, object], ranks: list[dict[str, float]]
) -> None:
    start_ahead(engine(**given), ranks, TEXT)
    assert waiting(3) == []
