"""`loray check-config` finds what would be refused, and nothing else."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.cli import app

Edit = Callable[[dict[str, Any]], None]


def check(path: Path) -> Result:
    return CliRunner().invoke(app, ["check-config", str(path)])


def served(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]
    return found


def driver(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = served(config)["deployments"][1]
    return found


def user(given: Any) -> Edit:
    return lambda config: driver(config).update(user_config=given)


def scaling(**given: Any) -> Edit:
    return lambda config: driver(config).update(autoscaling_config=given)


def policy(**targets: Any) -> Edit:
    found = {"policy_function": "deployments.autoscaling:LoadPolicy", "policy_kwargs": targets}
    return scaling(policy=found)


def model(name: Any) -> Edit:
    return lambda config: served(config)["args"]["engine"]["model"].update(id=name)


def adapters(**given: Any) -> Edit:
    return lambda config: served(config)["args"]["engine"]["adapters"].update(given)


def several(config: dict[str, Any]) -> None:
    """Two bases of the demo, instead of one."""
    found = served(config)
    models = {name: deepcopy(found["args"]) for name in ("small", "large")}
    for name, args in models.items():
        args["engine"]["model"]["name"] = name
    found["import_path"] = "deployments.app:build_bases"
    found["args"] = {"models": models, "ingress_cpus": 0.5}
    found["deployments"] = [
        {"name": "Ingress"},
        {"name": "Driver-large", "user_config": {"pinned_adapters": ["pirate"]}},
    ]


def typo_of_several(config: dict[str, Any]) -> None:
    several(config)
    found = served(config)
    found["args"]["models"]["v1"] = found["args"]["models"].pop("small")
    found["deployments"][1]["user_config"] = {"pined": []}
    found["deployments"].append({"name": "Driver"})


def with_batches(config: dict[str, Any]) -> None:
    served(config)["args"]["batches"] = {"storage": "/tmp/files"}
    served(config)["deployments"].append({"name": "Batches", "max_ongoing_requests": 5})


GOOD: dict[str, Edit] = {
    "several bases": several,
    "as it is": lambda config: None,
    "settings of the driver": user(
        {"pinned_adapters": ["pirate"], "names": {"x": "local:shout"}, "max_step_tokens": 256,
         "adapters": {"pirate": {"weight": 2}}}
    ),
    "a policy of autoscaling": policy(queue_seconds=0.1),
    "an adapter of the hub": user({"pinned_adapters": ["hub:acme/sql@v2"]}),
    "a runner of batches": with_batches,
    "another application": lambda config: config["applications"].append(
        {"name": "other", "route_prefix": "/other", "import_path": "other:app", "args": {"x": 1}}
    ),
}  # fmt: skip

BAD: dict[str, tuple[Edit, list[str]]] = {
    "faults of several bases": (
        typo_of_several,
        ["`v1` is the name of a route", "Driver-large.user_config.pined", "there is no 'Driver'"],
    ),
    "an unknown key of args": (
        lambda config: served(config)["args"].update(engin={}), ["loray: args.engin: "]
    ),
    "two faults": (
        lambda config: served(config)["args"]["engine"]["limits"].update(
            max_running=0, max_qeued=1
        ),
        ["args.engine.limits.max_running", "args.engine.limits.max_qeued"],
    ),
    "a port that is none": (
        lambda config: config["http_options"].update(port=80_000), ["http_options.port: 80000"]
    ),
    "no such model": (model("/no/such/model"), ["args.engine.model.id", "/no/such/model"]),
    "a typo in user_config": (
        user({"pined_adapters": ["pirate"]}), ["Driver.user_config.pined_adapters"]
    ),
    "a pin that is not there": (
        user({"pinned_adapters": ["pirate", "nope"]}), ["pinned_adapters: adapter 'nope'"]
    ),
    "a limit that does not fit": (user({"max_step_tokens": 0}), ["max_step_tokens"]),
    "a step larger than the ranks' buffers": (
        user({"max_step_tokens": 513}), ["max_step_tokens (513) must not be more than", "(512)"]
    ),
    "a name that the base model has": (
        user({"names": {"loray-demo": "pirate"}}), ["names.loray-demo: it is the base model's"]
    ),
    "a name for nothing": (user({"names": {"x": " "}}), ["names no adapter"]),
    "a deployment that is none": (
        lambda config: driver(config).update(name="Divers"), ["there is no 'Divers'"]
    ),
    "settings of the ingress": (
        lambda config: served(config)["deployments"][0].update(user_config={"max_queued": 1}),
        ["belongs to the Driver"],
    ),
    "a key of Serve's": (
        lambda config: config["http_options"].update(port="many"), ["http_options.port"]
    ),
    "more replicas than most": (
        scaling(min_replicas=5, max_replicas=4), ["max_replicas (4) must"]
    ),
    "a target of the policy that is none": (policy(queue_secs=1), ["Driver.", "'queue_secs'"]),
    "a target of the policy below 0": (policy(kv_use=-1), ["policy_kwargs.kv_use (-1) must"]),
    "a policy that is not there": (
        scaling(policy={"policy_function": "no_such_module:f"}),
        ["Driver.autoscaling_config: policy: No module named 'no_such_module'"],
    ),
    "a router that is not there": (
        lambda config: driver(config).update(
            request_router_config={"request_router_class": "no_such_router.Router"}
        ),
        ["names what cannot be imported: No module named 'no_such_router'"],
    ),
    "an option of Serve's deployment": (
        lambda config: driver(config).update(num_replics=2), ["num_replics"]
    ),
    "a key that another key is like": (
        lambda config: served(config)["args"]["engine"].update(limit={}, max_running=3),
        ["engine.limit: there is no such key; did you mean limits?",
         "engine.max_running: there is no such key; did you mean engine.limits.max_running?"],
    ),
    "a key under a name that another key is like": (
        user({"adapters": {"pirate": {"weigth": 1}}}),
        ["adapters.pirate.weigth: there is no such key; did you mean weight?"],
    ),
    "a key of Serve's that another key is like": (
        lambda config: config.update(http_option={}), ["did you mean http_options?"]
    ),
    "no application": (
        lambda config: config.update(applications=[]), ["applications: none has LoRay's"]
    ),
    "a builder that is none": (
        lambda config: served(config).update(import_path="deployments.app:biuld"),
        ["applications.loray.import_path: deployments.app:biuld is not deployments.app:build"],
    ),
    "a route that Serve refuses at its start": (
        lambda config: served(config).update(route_prefix="api"), ["route_prefix: api must be /"]
    ),
    "no route": (
        lambda config: served(config).update(route_prefix=None), ["route_prefix: null must be /"]
    ),
    "no front": (lambda config: config.update(proxy_location="Disabled"), ["means no HTTP"]),
    "a deployment without settings": (
        lambda config: served(config)["deployments"].append("Driver"),
        ["deployments: 'Driver' must be a mapping: {name: Driver}"],
    ),
    "a deployment that is there twice": (
        lambda config: served(config)["deployments"].append({"name": "Driver"}),
        ["deployments: Driver is there twice"],
    ),
    "a root that is not there": (adapters(local_roots=["/no/x"]), ["'/no/x' is not a folder"]),
    "a preload that is not there": (
        adapters(preload=["pirate", "nope"]), ["engine.adapters.preload: adapter 'nope'"]
    ),
    "a catalogue that is not there": (
        adapters(catalogue={"location": "/no/such"}), ["catalogue.location: /no/such is neither"]
    ),
    "a name of what is not there": (
        user({"names": {"x": "nope"}}), ["user_config.names: adapter 'nope'"]
    ),
    "a revision of a folder": (
        lambda config: served(config)["args"]["engine"]["model"].update(revision="main"),
        ["engine.model.revision: ", "which has no revisions"],
    ),
    "a revision of a folder of heads": (
        lambda config: served(config)["args"]["engine"]["speculation"].update(revision="v1"),
        ["engine.speculation.revision: configs/demo/heads is a folder"],
    ),
    "kernels that are not there": (
        lambda config: served(config)["args"]["engine"].update(kernel_cache="/no/such"),
        ["engine.kernel_cache: /no/such is no folder: fill one with `loray warm`"],
    ),
    "heads that are not there": (
        lambda config: served(config)["args"]["engine"]["speculation"].update(model="/no/such"),
        ["engine.speculation.model: model '/no/such'"],
    ),
    "rope and experts that the model lacks": (
        lambda config: served(config)["args"]["engine"].update(
            model={"id": "configs/demo/model", "dynamic_rope_length": 4096}, expert_parallel=True
        ),
        ["engine.model.dynamic_rope_length (4096) is for", "engine.expert_parallel: Llama"],
    ),
}  # fmt: skip


def written(folder: Path, edit: Edit) -> Path:
    config = yaml.safe_load(Path("serve_config.yaml").read_text())
    edit(config)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("name", GOOD)
def test_a_good_config(tmp_path: Path, name: str) -> None:
    done = check(written(tmp_path, GOOD[name]))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    edit, texts = BAD[name]
    done = check(written(tmp_path, edit))
    assert done.exit_code == 1, done.output
    for text in texts:
        assert text in done.output


def test_a_fault_of_args_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    edits = ("two faults", "a deployment that is none", "no such model", "a port that is none")

    def all_of_them(config: dict[str, Any]) -> None:
        user({"pinned_adapters": ["nope"], "weights": 3})(config)
        served(config)["deployments"].append({"name": "Driver"} | driver(config))
        for name in edits:
            BAD[name][0](config)

    done = check(written(tmp_path, all_of_them))
    wanted = ["Driver.user_config.weights", "pinned_adapters: adapter 'nope'"]
    for word in (*wanted, *(word for name in edits for word in BAD[name][1])):
        assert word in done.output, done.output


def test_a_model_without_weights_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path("configs/demo/model").glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    done = check(written(tmp_path, model(str(folder))))
    assert done.exit_code == 1
    assert f"{folder} has no weights: no *.safetensors" in done.output
    assert "engine.model.allow_pickle is not set" in done.output

    def dummy(config: dict[str, Any]) -> None:
        served(config)["args"]["engine"]["model"] = {"id": str(folder), "load_format": "dummy"}

    assert check(written(tmp_path, dummy)).exit_code == 0
    (folder / "tokenizer.json").unlink()
    assert f"{folder} has no tokenizer" in check(written(tmp_path, dummy)).output


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &x {b: 1}\nc: {<<: *x, b: 2}\nhttp_options:\n  port: 1\n  port: 2\n")
    done = check(path)
    assert done.exit_code == 2
    assert "line 5: the key `port` is there a second time" in done.output


@pytest.mark.parametrize("content", ["- a", "", "{", "a: *b", "a: 1\n---\nb: 1"])
def test_a_file_without_settings(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert check(path).exit_code == 2
    assert check(tmp_path / "absent.yaml").exit_code == 2


def test_every_preset_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = "deployments.commands.check_config.engine_faults"
    monkeypatch.setattr(fine, lambda arguments: ())  # their models are the hub's
    presets = list(Path("configs/presets").glob("*.yaml"))
    assert presets
    for path in presets:
        assert check(path).exit_code == 0, path
