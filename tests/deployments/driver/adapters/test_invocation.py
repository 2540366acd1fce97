"""What the driver reads of an activated adapter."""

import json
from pathlib import Path

import pytest

from configs.wire.adapters import AdapterError, AdapterRefusal
from deployments.driver.adapters.invocation import invocation_of


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([5, 6, 5], (5, 6, 5)),
        (None, ()),
        ([], ()),
        ([1.5], ()),
        (["a"], ()),
        ([True], ()),
        ("56", ()),
        ({"a": 1}, ()),
        ([1] * 257, ()),
        ([-1, 2**63 - 1], (-1, 2**63 - 1)),
        # No message holds them: the loop, which tells the ranks, would end.
        ([2**63], ()),
        ([2**70], ()),
    ],
)
def test_the_tokens_or_nothing(tmp_path: Path, value: object, expected: tuple[int, ...]) -> None:
    fields = {"peft_type": "LORA", "alora_invocation_tokens": value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert invocation_of(tmp_path) == expected


@pytest.mark.parametrize("text", ["[]", "{", "3", "[" * 100_000])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    assert invocation_of(tmp_path) == ()


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    # Without its invocation the adapter would be active from the first token on.
    with pytest.raises(AdapterError, match="cannot be read") as refused:
        invocation_of(tmp_path)
    assert refused.value.refusal is AdapterRefusal.UNAVAILABLE
