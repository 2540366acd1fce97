"""docs/models.md: it is about the installed transformers, and says what the code's tables say."""

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.architectures.generic import PAGED_TYPES
from configs.architectures.select import MODEL_TYPES
from tests.modeling.models.tiny_causal import kinds
from tests.models_page import (
    GENERIC,
    OWN,
    PADDED,
    PAGE,
    REFUSED,
    TEXT,
    UNKNOWN,
    WRONG,
    Entry,
    Row,
    expected_heading,
    models_page,
    read_page,
    reason,
)

SAID = (Path(__file__).parents[3] / PAGE).read_text(encoding="utf-8")
ENTRIES = read_page(SAID)
ADVICE = "run `make sweep ARGS=--page`"


def test_it_is_about_the_installed_version() -> None:
    assert f"transformers {transformers.__version__} knows" in SAID, ADVICE
    found = {entry.kind: entry.architecture for entry in ENTRIES}
    assert found == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ADVICE
    assert len(ENTRIES) == len(found)


def test_every_paged_type_is_on_it_as_such() -> None:
    assert {e.kind for e in ENTRIES if e.heading == GENERIC} == PAGED_TYPES, ADVICE
    assert {e.kind for e in ENTRIES if e.heading == OWN} >= {*MODEL_TYPES.values()} - {"solar"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind)
def test_the_tables_say_the_same(entry: Entry) -> None:
    if entry.heading in (OWN, GENERIC, TEXT, PADDED):
        assert entry.heading == expected_heading(entry.kind, entry.architecture), ADVICE
    if entry.heading == PADDED:
        assert entry.why == reason(entry.kind, entry.architecture), ADVICE
    if entry.heading in (REFUSED, UNKNOWN):
        assert entry.why


def test_nothing_is_wrong() -> None:
    assert [e for e in ENTRIES if e.heading == WRONG] == []
    assert {entry.heading for entry in ENTRIES} == {OWN, GENERIC, TEXT, PADDED, REFUSED, UNKNOWN}


def test_a_page_is_read_as_it_was_written() -> None:
    rows = [
        Row("llama", "exact", "paged", "", ("q_proj", "k_proj")),
        Row("gemma2", "exact", "paged", "", ("q_proj",)),
        Row("bloom", "exact", "padded", "", ("dense",)),
        Row("mamba", "refused", "", "ValueError: it keeps | a state; known: others", ()),
        Row("olmo", "wrong", "paged", "1 rank 3", ("q_proj",)),
    ]
    assert set(kinds()) >= {row.kind for row in rows}
    found = {e.kind: (e.heading, e.why, e.targets) for e in read_page(models_page(rows))}
    assert found == {
        "llama": (OWN, "", "`q_proj`, `k_proj`"),
        "gemma2": (GENERIC, "", "`q_proj`"),
        "bloom": (PADDED, reason("bloom", "BloomForCausalLM"), "`dense`"),
        "mamba": (REFUSED, "it keeps / a state", ""),
        "olmo": (WRONG, "1 rank 3", ""),
    }
