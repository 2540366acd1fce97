import json
from pathlib import Path

import pytest

from configs.wire.templates import read_template

CONFIG = {"bos_token": "<s>", "add_eos_token": True, "pad_token": None, "chat_template": "x"}


def _tokens(folder: Path, config: dict[str, object], special: object = None) -> dict[str, str]:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if special is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return read_template(folder).special_tokens


def test_special_tokens_have_a_file_of_their_own(tmp_path: Path) -> None:
    """As transformers reads it: it counts unless the config lists the added tokens itself."""
    assert _tokens(tmp_path, CONFIG) == {"bos_token": "<s>"}
    special = {"bos_token": {"content": "<b>"}, "eos_token": "</s>"}
    assert _tokens(tmp_path, CONFIG, special) == {"bos_token": "<b>", "eos_token": "</s>"}
    assert _tokens(tmp_path, {**CONFIG, "added_tokens_decoder": {}}) == {"bos_token": "<s>"}


def test_special_tokens_may_have_names_of_their_own(tmp_path: Path) -> None:
    config = {**CONFIG, "sot_token": "<sot>", "extra_special_tokens": {"image": "<image>"}}
    assert _tokens(tmp_path, config) == {
        "bos_token": "<s>", "sot_token": "<sot>", "image": "<image>",
    }  # fmt: skip
    assert _tokens(tmp_path, {**CONFIG, "extra_special_tokens": ["<x>"]}) == {"bos_token": "<s>"}


def test_the_file_of_special_tokens_must_hold_an_object(tmp_path: Path) -> None:
    for broken in ("[1]", "{", "[" * 100_000):
        (tmp_path / "special_tokens_map.json").write_text(broken)
        with pytest.raises(ValueError, match=r"special_tokens_map|Expecting"):
            read_template(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "\ud800"},
        {"chat_template": [{"name": "\ud800", "template": "x"}]},
        {**CONFIG, "bos_token": "\ud800"},
    ],
)
def test_what_is_no_unicode_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    """Neither a request's prompt nor a message to another process can hold it."""
    with pytest.raises(ValueError, match="Unicode"):
        _tokens(tmp_path, config)
