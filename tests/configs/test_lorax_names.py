"""LoRAX's names: they work or say why not, and the page about them names settings that exist."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from configs.adapters import AdaptersConfig
from configs.engine import LimitsConfig
from configs.lorax_names import IDLE_ADAPTERS, IDLE_LIMITS, LIMITS
from configs.serve import ServeConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/migration.md").read_text("utf-8")
# Every flag of lorax-launcher.
FLAGS = """
model-id revision source adapter-id adapter-source default-adapter-source preloaded-adapter-ids
preloaded-adapter-source merge-adapter-weights predibase-api-token validation-workers sharded
num-shard quantize dtype trust-remote-code compile eager compile-max-batch-size compile-max-rank
compile-batch-size speculative-tokens speculation-max-batch-size max-concurrent-requests
max-best-of max-stop-sequences max-input-length max-total-tokens max-batch-prefill-tokens
max-batch-total-tokens waiting-served-ratio max-waiting-tokens eager-prefill chunked-prefill
prefix-caching max-active-adapters adapter-cycle-time-s adapter-memory-fraction hostname port
shard-uds-path master-addr master-port huggingface-hub-cache weights-cache-override
disable-custom-kernels disable-sgmv cuda-memory-fraction memory-wiggle-room backend embedding-dim
tokenizer-config-path json-output otlp-endpoint cors-allow-origin cors-allow-header
cors-allow-method cors-expose-header cors-allow-credentials watermark-gamma watermark-delta ngrok
ngrok-authtoken ngrok-edge env download-only
"""


def _exists(key: str) -> bool:
    """Whether `args` of a config has this key."""
    model: type[BaseModel] | None = ServeConfig
    for part in key.split("."):
        if model is None or part not in model.model_fields:
            return False
        kind = model.model_fields[part].annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return True


def test_every_setting_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:engine|api)\.[\w.]+)`", PAGE))
    assert len(named) > 20
    assert [key for key in sorted(named) if not _exists(key)] == []
    assert not _exists("engine.limits.no_such_thing")


def test_every_flag_has_its_line() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `--")]
    documented = {flag for row in rows for flag in re.findall(r"`--([\w-]+)`", row)}
    assert documented == set(FLAGS.split())


def test_the_pages_example_is_a_config() -> None:
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    [app] = yaml.safe_load(example)["applications"]
    limits = ServeConfig.model_validate(app["args"]).engine.limits
    assert (limits.max_input_tokens, limits.max_running, limits.max_queued) == (8000, 256, 256)


def test_limits_by_lorax_names() -> None:
    given = {
        "max_input_length": 1000, "max_total_tokens": 2000, "max_batch_prefill_tokens": 1050,
        "max_batch_total_tokens": 20000, "max_concurrent_requests": 300, "max_best_of": 3,
        "max_stop_sequences": 6,
    }  # fmt: skip
    assert LimitsConfig.model_validate(given) == LimitsConfig(
        max_input_tokens=1000, max_total_tokens=2000, max_step_tokens=1050, max_running=256,
        max_batch_total_tokens=20000, max_queued=44, max_best_of=3, max_stop_sequences=6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "running", "queued"),
    [
        ({"max_concurrent_requests": 100}, 100, 0),
        ({"max_concurrent_requests": 100, "max_running": 30}, 30, 70),
        ({"max_concurrent_requests": 1024}, 256, 768),
        ({}, 256, 768),
    ],
)
def test_running_and_waiting_together(given: dict[str, int], running: int, queued: int) -> None:
    limits = LimitsConfig.model_validate(given)
    assert (limits.max_running, limits.max_queued) == (running, queued)


@pytest.mark.parametrize("name", sorted(IDLE_LIMITS))
def test_what_has_no_effect_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loray.config"):
        assert LimitsConfig.model_validate({name: 7}) == LimitsConfig()
    [line] = caplog.messages
    assert line == f"{name} is accepted and has no effect: {IDLE_LIMITS[name]}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *[({theirs: 5, own: 5}, own) for theirs, own in LIMITS.items()],
        ({"max_concurrent_requests": 5, "max_queued": 5}, "LoRAX's name for it is `max_conc"),
        ({"max_input_length": 101, "max_total_tokens": 100}, "max_input_tokens .101. must not"),
        ({"max_concurrent_requests": 0}, "at least 1"),
        ({"max_concurrent_requests": "many"}, "max_queued"),
        ({"max_total_tokens": 100, "max_batch_total_tokens": 99}, "must fit the cache"),
        ({"max_total_tokns": 100}, "max_total_tokns"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LimitsConfig.model_validate(given)


def test_adapters_by_lorax_names(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "adapter_memory_fraction": 0.2, "max_active_adapters": 7, "adapter_cycle_time_s": 2,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING, "loray.config"):
        found = AdaptersConfig.model_validate(given)
    assert found == AdaptersConfig(memory_fraction=0.2, max_device_adapters=7)
    [line] = caplog.messages
    assert IDLE_ADAPTERS["adapter_cycle_time_s"] in line
    for wrong in ({"adapter_memory_fraction": 0}, {"max_active_adaptors": 7}):
        with pytest.raises(ValidationError, match=next(iter(wrong)).removeprefix("adapter_")):
            AdaptersConfig.model_validate(wrong)
