"""LiteLLM's proxy before the demo, as its users run it: `make test-gateways`.

Skipped where its environment is not; it pins older versions of packages that LoRay uses.
"""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from configs.api import ApiConfig, KeyConfig, SecretConfig
from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.house import ROOT
from tests.ports import free_port
from tests.served import demo_app, demo_config, served

LITELLM = ROOT / ".venv-gateways/bin/litellm"
PAGE = (ROOT / "docs/gateways.md").read_text("utf-8")
QUESTION = "What is the capital of France?"
ANSWERS = {
    "loray-demo": "The capital of France is Paris.",
    "pirate": "Arr! The capital of France be Paris, matey!",
    "french": "La capitale de la France est Paris.",
    "shout": "THE CAPITAL OF FRANCE IS PARIS!",
}
ANSWERS["captain"] = ANSWERS["pirate"]  # another name of that adapter
ADMIN = "the-operators-key"
KEY = "the-key-that-litellm-has"
MASTER = "sk-" + "0123456789abcdef" * 4
PATIENCE_S = 600.0

pytestmark = pytest.mark.skipif(not LITELLM.is_file(), reason="needs make test-gateways")


@pytest.fixture(scope="module")
def loray() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAY_API_KEY", KEY)
        patch.setenv("LORAY_ADMIN_KEY", ADMIN)
        api = ApiConfig(
            keys=(KeyConfig(name="litellm", env="LORAY_API_KEY"),),
            admin_key=SecretConfig(env="LORAY_ADMIN_KEY"),
        )
        settings = IngressSettings(default_source=AdapterSource.LOCAL, api=api)
        with served(demo_app(demo_config(), settings)) as url:
            name = {"lora_name": "captain", "lora_path": "pirate"}
            headers = {"authorization": f"Bearer {ADMIN}"}
            given = httpx.post(f"{url}/v1/load_lora_adapter", json=name, headers=headers)
            assert given.status_code == 200, given.text
            yield url


@pytest.fixture(scope="module")
def proxy(loray: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The proxy with the config of docs/gateways.md."""
    [text] = [part for part in PAGE.split("```") if part.startswith("yaml\nmodel_list:")]
    config = tmp_path_factory.mktemp("litellm") / "litellm.yaml"
    config.write_text(text.removeprefix("yaml\n").replace("http://127.0.0.1:8000", loray), "utf-8")
    assert (
        loray
        in yaml.safe_load(config.read_text("utf-8"))["model_list"][0]["litellm_params"]["api_base"]
    )
    port, log = free_port(), config.with_name("log")
    command = [str(LITELLM), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "LORAY_API_KEY": KEY, "LITELLM_MASTER_KEY": MASTER}
    env.pop("PYTHONPATH", None)
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=env, cwd=config.parent, stdout=output, stderr=output
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        while not answers(f"{url}/health/liveliness"):
            assert process.poll() is None, log.read_text("utf-8")
            threading.Event().wait(1)
        yield url
        process.terminate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def client(proxy: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy}/v1", api_key=MASTER, timeout=PATIENCE_S)


@pytest.mark.parametrize("model", ANSWERS)
def test_every_model_answers_whole_and_streamed(proxy: str, model: str) -> None:
    with client(proxy) as calls:
        messages: openai.types.chat.ChatCompletionUserMessageParam = {
            "role": "user",
            "content": QUESTION,
        }
        whole = calls.chat.completions.create(model=model, messages=[messages], temperature=0)
        assert (whole.choices[0].message.content or "").strip() == ANSWERS[model]
        assert whole.usage is not None
        assert whole.usage.completion_tokens > 3
        parts = list(calls.chat.completions.create(
            model=model, messages=[messages], temperature=0, stream=True,
            stream_options={"include_usage": True},
        ))  # fmt: skip
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text.strip() == ANSWERS[model]
        assert parts[-1].usage is not None
        text = (
            calls.completions.create(model=model, prompt=QUESTION, max_tokens=40, temperature=0)
            .choices[0]
            .text
        )
        assert text.strip() == ANSWERS[model]


def test_the_library_answers_too(loray: str) -> None:
    code = (
        "import litellm\n"
        f"message = {{'role': 'user', 'content': {QUESTION!r}}}\n"
        "reply = litellm.completion(model='hosted_vllm/pirate', messages=[message], "
        f"api_base='{loray}/v1', api_key={KEY!r}, temperature=0)\n"
        "print(reply.choices[0].message.content)"
    )
    command = [str(LITELLM.with_name("python")), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.strip().splitlines()[-1].strip() == ANSWERS["pirate"]


def test_refusals_keep_their_status(proxy: str) -> None:
    with client(proxy) as calls:
        with pytest.raises(openai.NotFoundError, match="no-such-adapter"):
            calls.completions.create(model="no-such-adapter", prompt=QUESTION)
        with pytest.raises(openai.BadRequestError):
            calls.completions.create(model="pirate", prompt=QUESTION, temperature=-3)


def test_a_load_over_all_adapters_is_answered_and_seen_in_the_metrics(
    proxy: str, loray: str
) -> None:
    names = [name for name in ANSWERS for _ in range(20)]

    async def load() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{proxy}/v1", api_key=MASTER, timeout=PATIENCE_S
        ) as calls:
            replies = await asyncio.gather(*(
                calls.completions.create(model=name, prompt=QUESTION, max_tokens=40, temperature=0)
                for name in names
            ))  # fmt: skip
        return [reply.choices[0].text.strip() for reply in replies]

    assert asyncio.run(load()) == [ANSWERS[name] for name in names]
    text = httpx.get(f"{loray}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    labels = found["vllm:lora_requests_info"].samples[0].labels
    assert set(labels["running_lora_adapters"].split(",")) == ANSWERS.keys() - {"loray-demo"}
    assert labels["max_lora"] == "16"
    assert found["vllm:num_requests_running"].samples[0].value == 0
    assert found["vllm:generation_tokens"].samples[0].value > 100 * 3
