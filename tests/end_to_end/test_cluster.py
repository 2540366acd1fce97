"""Several nodes: ranks on nodes of their own, over TCP, and nodes that die."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from configs.serve import ServeConfig
from deployments.app import build
from deployments.rank.messages import LoadReport
from tests.end_to_end.clients import MODELS, Answers, adapter_of
from tests.end_to_end.processes import title_of
from tests.end_to_end.serving import PATIENCE_SECONDS, RAY_SETTINGS, demo_config
from tests.ports import free_port

QUESTION = "What is the capital of France?"

_PASSING = (httpx.HTTPError, AssertionError, RayError, RayServeException, TimeoutError)

pytestmark = pytest.mark.ray


@dataclass
class Nodes:
    """A cluster of nodes that hold one actor each: a replica of two ranks takes three."""

    cluster: Cluster
    url: str

    def raylets(self) -> dict[int, Any]:
        """The process id of each node's raylet, and the node."""
        found = {}
        for node in self.cluster.list_all_nodes():
            [raylet] = node.all_processes["raylet"]
            found[raylet.process.pid] = node
        return found

    def node_of(self, pid: int) -> Any:
        """The node on which a process runs."""
        return self.raylets()[psutil.Process(pid).ppid()]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    before = dict(os.environ)
    os.environ.update(RAY_SETTINGS)
    head = {"num_cpus": 0, "wait": False, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(6):
        cluster.add_node(wait=False, num_cpus=1, object_store_memory=80 * 2**20)
        cluster.wait_for_nodes(PATIENCE_SECONDS)
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    config = demo_config(port)["applications"][0]["args"]
    config |= {"placement": "PACK", "driver_cpus": 1, "rank_cpus": 1}
    serve.run(build(ServeConfig.model_validate(config)), name="loray", route_prefix="/")
    yield Nodes(cluster, f"http://127.0.0.1:{port}")
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


def ranks() -> list[LoadReport]:
    reports: list[LoadReport] = (
        serve.get_deployment_handle("Driver", "loray").ranks.remote().result(timeout_s=60)
    )
    return reports


def generated_text(url: str, model: str) -> str:
    body = {"inputs": QUESTION, "parameters": {"adapter_id": adapter_of(model)}}
    reply = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["generated_text"]
    return text


def replaced(before: list[LoadReport]) -> str:
    """Say so once none of the ranks of before is left in the driver's group."""
    common = {report.pid for report in before} & {report.pid for report in ranks()}
    assert not common, f"ranks {common} are still in use"
    return "replaced"


def eventually(question: Callable[[], str]) -> str:
    """Ask until there is an answer: a client that tries again."""
    pause = threading.Event()
    last: Exception | None = None
    for _ in range(int(PATIENCE_SECONDS / 0.5)):
        try:
            return question()
        except _PASSING as error:
            last = error
        pause.wait(0.5)
    pytest.fail(f"no answer: {last}")


def test_ranks_on_separate_nodes(nodes: Nodes, answers: Answers) -> None:
    nodes_of_ranks = [nodes.node_of(report.pid) for report in ranks()]
    assert len(set(nodes_of_ranks)) == 2, "both ranks are on one node"
    for model in MODELS:
        assert generated_text(nodes.url, model) == answers[model][QUESTION]["raw"]


def test_the_node_of_a_rank_dies(nodes: Nodes, answers: Answers) -> None:
    """The driver lives on: the ranks come back where there is room."""
    before = ranks()
    nodes.cluster.remove_node(nodes.node_of(before[1].pid), allow_graceful=False)
    # A killed raylet's workers live a moment longer, so the old ranks may still answer.
    eventually(lambda: replaced(before))
    expected = answers["pirate"][QUESTION]["raw"]
    assert eventually(lambda: generated_text(nodes.url, "pirate")) == expected


@pytest.mark.sweep
def test_the_node_of_a_driver_dies(nodes: Nodes, answers: Answers) -> None:
    """Serve starts the replica anew, with its ranks, on nodes that have room."""
    before = ranks()
    old = [psutil.Process(report.pid) for report in before]
    busy = {nodes.node_of(report.pid) for report in before}
    [driver] = [
        child
        for raylet in nodes.raylets()
        for child in psutil.Process(raylet).children()
        if "ServeReplica:loray:Driver" in title_of(child)
    ]
    home = nodes.node_of(driver.pid)
    assert home not in busy
    nodes.cluster.remove_node(home, allow_graceful=False)
    eventually(lambda: replaced(before))
    expected = answers["json"][QUESTION]["raw"]
    assert eventually(lambda: generated_text(nodes.url, "json")) == expected
    _, alive = psutil.wait_procs(old, timeout=PATIENCE_SECONDS)
    assert not alive, "ranks outlived their driver"
