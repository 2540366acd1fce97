"""docs/adapters.md says of each kind what the code does with it."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

from configs.wire.adapters import AdapterError
from modeling.adapters.peft.config import HARMLESS_INITS, IGNORED, REFUSED
from modeling.adapters.peft.kinds import (
    CONVERTIBLE,
    MERGE,
    PROMPTS,
    RESIDUALS,
    ROUTERS,
    tuner_advice,
)
from tests.modeling.adapters.lora_files import parse_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "adapters.md").read_text("utf-8")
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def rows(head: str) -> list[list[str]]:
    """The rows of the table that begins so."""
    _, table = PAGE.split(f"{head}\n", 1)
    lines = table.split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


KINDS = rows("| kind | config | served | how | cost | oracle |")


@pytest.mark.parametrize("row", KINDS, ids=[row[0] for row in KINDS])
def test_a_kind_is_served_as_the_page_says(row: Sequence[str]) -> None:
    _, config, served, how, _, oracle = row
    assert how
    assert (ROOT / oracle).is_file()
    refused = False
    try:
        parse_config({**PLAIN, **json.loads(config.strip("`"))})
    except AdapterError:
        refused = True
    assert refused == (served == "no")


def test_the_page_has_every_init() -> None:
    found = {name: end for name, _, end in rows("| init | base weights | as saved |")}
    assert {f"`{name}`" for name in (*HARMLESS_INITS, *RESIDUALS)} < set(found)
    for name in HARMLESS_INITS:
        assert found[f"`{name}`"] == "served"
        parse_config({**PLAIN, "init_lora_weights": name})
    for name in RESIDUALS:
        assert found[f"`{name}`"].startswith("refused")
        with pytest.raises(AdapterError, match=name):
            parse_config({**PLAIN, "init_lora_weights": name})


def test_the_page_has_every_field_that_is_not_peft_s() -> None:
    peft_s = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    decided = dict.fromkeys(IGNORED, "ignored") | dict.fromkeys(REFUSED, "refused when set")
    expected = {f"`{name}`": said for name, said in decided.items() if name not in peft_s}
    assert {name: said for name, said in rows("| field | decision |")} == expected


def test_the_page_sorts_tuners_as_the_code() -> None:
    found = {what: set(re.findall(r"`([A-Z_0-9]+)`", names)) for what, names in TUNERS}
    assert list(found.values())[:3] == [CONVERTIBLE, PROMPTS, ROUTERS]
    others = list(found.values())[3]
    known = {each.value for each in PEFT_TYPE_TO_TUNER_MAPPING}
    assert others <= known
    assert all(tuner_advice(name) == MERGE for name in others)


TUNERS = rows("| what to do | peft_type |")
