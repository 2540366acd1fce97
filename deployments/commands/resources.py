"""Whether one machine has the CPUs and GPUs that Ray must reserve for a config's replicas."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from configs.serve import ServeConfig
from deployments.commands.check_config import bases, fronts

_REMEDIES = {
    "CPU": "lower driver_cpus, rank_cpus and ingress_cpus (fractions are allowed), "
    "engine.tensor_parallel, or the replicas",
    "GPU": "lower engine.tensor_parallel or the replicas, or set engine.device to cpu",
}


class Demand(NamedTuple):
    """What the replicas of one deployment reserve.

    bundle: of each replica, by the names of Ray's resources. replicas: at the start.
    """

    name: str
    bundle: Mapping[str, float]
    replicas: int


def lacks(demands: Iterable[Demand], available: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each resource of which the machine has less than the replicas need."""
    kept = [demand for demand in demands if demand.replicas]
    needed: dict[str, float] = defaultdict(float)
    for demand in kept:
        for resource, amount in demand.bundle.items():
            needed[resource] += demand.replicas * amount
    for resource, amount in needed.items():
        has = available.get(resource, 0.0)
        if amount > has * (1 + 1e-9):
            parts = ", ".join(
                f"{each.name} {each.replicas} x {each.bundle[resource]:g}"
                for each in kept
                if each.bundle.get(resource)
            )
            yield (
                f"the replicas need {amount:g} {resource}s ({parts}), and this machine has "
                f"{has:g}: {_REMEDIES.get(resource, 'lower what they reserve')}"
            )


def demands(
    apps: Iterable[Mapping[str, Any]], bundles: Callable[[ServeConfig], list[dict[str, float]]]
) -> Iterator[Demand]:
    """What the replicas of LoRay's applications, which must be free of faults, reserve at first.

    bundles: of one replica of a driver. Raises ValueError for ranks that the model cannot have.
    """
    for app in apps:
        deployments = {one["name"]: one for one in app.get("deployments") or ()}
        usual = ServeConfig.model_fields["ingress_cpus"].default
        front = (app.get("args") or {}).get("ingress_cpus", usual)
        parts = {name: [{"CPU": front}] for name in fronts(app)}
        for name, each in bases(app).items():
            parts[name] = bundles(ServeConfig.model_validate(each))
        for name, default in parts.items():
            given = deployments.get(name, {})
            own = given.get("placement_group_bundles") or _with_options(default, given)
            yield Demand(name, summed(own), _replicas(given))


def _with_options(
    bundles: list[dict[str, float]], given: Mapping[str, Any]
) -> list[dict[str, float]]:
    """A replica's bundles, where Serve's own options may say another number of CPUs."""
    options = given.get("ray_actor_options") or {}
    if len(bundles) > 1 or options.get("num_cpus") is None:
        return bundles
    return [{"CPU": options["num_cpus"]}]


def _replicas(given: Mapping[str, Any]) -> int:
    """How many replicas a deployment begins with."""
    scaling = given.get("autoscaling_config") or {}
    number = given.get("num_replicas", 1)
    least = scaling.get("min_replicas", 1) if scaling else 1 if number == "auto" else number
    initial = scaling.get("initial_replicas")
    return int(least if initial is None else initial)


def summed(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of the bundles of one replica."""
    found: dict[str, float] = defaultdict(float)
    for bundle in bundles:
        for resource, amount in bundle.items():
            found[resource] += float(amount)  # Serve takes numbers in quotes too.
    return dict(found)
