"""build(config): what serve_config.yaml imports."""

import ray
from ray import serve
from ray.serve import Application

from configs.engine import Device, EngineConfig
from configs.serve import ServeConfig
from deployments.driver.deployment import DriverDeployment
from deployments.ingress.deployment import IngressDeployment


def build(config: ServeConfig) -> Application:
    """One application: Ingress replicas over Driver replicas, each with its own ranks.

    Serve validates the yaml's `args` into `config`; what stands under the yaml's
    `deployments` overrides what is set here.
    """
    driver = serve.deployment(DriverDeployment, name="Driver").options(
        ray_actor_options={"num_cpus": config.driver_cpus},
        placement_group_bundles=bundles(config),
        placement_group_strategy=config.placement.value,
        max_ongoing_requests=config.max_ongoing_requests,
        graceful_shutdown_timeout_s=config.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,
    )
    ingress = serve.deployment(IngressDeployment, name="Ingress").options(
        ray_actor_options={"num_cpus": config.ingress_cpus},
        max_ongoing_requests=config.max_ongoing_requests,
        graceful_shutdown_timeout_s=config.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(config, driver.bind(config))


def bundles(config: ServeConfig) -> list[dict[str, float]]:
    """A replica's placement group: the driver's bundle first, then one a rank."""
    rank: dict[str, float] = {"CPU": config.rank_cpus}
    if _on_gpu(config.engine):
        rank["GPU"] = 1
    return [{"CPU": config.driver_cpus}] + [rank] * config.engine.tensor_parallel


def _on_gpu(engine: EngineConfig) -> bool:
    if engine.device is Device.AUTO:
        return bool(ray.cluster_resources().get("GPU", 0) > 0)
    return engine.device is Device.CUDA
