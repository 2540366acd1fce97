"""`loray` against the real engine over HTTP: what users type, and what they read."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from configs.api import ApiConfig, SecretConfig
from configs.serve import ServeConfig
from configs.wire.adapters import AdapterSource
from deployments.cli import app
from deployments.ingress.generation.engine import IngressSettings
from tests.served import demo_app, demo_config, served

QUESTION = "What is the capital of France?"
ADMIN = "the-admins-own-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ADMIN_KEY", ADMIN)
        api = ApiConfig(admin_key=SecretConfig(env="TEST_ADMIN_KEY"))
        settings = IngressSettings(default_source=AdapterSource.LOCAL, api=api)
        with served(demo_app(demo_config(), settings)) as url:
            yield url


def loray(*arguments: str, said: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=said)


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from deployments.cli import app; import deployments.cli\n"
        "heavy = {'ray', 'torch', 'httpx', 'transformers', 'fastapi', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "deployments.cli.main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    for command in ("serve", "generate", "chat", "adapters", "check-adapter", "bench"):
        assert command in done.stdout


def test_generate_prints_the_answer(url: str) -> None:
    base = loray("generate", QUESTION, "--url", url)
    assert (base.stdout.strip(), base.exit_code) == ("The capital of France is Paris.", 0)
    pirate = loray("generate", QUESTION, "--adapter", "pirate", "--url", url)
    assert pirate.stdout.strip() == "Arr! The capital of France be Paris, matey!"


def test_the_address_can_come_from_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAY_URL", url)
    assert "Paris" in loray("generate", QUESTION).stdout


def test_a_refusal_prints_the_servers_message(url: str) -> None:
    unknown = loray("generate", QUESTION, "--adapter", "nobody", "--url", url)
    assert unknown.exit_code == 1
    assert "404" in unknown.stderr
    assert "nobody" in unknown.stderr
    assert "Traceback" not in unknown.output


def test_a_server_that_is_not_there(url: str) -> None:
    gone = loray("generate", QUESTION, "--url", "http://127.0.0.1:9")
    assert gone.exit_code == 1
    assert "--url" in gone.stderr


def test_a_chat_answers_each_message_and_changes_adapters(url: str) -> None:
    said = f"{QUESTION}\n/adapter pirate\n/clear\n{QUESTION}\n/exit\n"
    chat = loray("chat", "--temperature", "0", "--url", url, said=said)
    assert chat.exit_code == 0, chat.output
    assert "The capital of France is Paris." in chat.stdout, chat.stderr
    assert "Arr! The capital of France be Paris, matey!" in chat.stdout


def test_a_refused_message_does_not_end_a_chat(url: str) -> None:
    said = f"/adapter nobody\n{QUESTION}\n/adapter\n{QUESTION}\n"
    chat = loray("chat", "--temperature", "0", "--url", url, said=said)
    assert chat.exit_code == 0
    assert "nobody" in chat.stderr
    assert "The capital of France is Paris." in chat.stdout


def test_adapters_are_loaded_pinned_listed_and_unloaded(url: str) -> None:
    reply = ("--url", url, "--admin-key", ADMIN)
    assert "french: " in loray("adapters", "load", "french", "json", *reply).stdout
    assert "pinned" in loray("adapters", "pin", "french", *reply).stdout
    listing = loray("adapters", "list", *reply)
    assert listing.exit_code == 0, listing.output
    [row] = [line for line in listing.stdout.splitlines() if line.lstrip().startswith("french")]
    assert "yes" in row
    assert "pinned" not in loray("adapters", "unpin", "french", *reply).stdout
    assert loray("adapters", "unload", "french", "json", *reply).exit_code == 0
    rows = json.loads(loray("adapters", "list", "--json", *reply).stdout)["data"]
    assert {row["id"]: row["state"] for row in rows}["french"] in ("disk", "absent")


def test_control_needs_the_admin_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = loray("adapters", "list", "--url", url)
    assert refused.exit_code == 1
    assert "401" in refused.stderr
    assert "--admin-key" in refused.stderr
    monkeypatch.setenv("LORAY_ADMIN_KEY", ADMIN)
    assert loray("adapters", "list", "--url", url).exit_code == 0


def test_an_adapter_that_is_not_there_cannot_be_loaded(url: str) -> None:
    missing = loray("adapters", "load", "nobody", "--url", url, "--admin-key", ADMIN)
    assert missing.exit_code == 1
    assert "nobody" in missing.stderr


def test_an_adapter_is_checked_against_a_model() -> None:
    demo = "configs/demo/model"
    good = loray("check-adapter", "configs/demo/adapters/pirate", "--model", demo)
    assert good.exit_code == 0, good.output
    assert "served exactly" in good.stdout
    low = loray("check-adapter", "configs/demo/adapters/french", "--model", demo, "--max-rank", "2")
    assert low.exit_code == 1
    assert "max_rank 2" in low.stdout
    by_config = loray("check-adapter", "configs/demo/adapters/json", "--model", "serve_config.yaml")
    assert by_config.exit_code == 0, by_config.output


def test_every_reason_against_an_adapter_is_printed(tmp_path: Path) -> None:
    shutil.copytree("configs/demo/adapters/pirate", tmp_path / "pirate")
    config = tmp_path / "pirate" / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"use_dora": True, "use_qalora": True}
    config.write_text(json.dumps(fields))
    reply = loray("check-adapter", str(tmp_path / "pirate"), "--model", "configs/demo/model")
    assert reply.exit_code == 1
    assert [line[:4] for line in reply.stdout.splitlines()[1:]] == ["  - ", "  - "]
    assert "use_dora" in reply.stdout
    assert "use_qalora" in reply.stdout


@pytest.mark.parametrize("model", ["nowhere.yaml", "no/such/model/at/all"])
def test_a_check_against_no_model(model: str) -> None:
    refused = loray("check-adapter", "configs/demo/adapters/pirate", "--model", model)
    assert refused.exit_code == 2
    assert "Traceback" not in refused.output


def test_one_adapter_that_is_refused_does_not_stop_the_others(url: str) -> None:
    reply = ("--url", url, "--admin-key", ADMIN)
    done = loray("adapters", "load", "french", "nope", "json", *reply)
    assert done.exit_code == 1
    assert "french: " in done.stdout
    assert "json: " in done.stdout
    assert "1 of 3 were refused: nope" in done.stderr
    assert loray("adapters", "unload", "french", "json", *reply).exit_code == 0


def test_bench_fails_when_requests_do(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    cases = ("--cases", "base-c1", "--requests", "2", "--output-length", "4")
    done = loray("bench", "--url", url, "--names", "nope", *cases)
    assert done.exit_code == 1
    assert "warm: " in capfd.readouterr().err


def test_bench_passes_its_options_on(url: str) -> None:
    done = loray("bench", "--url", url, "--help-me-not")
    assert done.exit_code == 2  # the generator's own parser refuses it


def test_bench_without_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = loray("bench")
    assert missing.exit_code == 1
    assert "not installed" in missing.stderr


def test_a_config_without_a_yaml() -> None:
    model, pool = "configs/demo/model", "configs/demo/adapters"
    settings = ("--set", "engine.limits.max_running=7", "--set", "observability.log_format=json")
    arguments = ("serve", model, "--adapters", pool, "--tp", "2", "--port", "8123", *settings)
    printed = loray(*arguments, "--print-config")
    config = yaml.safe_load(printed.stdout)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8123}
    [described] = config["applications"]
    args = ServeConfig.model_validate(described["args"])
    assert args.engine.tensor_parallel == 2
    assert args.engine.limits.max_running == 7
    assert args.engine.adapters.local_roots == (str(Path(pool).resolve()),)
    assert args.engine.adapters.default_source is AdapterSource.LOCAL
    assert args.engine.model.id == str(Path(model).resolve())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.yaml",), "nowhere.yaml is not a file"),
        (("serve_config.yaml", "--tp", "2"), "write them into the yaml"),
        (("configs/demo/model", "--adapters", "nowhere"), "nowhere is not a folder"),
        (("configs/demo/model", "--set", "engine.limits"), "a.dotted.key=value"),
        (("configs/demo/model", "--set", "engine.model.id.x=1"), "id holds a value"),
        (("configs/demo/model", "--set", "engine.speed=9"), "engine.speed"),
        (("configs/demo/model", "--device", "tpu"), "engine.device"),
    ],
)
def test_faulty_settings_are_printed_before_anything_starts(
    arguments: tuple[str, ...], words: str
) -> None:
    refused = loray("serve", *arguments)
    assert refused.exit_code == 2
    assert words in refused.stderr
