"""The tokenizer of grammars knows the tokens that the ingress knows."""

import json
from pathlib import Path

import pytest

from configs.grammars import matcher_of, tokenizer_of
from tests.fakes import write_tokenizer

pytest.importorskip("llguidance")

EXTRA = "<|extra|>"


def test_tokens_that_only_the_tokenizers_config_names(tmp_path: Path) -> None:
    first = write_tokenizer(tmp_path).get_vocab_size()
    decoder = {str(first): {"content": EXTRA, "special": True}, "0": {"content": "<s>"}}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": decoder}))
    matcher = matcher_of(tokenizer_of(tmp_path, 400), f"start: {EXTRA}")
    assert matcher.consume_token(first)
    assert matcher.is_accepting()


def test_a_folder_without_a_fast_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json: save one"):
        tokenizer_of(tmp_path, 400)
