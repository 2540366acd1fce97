"""Ray's head dies and comes back over an external store: requests go on, names and pins last."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from tests.end_to_end.clients import MODELS, Answers, adapter_of, wait_for
from tests.end_to_end.processes import title_of
from tests.end_to_end.serving import PATIENCE_SECONDS, RAY_SETTINGS, ROOT, demo_config
from tests.ports import free_port

REDIS = shutil.which("redis-server")
QUESTION = "What is the capital of France?"
NUM_CLIENTS = 4
HEADLESS_SECONDS = 5.0

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(REDIS is None, reason="redis-server is not installed"),
]


@dataclass
class Headed:
    """A head that holds no replica, and a node with all of them."""

    cluster: Cluster
    url: str
    head: dict[str, Any]

    def processes(self, title: str, node: Any) -> list[psutil.Process]:
        """The processes under a node's raylet with this in their title."""
        [raylet] = node.all_processes["raylet"]
        children = psutil.Process(raylet.process.pid).children()
        return [child for child in children if title in title_of(child)]

    @property
    def worker(self) -> Any:
        """The node with the replicas."""
        return self.cluster.worker_nodes and next(iter(self.cluster.worker_nodes))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """A real server, empty; its port."""
    assert REDIS is not None
    port = free_port()
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir"]
    process = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.DEVNULL)
    yield port
    process.terminate()
    process.wait(PATIENCE_SECONDS)


@pytest.fixture
def headed(redis: int, tmp_path: Path) -> Iterator[Headed]:
    before = dict(os.environ)
    os.environ.update(RAY_SETTINGS)
    patience = f"{PATIENCE_SECONDS:.0f}"
    store = f"127.0.0.1:{redis}"
    os.environ.update(RAY_REDIS_ADDRESS=store, RAY_gcs_rpc_server_reconnect_timeout_s=patience)
    head = {"num_cpus": 0, "wait": False, "gcs_server_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(wait=False, num_cpus=4, object_store_memory=80 * 2**20)
    port = free_port()
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(demo_config(port)))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address"]
    subprocess.run([*command, cluster.address, str(path)], cwd=ROOT, check=True)
    found = Headed(cluster, f"http://127.0.0.1:{port}", head)
    wait_for(lambda: httpx.get(f"{found.url}/health", timeout=30).status_code == 200)
    wait_for(lambda: bool(found.processes("ProxyActor", found.worker)))
    yield found
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


def client_of_worker(headed: Headed) -> httpx.Client:
    """A client with a connection to the front of the worker, which shares the head's port."""
    [front] = headed.processes("ProxyActor", headed.worker)
    for _ in range(200):
        client = httpx.Client(base_url=headed.url, timeout=PATIENCE_SECONDS)
        with client.stream("GET", "/health") as reply:
            reply.read()
            own = reply.extensions["network_stream"].get_extra_info("client_addr")
        # uvicorn keeps the connection open, so that the front has it in its table.
        if any(each.raddr and each.raddr.port == own[1] for each in front.net_connections()):
            return client
        client.close()
    pytest.fail("no connection reaches the worker's front")


@dataclass
class Load:
    """Clients of the worker's front that ask again and again, each over one connection."""

    answers: Answers
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def ask(self, client: httpx.Client, number: int) -> None:
        while not self.ending.is_set():
            number += 1
            model = MODELS[number % len(MODELS)]
            body = {"inputs": QUESTION, "parameters": {"adapter_id": adapter_of(model)}}
            try:
                reply = client.post("/generate", json=body)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            self.num_answered += 1
            if reply.json() != {"generated_text": self.answers[model][QUESTION]["raw"]}:
                self.failures.append(reply.text[:300])

    def more(self, count: int) -> None:
        """Wait until so many more requests were answered."""
        most = self.num_answered + count
        wait_for(lambda: self.num_answered >= most or bool(self.failures))


def test_the_head_dies_and_comes_back_and_no_request_is_lost(
    headed: Headed, answers: Answers
) -> None:
    client = client_of_worker(headed)
    folder = (ROOT / "configs/demo/adapters/pirate").resolve()
    named = {"lora_name": "captain", "lora_path": str(folder)}
    assert client.post("/v1/load_lora_adapter", json=named).status_code == 200
    assert client.patch("/v1/adapters/french", json={"pinned": True}).status_code == 200
    load = Load(answers)
    clients = [client_of_worker(headed) for _ in range(NUM_CLIENTS)]
    threads = [
        threading.Thread(target=load.ask, args=each)
        for each in zip(clients, range(NUM_CLIENTS), strict=True)
    ]
    for thread in threads:
        thread.start()
    load.more(20)
    headed.cluster.remove_node(headed.cluster.head_node, allow_graceful=False)
    time.sleep(HEADLESS_SECONDS)
    load.more(20)
    headed.cluster.add_node(**headed.head)
    load.more(20)

    def saves() -> bool:
        """Whether commands are saved again: the worker knows the new head."""
        return client.patch("/v1/adapters/json", json={"pinned": True}).status_code == 200

    wait_for(saves)
    load.ending.set()
    for thread in threads:
        thread.join()
    assert load.failures == []
    [driver] = headed.processes("ServeReplica:loray:Driver", headed.worker)
    driver.kill()
    text = answers["pirate"][QUESTION]["raw"]
    body = {"inputs": QUESTION, "parameters": {"adapter_id": "captain"}}
    wait_for(lambda: client.post("/generate", json=body).json() == {"generated_text": text})
    rows = {row["id"]: row for row in client.get("/v1/adapters").json()["data"]}
    assert rows["captain"]["root"] == "pirate"
    assert (rows["french"]["pinned"], rows["json"]["pinned"]) == (True, True)
