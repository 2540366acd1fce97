import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deployments.ingress.chat import Conversation
from deployments.ingress.errors import RequestError
from deployments.ingress.text import Slice, Text
from tests.fakes import TALE, TEMPLATE, byte_level_tokenizer, token_id, write_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def _chat(text: Text, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
    template = text.compiled[text.templates.text]
    prompt = template.render(Conversation(messages))
    return prompt, asyncio.run(text.encode(prompt, add_special_tokens=False))


def test_raw_prompts_get_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    text = Text.load(str(tmp_path))
    plain = tokenizer.encode(TALE, add_special_tokens=False).ids
    assert asyncio.run(text.encode(TALE)) == [token_id(tokenizer, "<s>"), *plain]
    assert asyncio.run(text.encode(TALE, add_special_tokens=False)) == plain
    assert text.decode(asyncio.run(text.encode(TALE))) == TALE
    text.close()


def test_others_go_on_while_a_long_text_is_encoded() -> None:
    """A tokenizer that kept the interpreter to itself would leave them one turn or two.

    The system may let either thread stand still for as long as it likes, but not each time.
    """
    text = Text(byte_level_tokenizer())
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
    prompt, ids = _chat(Text.load(str(tmp_path)), [{"role": "user", "content": "hi " * 50_000}])
    assert prompt == f"<s><|user|>{'hi ' * 50_000}</s>\n<|assistant|>"
    assert ids == tokenizer.encode(prompt, add_special_tokens=False).ids


def test_a_chat_has_its_special_tokens_once(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    prompt, ids = _chat(Text.load(str(tmp_path)), MESSAGES)
    assert prompt == "<s><|user|>hi</s>\n<|assistant|>"
    assert ids.count(token_id(tokenizer, "<s>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text.load(str(tmp_path))
    assert len(asyncio.run(text.encode("x y z " * 9))) > 40
    assert len(asyncio.run(text.encode("x"))) == 2


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_templates_are_found_in_all_their_places(tmp_path: Path, form: str) -> None:
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
    assert _chat(Text.load(str(tmp_path)), MESSAGES)[0] == "<s><|user|>hi</s>\n<|assistant|>"


def test_without_a_fast_tokenizer_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fast tokenizer is required"):
        Text.load(str(tmp_path))


def test_token_bytes_add_up_to_the_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    text = Text(tokenizer)
    ids = tokenizer.encode(TALE, add_special_tokens=False).ids
    assert b"".join(text.token_bytes(id) for id in ids) == TALE.encode()
    assert text.token_text(token_id(tokenizer, "</s>")) == "</s>"
    assert text.token_text(token_id(tokenizer, "<think>")) == "<think>"
    assert text.token_bytes(10**6) == b""


def test_slices_point_into_the_text(tmp_path: Path) -> None:
    text = Text(byte_level_tokenizer())
    slices = asyncio.run(text.slices("é END!", add_special_tokens=False))
    assert [piece.text for piece in slices] == ["é", " END", "!"]
    assert all("é END!"[piece.start : piece.stop] == piece.text for piece in slices)
    assert isinstance(slices[0], Slice)


def test_text_that_has_no_encoding_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        asyncio.run(Text(byte_level_tokenizer()).encode("half \ud83d a pair"))


def test_a_tokenizer_without_decoder_still_decodes() -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.decoder = None
    assert Text(tokenizer).token_bytes(token_id(tokenizer, "</s>")) == b"</s>"


def test_the_ingress_loads_no_tensors() -> None:
    program = (
        "import sys, deployments.ingress.api; "
        "heavy = {'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
