"""build(config): what serve_config.yaml imports."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.architectures.select import load_architecture
from configs.model import ModelConfig
from configs.observability import LogFormat, ObservabilityConfig
from configs.serve import BasesConfig, ServeConfig
from deployments.batch_runner.deployment import BatchesDeployment
from deployments.bundles import bundles
from deployments.driver.deployment import DriverDeployment
from deployments.driver.routing.policy import REPORT_SECONDS, STALE_SECONDS
from deployments.driver.routing.router import AdapterRouter
from deployments.ingress.deployment import BasesIngressDeployment, IngressDeployment
from deployments.ingress.http.header_bytes import CALLBACK
from sources.model import ModelNotFound, fetch_model_config


def build(config: ServeConfig) -> Application:
    """One application: Ingress replicas over Driver replicas, each with its own ranks.

    Serve validates the yaml's `args` into `config`; the yaml's `deployments` override the options
    set here. Raises ModelNotFound or ArchitectureError for a model that cannot be served, before
    Serve ends any running replica.
    """
    _require_model(config.engine.model)
    driver = _driver(config, "Driver").bind(config)
    ingress = _ingress(IngressDeployment, config)
    if config.batches.storage is None:
        return ingress.bind(config, driver)
    return ingress.bind(config, driver, _batches(config).bind(config, driver))


def build_bases(config: BasesConfig) -> Application:
    """One application of several base models: a Driver-NAME deployment for each, one Ingress.

    Raises as `build` does.
    """
    bases = config.named()
    for base in bases.values():
        _require_model(base.engine.model)
    drivers = {
        name: _driver(base, f"Driver-{name}").bind(base, name) for name, base in bases.items()
    }
    ingress = _ingress(BasesIngressDeployment, config)
    if config.batches.storage is None:
        return ingress.bind(config, drivers)
    return ingress.bind(config, drivers, _batches(config).bind(config, drivers))


def _driver(config: ServeConfig, name: str) -> Deployment:
    return serve.deployment(DriverDeployment, name=name).options(
        ray_actor_options={"num_cpus": config.driver_cpus},
        placement_group_bundles=bundles(config),
        placement_group_strategy=config.placement.value,
        max_constructor_retry_count=2,
        request_router_config=routing(),
        # For a yaml without one. Serve tells replicas nothing of an absent one, so they would keep
        # what was deleted, and have no good settings before a first one that is faulty.
        user_config={},
        **_shared(config),
    )


def _ingress(kind: type[Any], config: ServeConfig | BasesConfig) -> Deployment:
    return serve.deployment(kind, name="Ingress").options(
        # Serve reads the variable as a process begins.
        ray_actor_options={"num_cpus": config.ingress_cpus, "runtime_env": {"env_vars": CALLBACK}},
        **_shared(config),
    )


def _batches(config: ServeConfig | BasesConfig) -> Deployment:
    return serve.deployment(BatchesDeployment, name="Batches").options(
        ray_actor_options={"num_cpus": config.ingress_cpus}, **_shared(config)
    )


def _shared(config: ServeConfig | BasesConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": config.max_ongoing_requests,
        "graceful_shutdown_timeout_s": config.request_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        # Serve learns of a death by this alone; its default is 10 s.
        "health_check_period_s": 1.0,
        **_logging(config.observability),
    }


def routing() -> RequestRouterConfig:
    """Route requests to replicas that hold their adapters; reports come every few seconds."""
    return RequestRouterConfig(
        request_router_class=AdapterRouter,
        request_routing_stats_period_s=REPORT_SECONDS,
        request_routing_stats_timeout_s=STALE_SECONDS,
    )


def _logging(config: ObservabilityConfig) -> dict[str, dict[str, str]]:
    """Serve writes the replicas' lines, by its own `logging_config` unless ours says JSON."""
    if config.log_format is LogFormat.JSON:
        return {"logging_config": {"encoding": "JSON"}}
    return {}


def _require_model(model: ModelConfig) -> None:
    """Raise if no node of the cluster has the model, or if its config.json is refused."""
    try:
        load_architecture(fetch_model_config(model))
    except ModelNotFound:
        here = ray.get_runtime_context().get_node_id()
        others = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here]
        has_model = ray.remote(num_cpus=0)(_has_model)
        found = [
            has_model.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(model)
            for node in others
        ]
        if not any(ray.get(found)):
            raise


def _has_model(model: ModelConfig) -> bool:
    """Whether this node has the model or can reach a hub that has it."""
    try:
        fetch_model_config(model)
    except ModelNotFound:
        return False
    return True
