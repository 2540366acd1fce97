"""Processes that are started ahead of their driver, on a node that says that it has a GPU."""

from collections.abc import Iterator

import pytest
import ray

from configs.engine import EngineConfig
from configs.observability import LogFormat
from deployments.rank.waiting import acquire, keep_spares, start_ahead, waiting_ranks
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


@pytest.mark.parametrize(
    "given",
    [{"device": "cpu"}, {"tensor_parallel": 3}, {"recovery": {"standby": False}}],
    ids=str,
)
@pytest.mark.usefixtures("node")
def test_none_where_no_driver_would_take_it(given: dict[str, object]) -> None:
    start_ahead(engine(**given), TEXT)
    assert waiting_ranks(3, TEXT) == {}
