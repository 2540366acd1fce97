"""A driver's reply about an adapter's chat template, by caller."""

import json
from pathlib import Path

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.templates import TemplateSource
from deployments.contract import ErrorKind, Failed
from deployments.driver.engine import DriverEngine
from tests.deployments.driver.fake_ranks import FakeGroup
from tests.deployments.driver.routing.stories import play


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


def write(root: Path, name: str, file: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (root / "adapters" / name / file).write_text(text)


def test_templates_are_found_where_tokenizers_save_them(root: Path) -> None:
    config = {"chat_template": "from config", "bos_token": {"content": "<s>"}, "pad_token": None}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    write(root, "red", "tokenizer_config.json", config)
    write(root, "blue", "tokenizer_config.json", config)
    write(root, "blue", "chat_template.jinja", "from file")
    write(root, "a0", "tokenizer_config.json", {"chat_template": named})
    write(root, "a1", "tokenizer_config.json", "{half")
    write(root, "a2", "tokenizer_config.json", {"chat_template": 7})
    write(root, "a4", "tokenizer_config.json", "[" * 100_000)
    write(root, "a5", "tokenizer_config.json", {"chat_template": [{"name": [], "template": "x"}]})
    write(root, "a6", "chat_template.jinja", "from file")
    (root / "adapters" / "a6" / "additional_chat_templates").mkdir()
    write(root, "a6", "additional_chat_templates/tool_use.jinja", "tools")
    bos = {"bos_token": "<s>"}
    expected = {
        "red": TemplateSource("from config", bos),
        "blue": TemplateSource("from file", bos),
        "a0": TemplateSource("named", {}, {"tool_use": "no"}),
        "a6": TemplateSource("from file", {}, {"tool_use": "tools"}),
        "a3": TemplateSource(),
    }

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        for name, template in expected.items():
            assert await engine.chat_template(local(name), None) == template
        kinds = []
        for name in ("a1", "a2", "a4", "a5", "missing"):
            answer = await engine.chat_template(local(name), None)
            assert isinstance(answer, Failed)
            kinds.append(answer.kind)
        unsupported = ErrorKind.ADAPTER_UNSUPPORTED
        assert kinds == [*[unsupported] * 4, ErrorKind.ADAPTER_NOT_FOUND]

    play(root, story)
