"""The CPUs and GPUs that Ray reserves for one driver replica: its placement group."""

import ray

from configs.architectures import encoders
from configs.architectures.select import load_architecture, padded_reason
from configs.engine import Device, EngineConfig
from configs.serve import ServeConfig
from sources.model import ModelNotFound, fetch_model_config


def bundles(config: ServeConfig) -> list[dict[str, float]]:
    """A replica's placement group: the driver's bundle first, then one a rank.

    A padded model has one rank with all GPUs; ValueError for several ranks of it on CPUs,
    and of an encoder.
    """
    engine, on_gpu = config.engine, _on_gpu(config.engine)
    rank: dict[str, float] = {"CPU": config.rank_cpus}
    padded = _why_padded(engine) if engine.tensor_parallel > 1 else None
    if padded is not None:
        if not on_gpu or padded == encoders.REASON:
            raise ValueError(
                f"engine.tensor_parallel ({engine.tensor_parallel}) must be 1 for this model"
                f"{'' if on_gpu else ' on a CPU'}: {padded}, so it runs whole in one rank"
            )
        return [{"CPU": config.driver_cpus}, rank | {"GPU": engine.tensor_parallel}]
    if on_gpu:
        rank["GPU"] = 1
    return [{"CPU": config.driver_cpus}] + [rank] * engine.tensor_parallel


def _why_padded(engine: EngineConfig) -> str | None:
    """Why the model runs padded; None for a paged one, or if its config cannot be read here."""
    try:
        folder = fetch_model_config(engine.model)
    except ModelNotFound:
        return None  # It may be on the ranks' nodes alone; they refuse what they cannot cut.
    return padded_reason(load_architecture(folder))


def _on_gpu(engine: EngineConfig) -> bool:
    if engine.device is Device.AUTO:
        return bool(ray.cluster_resources().get("GPU", 0) > 0)
    return engine.device is Device.CUDA
