"""The only reader and writer of the environment."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

THROUGHPUT_ENVIRONMENT = {
    # HAProxy instead of Serve's Python proxy, and replicas that answer it directly: read when
    # Ray's processes start, so they must be set before that on every node.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Serve kills a front that is not ready after 5 s, and its start fails: too soon on a full host.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A front that died is replaced after three looks at it; Serve would look every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # A connection that brings nothing of what it owes may be silent so long; Serve allows an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    # Throughput mode keeps 1000 lines of a log in memory: a quiet replica would show none.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    # Ray would begin with an idle worker for each core; LoRay is a handful of actors.
    "RAY_prestart_worker_first_driver": "0",
    # The network time-outs of a hub that is out of reach must not hold up a request for long.
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def export_throughput_mode() -> None:
    """Set what LoRay's start script recommends, keeping what the user has set."""
    for name, value in THROUGHPUT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    front = Path(sys.executable).with_name("loray-haproxy")
    if front.is_file():
        os.environ.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", str(front))


class FrontLimits(NamedTuple):
    """What `loray-haproxy` lets clients do.

    header_seconds: how long the head of a request may take to come. per_address: connections of
    one address at once; 0: no limit, None: three quarters of all.
    """

    header_seconds: float
    per_address: int | None


def front_limits() -> FrontLimits:
    """Those of this node's environment; ValueError for what is no number."""
    share = os.environ.get("LORAY_FRONT_CONNECTIONS_PER_ADDRESS")
    return FrontLimits(
        float(os.environ.get("LORAY_FRONT_HEADER_TIMEOUT_S", "5")),
        None if share is None else int(share),
    )


class FrontPorts(NamedTuple):
    """What Serve's HTTP front listens on besides the API's port; None: it does not."""

    fallback: int
    statistics: int
    metrics: int


def front_ports() -> FrontPorts | None:
    """As this process's environment tells Serve; None without HAProxy."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return None
    return FrontPorts(
        int(os.environ.get("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "8500")),
        int(os.environ.get("RAY_SERVE_HAPROXY_STATS_PORT", "8404")),
        int(os.environ.get("RAY_SERVE_HAPROXY_METRICS_PORT", "9101")),
    )


RANK_ENVIRONMENT = {
    # Every rank of a node sees all of its GPUs: peers' memory cannot be mapped otherwise.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # NVLink multicast is not used; torch would set it up with every symmetric buffer.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def export_rank_environment() -> None:
    """Set it for processes that start from here without Ray, keeping what the user has set."""
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def cuda_ordinal(gpu_id: str) -> int:
    """CUDA's number, in this process, for the GPU that Ray assigned by its id."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu_id) if visible else int(gpu_id)


def visible_gpus() -> str | None:
    """The GPUs that CUDA may use here, by numbers or UUIDs with commas between; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def secret(name: str) -> str:
    """The value of a variable that a config names; ValueError if it is not there or empty."""
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"the config names the environment variable {name}, which is not set")
    return value


def client_setting(name: str, given: str | None) -> str | None:
    """What a command was given, else the variable of that name; None without either."""
    return given if given is not None else os.environ.get(name) or None


def environment_with(name: str, value: str | None) -> dict[str, str]:
    """What a process started from here is to find: all there is, and this."""
    return {**os.environ, **({} if value is None else {name: value})}


def joining_environment() -> dict[str, str]:
    """What a process finds that joins the cluster of `loray serve`, which asks for Ray's token.

    Ray does not show it by itself: only clusters that are started by `ray.init` ask.
    """
    return {"RAY_AUTH_MODE": "token", **os.environ}


def proxy_mode() -> str:
    """Which HTTP front Serve runs in this process's cluster, in words."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        throughput = os.environ.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1"
        return "haproxy, throughput mode" if throughput else "haproxy"
    return "python proxy (set RAY_SERVE_ENABLE_HA_PROXY=1 before Ray starts to be faster)"
