"""`loray serve` says what a machine lacks, where Ray would wait for it without end."""

from typing import Any

import pytest

from configs.serve import ServeConfig
from deployments.commands.resources import Demand, demands, lacks

MACHINE = {"CPU": 2.0, "GPU": 1.0}


def bundles(config: ServeConfig) -> list[dict[str, float]]:
    ranks = config.engine.tensor_parallel
    return [{"CPU": config.driver_cpus}, *[{"CPU": config.rank_cpus, "GPU": 1.0}] * ranks]


def app(*deployments: dict[str, Any], ranks: int = 1, **args: Any) -> dict[str, Any]:
    cpus = dict.fromkeys(("driver_cpus", "rank_cpus", "ingress_cpus"), 0.5)
    engine = {"model": {"id": "m"}, "tensor_parallel": ranks}
    return {
        "import_path": "deployments.app:build",
        "args": {"engine": engine, **cpus, **args},
        "deployments": list(deployments),
    }


FITS: dict[str, dict[str, Any]] = {
    "its defaults": app(),
    "all of it": app(rank_cpus=1.0),
    "numbers in quotes": app(
        {"name": "Driver", "autoscaling_config": {"min_replicas": "1", "max_replicas": "2"}},
        rank_cpus="1.0",
        ingress_cpus="0.5",
    ),
    "no driver yet": app({"name": "Driver", "autoscaling_config": {"min_replicas": 0}}, ranks=4),
    "an ingress of its own size": app(
        {"name": "Ingress", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.25}},
    ),
}
LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": (app(ranks=2), "need 2 GPUs (Driver 1 x 2), and this machine has 1: lower engine.te"),
    "replicas": (app({"name": "Driver", "num_replicas": 2}), "need 2 GPUs (Driver 2 x 1)"),
    "replicas at first": (
        app({"name": "Driver", "autoscaling_config": {"initial_replicas": 3, "max_replicas": 4}}),
        "need 3 GPUs (Driver 3 x 1)",
    ),
    "an ingress": (
        app({"name": "Ingress", "num_replicas": 3}),
        "need 2.5 CPUs (Ingress 3 x 0.5, Driver 1 x 1), and this machine has 2: lower driver_cpus",
    ),
    "the runner of batches": (app(rank_cpus=1, batches={"storage": "/x"}), "Batches 1 x 0.5"),
    "bundles of the yaml": (
        app({"name": "Driver", "placement_group_bundles": [{"CPU": 1}, {"CPU": 8}]}),
        "need 9.5 CPUs (Ingress 1 x 0.5, Driver 1 x 9)",
    ),
    "another resource": (
        app({"name": "Driver", "placement_group_bundles": [{"CPU": 1, "TPU": 1}]}),
        "need 1 TPUs",
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits(name: str) -> None:
    assert list(lacks(demands([FITS[name]], bundles), MACHINE)) == []


@pytest.mark.parametrize("name", LACKS)
def test_what_is_lacking_is_named_with_what_to_lower(name: str) -> None:
    given, message = LACKS[name]
    found = list(lacks(demands([given], bundles), MACHINE))
    assert any(message in fault for fault in found), found


def test_fractions_add_up_to_a_whole() -> None:
    assert list(lacks([Demand("Driver", {"CPU": 0.1}, 20)], MACHINE)) == []
