import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from deployments.ingress.chat_templates.template import ChatTemplate, Conversation
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.text.tokenizer import Limit, ModelTokenizer, Slice
from tests.fakes import TALE, TEMPLATE, byte_level_tokenizer, token_id, write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def _chat(text: ModelTokenizer, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
    template = ChatTemplate(text.templates.text, text.templates.special_tokens)
    prompt = template.render(Conversation(messages))
    return prompt, asyncio.run(text.encode(prompt, add_special_tokens=False))


def test_raw_prompts_get_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    text = ModelTokenizer.load(str(tmp_path))
    plain = tokenizer.encode(TALE, add_special_tokens=False).ids
    assert asyncio.run(text.encode(TALE)) == [token_id(tokenizer, "<s>"), *plain]
    assert asyncio.run(text.encode(TALE, add_special_tokens=False)) == plain
    assert text.decode(asyncio.run(text.encode(TALE))) == TALE
    text.close()


def test_a_long_text_does_not_delay_others() -> None:
    """A tokenizer that kept the GIL would let the others run once or twice only.

    The system may pause either thread for any time, but not in every attempt.
    """
    text = ModelTokenizer(byte_level_tokenizer())
    long = "🦊x" * 200_000

    async def turns() -> int:
        """How many there were, none if another text had to wait."""
        encoding = asyncio.ensure_future(text.encode(long))
        others = asyncio.ensure_future(text.encode("y" * 2000))
        count = 0
        while not encoding.done():
            await asyncio.sleep(0)
            count += 1
        has_own_thread = others.done()
        await others
        assert len(await encoding) > 200_000
        return count if has_own_thread else 0

    assert any(asyncio.run(turns()) > 100 for _ in range(20))
    text.close()


def test_a_long_chat_is_the_same(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    prompt, ids = _chat(
        ModelTokenizer.load(str(tmp_path)), [{"role": "user", "content": "hi " * 50_000}]
    )
    assert prompt == f"<s><|user|>{'hi ' * 50_000}</s>\n<|assistant|>"
    assert ids == tokenizer.encode(prompt, add_special_tokens=False).ids


def test_a_chat_has_its_special_tokens_once(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    prompt, ids = _chat(ModelTokenizer.load(str(tmp_path)), MESSAGES)
    assert prompt == "<s><|user|>hi</s>\n<|assistant|>"
    assert ids.count(token_id(tokenizer, "<s>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = ModelTokenizer.load(str(tmp_path))
    assert len(asyncio.run(text.encode("x y z " * 9))) > 40
    assert len(asyncio.run(text.encode("x"))) == 2


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_templates_are_found_in_all_files(tmp_path: Path, form: str) -> None:
    write_tokenizer(tmp_path, template=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
        config["chat_template"] = "not this one"
    elif form == "named":
        config["chat_template"] = [
            {"name": "tool_use", "template": "not this one"},
            {"name": "default", "template": TEMPLATE},
        ]
    else:
        config["chat_template"] = TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert (
        _chat(ModelTokenizer.load(str(tmp_path)), MESSAGES)[0] == "<s><|user|>hi</s>\n<|assistant|>"
    )


def test_templates_know_special_tokens_of_all_files(tmp_path: Path) -> None:
    """special_tokens_map.json, and named ones; they are one token each and have no text."""
    write_tokenizer(tmp_path)
    template = "{{ bos_token }}{{ image_token }}{{ messages[0].content }}{{ eos_token }}"
    config = {"chat_template": template, "extra_special_tokens": {"image_token": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(own))
    text = ModelTokenizer.load(str(tmp_path))
    prompt, ids = _chat(text, [{"role": "user", "content": "fox"}])
    assert prompt == "<s><think>fox</s>"
    assert text.decode(ids) == "fox"
    assert [text.token_text(id) for id in (ids[0], ids[1], ids[-1])] == ["<s>", "<think>", "</s>"]


def test_without_a_fast_tokenizer_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fast tokenizer is required"):
        ModelTokenizer.load(str(tmp_path))


def test_token_bytes_add_up_to_the_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    text = ModelTokenizer(tokenizer)
    ids = tokenizer.encode(TALE, add_special_tokens=False).ids
    assert b"".join(text.token_bytes(id) for id in ids) == TALE.encode()
    assert text.token_text(token_id(tokenizer, "</s>")) == "</s>"
    assert text.token_text(token_id(tokenizer, "<think>")) == "<think>"
    assert text.token_bytes(10**6) == b""


def test_slices_point_into_the_text(tmp_path: Path) -> None:
    text = ModelTokenizer(byte_level_tokenizer())
    slices = asyncio.run(text.slices("é END!", add_special_tokens=False))
    assert [piece.text for piece in slices] == ["é", " END", "!"]
    assert all("é END!"[piece.start : piece.stop] == piece.text for piece in slices)
    assert isinstance(slices[0], Slice)


def test_invalid_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        asyncio.run(ModelTokenizer(byte_level_tokenizer()).encode("half \ud83d a pair"))


def test_a_tokenizer_without_decoder_still_decodes() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.decoder = None
    assert ModelTokenizer(tokenizer).token_bytes(token_id(tokenizer, "</s>")) == b"</s>"


def test_the_ingress_loads_no_tensors() -> None:
    program = (
        "import sys, deployments.ingress.app; "
        "heavy = {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def _refused(size: str) -> RequestError:
    return invalid(f"it has {size}")


def test_texts_that_cannot_fit_are_refused_without_encoding() -> None:
    """The longest text that may fit is read; one character more is not."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("=" * 40, normalized=False)])
    text = ModelTokenizer(tokenizer)
    assert (
        asyncio.run(text.encode("=" * 400, False, Limit(10, _refused)))
        == [token_id(tokenizer, "=" * 40)] * 10
    )
    with pytest.raises(RequestError, match="it has 401 characters"):
        asyncio.run(text.encode("=" * 401, False, Limit(10, _refused)))
    text.close()


def test_the_start_of_a_long_text_is_encoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("=" * 20_000, normalized=False)])
    text = ModelTokenizer(tokenizer)
    read: list[int] = []
    encode = ModelTokenizer._encode

    def counting(self: ModelTokenizer, given: str, special: bool) -> list[int]:
        read.append(len(given))
        return encode(self, given, special)

    monkeypatch.setattr(ModelTokenizer, "_encode", counting)
    with pytest.raises(RequestError, match=r"it has more than \d+ tokens"):
        asyncio.run(text.encode("xy" * 300_000, False, Limit(100, _refused)))
    assert read == [100_000]
    assert len(asyncio.run(text.encode("=" * 600_000, False, Limit(100, _refused)))) == 30
    assert read == [100_000, 100_000, 600_000]
    text.close()
