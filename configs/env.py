"""The environment's variables; no other module reads or writes them."""

import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

Number = TypeVar("Number", int, float)

_FRONT_FILES = f"/tmp/haproxy-serve-{os.getuid()}"

THROUGHPUT_ENVIRONMENT = {
    # HAProxy instead of Serve's Python proxy, and replicas that answer it directly: read when
    # Ray's processes start, so they must be set before that on every node.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Serve kills a proxy that is not ready after 5 s, too soon on a busy host.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A proxy that died is replaced after three failed checks; Serve would check every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # A replica that does not answer would keep its GPUs for `request_timeout_s` more.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # How long a client may be silent in the middle of its request; Serve allows an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
    # Serve's own folder belongs to its first user: others could not start HAProxy.
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{_FRONT_FILES}/haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{_FRONT_FILES}/admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{_FRONT_FILES}/metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": _FRONT_FILES,
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{_FRONT_FILES}/server-state",
    # Throughput mode keeps 1000 log lines in memory: a quiet replica would show none.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    # Ray would start an idle worker for each core; LoRay has only a few actors.
    "RAY_prestart_worker_first_driver": "0",
    # Telemetry's network time-outs would delay requests when the hub cannot be reached.
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def export_throughput_mode() -> None:
    """Set THROUGHPUT_ENVIRONMENT, except what the user has set."""
    for name, value in THROUGHPUT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    front = Path(sys.executable).with_name("loray-haproxy")
    if front.is_file():
        os.environ.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", str(front))


class FrontLimits(NamedTuple):
    """Limits of clients in `loray-haproxy`.

    header_seconds: the longest time in which a request's headers must arrive.
    per_address: connections of one address at once; 0: no limit, None: three quarters of all.
    """

    header_seconds: float
    per_address: int | None


def front_limits() -> FrontLimits:
    """Read the limits from the environment; ValueError for a value that is no number."""
    share = os.environ.get("LORAY_FRONT_CONNECTIONS_PER_ADDRESS")
    return FrontLimits(
        _number("LORAY_FRONT_HEADER_TIMEOUT_S", 5.0),
        None if share is None else _number("LORAY_FRONT_CONNECTIONS_PER_ADDRESS", 0),
    )


def _number(name: str, default: Number) -> Number:
    """A variable of the default's type; ValueError for another one, or one below 0."""
    given = os.environ.get(name)
    if given is None:
        return default
    with suppress(ValueError):
        found = type(default)(given)
        if 0 <= found < math.inf:
            return found
    kind = "a whole number" if isinstance(default, int) else "a number"
    raise ValueError(f"the environment variable {name} must be {kind} from 0 on. Given: {given}")


class FrontPorts(NamedTuple):
    """The ports of Serve's HTTP proxy beside the API's."""

    fallback: int
    statistics: int
    metrics: int


def front_ports() -> FrontPorts | None:
    """The ports in this process's environment; None without HAProxy. ValueError for no number."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return None
    return FrontPorts(
        _number("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", 8500),
        _number("RAY_SERVE_HAPROXY_STATS_PORT", 8404),
        _number("RAY_SERVE_HAPROXY_METRICS_PORT", 9101),
    )


RANK_ENVIRONMENT = {
    # Every rank of a node sees all of its GPUs: peers' memory cannot be mapped otherwise.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # NVLink multicast is not used; torch would set it up with every symmetric buffer.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def export_rank_environment() -> None:
    """Set RANK_ENVIRONMENT for child processes without Ray, except what the user has set."""
    for name, value in RANK_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def read_kernels(folder: Path | None) -> None:
    """Have this process look for compiled kernels in a folder, before it compiles any.

    folder: of the config; None: LORAY_KERNEL_CACHE's.
    """
    if folder is not None:
        os.environ["LORAY_KERNEL_CACHE"] = str(folder)
    if kernel_folder() is not None:
        os.environ.setdefault("TRITON_CACHE_MANAGER", "modeling.kernels.carried:CarriedKernels")


def write_kernels(folder: Path, workspace: Path) -> None:
    """Have this process compile into a folder; workspace: of FlashInfer's compiler."""
    os.environ["LORAY_KERNEL_CACHE"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(workspace)
    os.environ.pop("TRITON_CACHE_MANAGER", None)


def kernel_folder() -> Path | None:
    """The folder of compiled kernels that `loray warm` has filled, if there is one."""
    folder = os.environ.get("LORAY_KERNEL_CACHE")
    return Path(folder) if folder else None


def cuda_ordinal(gpu_id: str) -> int:
    """CUDA's number, in this process, of the GPU with Ray's id."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(gpu_id) if visible else int(gpu_id)


def visible_gpus() -> str | None:
    """The GPUs that CUDA may use here: numbers or UUIDs, separated by commas; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def secret(name: str) -> str:
    """The value of a variable that a config names; ValueError if it is not set or empty."""
    value = os.environ.get(name, "")
    if not value:
        raise ValueError(f"the config names the environment variable {name}, which is not set")
    return value


def client_setting(name: str, given: str | None) -> str | None:
    """A command's argument if it was given, else the variable; None without either."""
    return given if given is not None else os.environ.get(name) or None


def environment_with(name: str, value: str | None) -> dict[str, str]:
    """A copy of the environment with one more variable, for a child process; None adds nothing."""
    return {**os.environ, **({} if value is None else {name: value})}


def joining_environment() -> dict[str, str]:
    """The environment of a process that joins the cluster of `loray serve`, which needs a token.

    Ray sends its token only in this mode, which is not its default.
    """
    return {"RAY_AUTH_MODE": "token", **os.environ}


def proxy_mode() -> str:
    """A description of the HTTP proxy that Serve runs in this process's cluster."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        throughput = os.environ.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1"
        return "haproxy, throughput mode" if throughput else "haproxy"
    return "python proxy (set RAY_SERVE_ENABLE_HA_PROXY=1 before Ray starts to be faster)"
