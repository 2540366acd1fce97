"""deploy/kubernetes/ against KubeRay's and Kubernetes' schemas, and against our own settings."""

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.serve import ServeConfig
from configs.version import VERSION
from deployments.bundles import bundles
from deployments.cli import app
from deployments.commands.check_config import config_faults
from sources.model import ModelNotFound
from tests.deploy.containerfile import steps
from tests.deploy.schemas import faults
from tests.house import ROOT

FOLDER = ROOT / "deploy/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
SERVICES = ["autoscaling", "one-gpu", "two-gpus"]

Manifest = dict[str, Any]


@pytest.fixture(autouse=True)
def _the_model_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.json is on the hub, which tests do not call."""

    def missing(model: ModelConfig) -> Path:
        raise ModelNotFound(model.id)

    monkeypatch.setattr("deployments.commands.check_config.engine_faults", lambda arguments: ())
    monkeypatch.setattr("deployments.bundles.fetch_model_config", missing)


def manifests(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def spec(name: str) -> Manifest:
    [service] = manifests(FOLDER / f"{name}.yaml")
    found: Manifest = service["spec"]
    return found


def serve_config(spec: Manifest) -> Manifest:
    config: Manifest = yaml.safe_load(spec["serveConfigV2"])
    return config


def args(spec: Manifest) -> ServeConfig:
    [loray] = serve_config(spec)["applications"]
    return ServeConfig.model_validate(loray["args"])


def groups(spec: Manifest) -> list[Manifest]:
    cluster = spec["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: Manifest) -> Manifest:
    [found] = group["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_manifests_have_the_schema_of_their_kind(path: Path) -> None:
    assert [fault for manifest in manifests(path) for fault in faults(manifest)] == []


def test_a_manifest_with_an_unknown_key_has_a_fault() -> None:
    [service] = manifests(FOLDER / "one-gpu.yaml")
    broken = copy.deepcopy(service)
    broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["numGpus"] = 1
    broken["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0] |= {
        "ports": [{"containerPort": "8000"}], "env": [{"name": 5}]
    }  # fmt: skip
    found = list(faults(broken))
    assert len(found) == 3
    assert any("numGpus" in fault for fault in found)


@pytest.mark.parametrize("name", SERVICES)
def test_the_serve_config_is_one_that_loray_serves(name: str) -> None:
    config = serve_config(spec(name))
    assert config_faults(config) == []
    for where in (config, config["applications"][0], config["applications"][0]["args"],
                  config["applications"][0]["args"]["engine"]["limits"],
                  config["applications"][0]["deployments"][1]["autoscaling_config"]):  # fmt: skip
        where["max_runing"] = 1
        assert config_faults(config) != [], where
        del where["max_runing"]


def test_the_command_reads_manifests(tmp_path: Path) -> None:
    whole = FOLDER / "two-gpus.yaml"
    assert CliRunner().invoke(app, ["check-config", str(whole)]).exit_code == 0
    broken = tmp_path / "broken.yaml"
    broken.write_text(whole.read_text("utf-8").replace("max_running: 256", "max_runing: 256"))
    done = CliRunner().invoke(app, ["check-config", str(broken)])
    assert (done.exit_code, "max_runing" in done.output) == (1, True)
    broken.write_text("kind: RayService\nspec: {}\n")
    assert CliRunner().invoke(app, ["check-config", str(broken)]).exit_code == 2


@pytest.mark.parametrize("name", SERVICES)
def test_replicas_fit_into_the_pods(name: str) -> None:
    [worker] = spec(name)["rayClusterConfig"]["workerGroupSpecs"]
    config = args(spec(name))
    limits = container(worker)["resources"]["limits"]
    needed = bundles(config)
    num_gpus = sum(bundle.get("GPU", 0) for bundle in needed)
    assert num_gpus == int(limits["nvidia.com/gpu"]) == config.engine.tensor_parallel
    deployments = serve_config(spec(name))["applications"][0]["deployments"]
    ingress, driver = (each for each in deployments)
    cpus = sum(bundle["CPU"] for bundle in needed)
    # All ingress replicas may be in the first pod.
    assert cpus + ingress["num_replicas"] * config.ingress_cpus <= float(limits["cpu"])
    scaling = driver["autoscaling_config"]
    assert scaling["min_replicas"] <= worker["minReplicas"] == worker["replicas"]
    assert scaling["max_replicas"] == worker["maxReplicas"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_exists(name: str) -> None:
    [secret] = manifests(FOLDER / "secrets.yaml")
    volume, *budgets = manifests(FOLDER / "base.yaml")
    for group in groups(spec(name)):
        template, ray = group["template"], container(group)
        references = [env["valueFrom"]["secretKeyRef"] for env in ray["env"] if "valueFrom" in env]
        assert all(ref["name"] == secret["metadata"]["name"] for ref in references)
        assert {ref["key"] for ref in references} <= secret["stringData"].keys()
        mounts = {mount["name"]: mount["mountPath"] for mount in ray["volumeMounts"]}
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert mounts.keys() == volumes.keys()
        claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
        assert claim == volume["metadata"]["name"]
        cache = Path(mounts["cache"])
        own = (args(spec(name)).engine.adapters.fetch.cache_dir, ModelConfig(id="").cache_dir)
        assert all(cache in Path(path.replace("~", "/home/loray")).parents for path in own)
        labels = template["metadata"]["labels"].items()
        assert (
            len([b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= labels]) == 1
        )
        assert {"livenessProbe", "readinessProbe"} <= ray.keys()
    names = {env["name"] for env in container(groups(spec(name))[1])["env"]}
    api = args(spec(name)).api
    assert {key.env for key in api.keys} | {api.admin_key.env if api.admin_key else None} <= names


@pytest.mark.parametrize("name", SERVICES)
def test_pods_run_the_image_as_its_user_and_end_late_enough(name: str) -> None:
    found = spec(name)
    assert found["rayClusterConfig"]["rayVersion"] == version("ray")
    [user] = [rest for word, rest in steps("gpu") if word == "USER"]
    for group in groups(found):
        assert container(group)["image"].endswith(f"/loray:{VERSION}")
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == int(user)
    assert found["rayClusterDeletionDelaySeconds"] > args(found).request_timeout_s


def test_pods_follow_the_load_and_the_head_may_restart() -> None:
    cluster = spec("autoscaling")["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    redis, server = manifests(FOLDER / "redis.yaml")
    options = cluster["gcsFaultToleranceOptions"]
    port = redis["spec"]["ports"][0]["port"]
    assert options["redisAddress"] == f"{redis['metadata']['name']}:{port}"
    [env] = server["spec"]["template"]["spec"]["containers"][0]["env"]
    assert options["redisPassword"]["valueFrom"] == env["valueFrom"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert redis["spec"]["selector"] == labels == server["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize(
    ("name", "preset"), zip(SERVICES, ["autoscaling", "one_gpu", "two_gpus"], strict=True)
)
def test_the_engine_is_that_of_the_preset(name: str, preset: str) -> None:
    text = (ROOT / f"configs/presets/{preset}.yaml").read_text("utf-8")
    engine = yaml.safe_load(text)["applications"][0]["args"]["engine"]
    assert args(spec(name)).engine == EngineConfig.model_validate(engine)
