"""The tokens of a batch, from results of each route."""

from typing import Any

import msgspec
import pytest

from deployments.ingress.batches.usage import BatchUsage


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 30, "completion_tokens": 8, "total_tokens": 38,
         "prompt_tokens_details": {"cached_tokens": 20},
         "completion_tokens_details": {"reasoning_tokens": 5}},
        {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
         "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 38},
        {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 20,
         "output_tokens": 8, "output_tokens_details": {"thinking_tokens": 5}},
    ],
    ids=["chat", "responses", "messages"],
)  # fmt: skip
def test_each_route_reports_the_same_tokens(usage: dict[str, Any]) -> None:
    found = BatchUsage()
    for _ in range(2):
        found.add(msgspec.json.encode({"response": {"body": {"usage": usage}}}))
    assert msgspec.to_builtins(found) == {
        "input_tokens": 60,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": 16,
        "output_tokens_details": {"reasoning_tokens": 10},
        "total_tokens": 76,
    }


def test_an_embedding_has_input_alone() -> None:
    found = BatchUsage()
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    found.add(msgspec.json.encode({"response": {"body": {"usage": usage}}}))
    assert (found.input_tokens, found.output_tokens, found.total_tokens) == (7, 0, 7)
