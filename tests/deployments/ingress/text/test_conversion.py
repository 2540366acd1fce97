"""The files beside tokenizer.json have the same effect as in AutoTokenizer."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deployments.ingress.http.errors import RequestError
from deployments.ingress.text.conversion import Converted, convert, converted
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.text.test_tokenizer_classes import assert_alike
from tests.deployments.ingress.text.tokenizer_kinds import KINDS, TEXTS


def _folder(folder: Path, kind: str, config: dict[str, Any], **files: object) -> Path:
    """A folder with this tokenizer.json and tokenizer_config.json, and others by their stems."""
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    for stem, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def _token(content: str, **how: bool) -> dict[str, object]:
    flags = dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word"], False)
    return {"content": content, "special": False, **flags, **how}


def _checked(folder: Path) -> Converted:
    """What the folder is converted to, once it was found to be as AutoTokenizer has it."""
    found = converted(str(folder), trust_remote_code=False)
    assert found.refusal == ""
    assert_alike(folder, found)
    return found


def test_added_tokens_of_the_config_are_tokens(tmp_path: Path) -> None:
    size = KINDS["byte-level"]().get_vocab_size()
    added = {str(size): _token("<mine>"), str(size + 1): _token("<quiet>", special=True)}
    config = {"added_tokens_decoder": added, "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = _checked(_folder(tmp_path, "byte-level", config)).tokenizer()
    assert tokenizer.token_to_id("<mine>") == size
    assert ModelTokenizer(tokenizer).decode([size, size + 1]) == "<mine>"


@pytest.mark.parametrize("adds", [True, False])
def test_the_config_decides_about_the_first_space(tmp_path: Path, adds: bool) -> None:
    config = {"add_prefix_space": adds, "tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}
    tokenizer = _checked(_folder(tmp_path, "byte-level", config)).tokenizer()
    assert tokenizer.decode(tokenizer.encode("fox").ids) == (" fox" if adds else "fox")


def test_special_tokens_map_is_read(tmp_path: Path) -> None:
    own = {"bos_token": "<s>", "eos_token": _token("</s>")}
    found = _checked(_folder(tmp_path, "byte-level", {}, special_tokens_map=own))
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_named_extra_tokens_are_read(tmp_path: Path) -> None:
    extra = {"image_token": "<think>", "boi_token": "<boi>"}
    found = _checked(_folder(tmp_path, "byte-level", {"extra_special_tokens": extra}))
    assert found.special_tokens == extra


def test_an_end_token_that_is_not_special_is_not_visible(tmp_path: Path) -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.add_tokens([AddedToken("<|end|>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    ids = tokenizer.encode("fox<|end|>", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "fox<|end|>"
    assert ModelTokenizer(_checked(tmp_path).tokenizer()).decode(ids) == "fox"


def test_split_special_tokens(tmp_path: Path) -> None:
    config = {"split_special_tokens": True, "eos_token": "</s>"}
    tokenizer = _checked(_folder(tmp_path, "byte-level", config)).tokenizer()
    assert tokenizer.token_to_id("</s>") not in tokenizer.encode("fox</s>").ids


def test_the_config_decides_about_the_clean_up(tmp_path: Path) -> None:
    config = {"clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    assert _checked(_folder(tmp_path, "word-piece", config)).cleans_up
    assert not _checked(_folder(tmp_path, "byte-level", config)).cleans_up


def test_a_tokenizer_in_python_is_refused_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "byte-level", {"tokenizer_class": "ByT5Tokenizer"})
    with pytest.raises(ValueError, match=r"ByT5Tokenizer works in Python; a fast tokenizer is"):
        convert(folder)


def test_a_class_that_decodes_in_python_is_refused_by_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "byte-level", {"tokenizer_class": "ParakeetTokenizer"})
    with pytest.raises(ValueError, match="ParakeetTokenizer has a _decode of its own"):
        convert(folder)


def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        convert(tmp_path)


def test_other_files_than_tokenizer_json_need_a_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"without tokenizer.json needs the sentencepiece package"):
        convert(tmp_path)


def test_code_that_is_not_trusted_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    with pytest.raises(ValueError, match="trust_remote_code"):
        convert(_folder(tmp_path, "byte-level", config))
    assert not ran.exists()


def test_prompts_that_a_class_encodes_by_other_rules_are_refused(tmp_path: Path) -> None:
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "<FILL_ME>"]
    tokenizer = KINDS["llama"]()
    tokenizer.add_special_tokens(names)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = {"tokenizer_class": "CodeLlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = ModelTokenizer.load(str(tmp_path))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert asyncio.run(text.encode("the fox")) == theirs("the fox").input_ids
    with pytest.raises(RequestError, match="<FILL_ME>"):
        asyncio.run(text.encode("def <FILL_ME> end"))


@pytest.mark.parametrize("name", ["LlamaTokenizer", "T5Tokenizer", "GemmaTokenizer"])
def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path, name: str) -> None:
    """Without tokenizer.json: transformers converts it, where it finds sentencepiece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4), model_writer=model, vocab_size=320, byte_fallback=True,
        model_type="unigram" if name == "T5Tokenizer" else "bpe", minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    _checked(tmp_path)
