"""Kinds of LoRA that name other things than modules: PEFT's answers, beside plain adapters."""

from dataclasses import replace
from typing import Any

import pytest

from modeling.adapters import peft_tokens
from modeling.adapters.factor_names import FactorNames, factor_names
from modeling.adapters.token_rows import TokenRows
from tests.modeling.parity import BASE, WHOLE, Setting, World, compare, expect_mismatch

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

PARAMETERS = {"llama_parameters": "gqa", "gpt2_parameters": "plain", "generic_parameters": "qwen3"}
TOKENS = [
    *(("llama_tokens", "odd_vocab"), ("llama_tokens", "odd_vocab_tied")),
    *(("gpt2_tokens", "plain"), ("generic_tokens", "qwen3")),
]
ROWS = ["tokens", BASE, "embedding", "both", "plain", "head"]
MIXED = ["parameters", BASE, "some", "plain"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("family", "variant"), PARAMETERS.items())
def test_parameters_together(world: World, family: str, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting(family, variant, ranks, MIXED, rejoins_at=3))


@pytest.mark.parametrize(("family", "variant"), PARAMETERS.items())
def test_parameters_alone(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 1, ["parameters"], chunk=WHOLE))


@pytest.mark.parametrize("variant", ["odd_vocab", "odd_vocab_tied"])
def test_parameters_of_the_ends(world: World, variant: str) -> None:
    """PEFT adapts each end for itself, even where their weights are one."""
    compare(world, Setting("ends_parameters", variant, 2, ["bare", BASE], vocabulary=True))


def test_parameters_under_the_scheduler(world: World) -> None:
    """With prefix hits."""
    names, lengths = ["parameters", BASE, "parameters"], [35, 35, 35]
    compare(world, Setting("gpt2_parameters", "plain", 2, names, lengths=lengths))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("family", "variant"), TOKENS)
def test_tokens_together(world: World, family: str, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting(family, variant, ranks, ROWS, rejoins_at=3))


@pytest.mark.parametrize(("variant", "name"), [("odd_vocab_tied", "tokens"), ("odd_vocab", "both")])
def test_tokens_alone(world: World, variant: str, name: str) -> None:
    compare(world, Setting("llama_tokens", variant, 1, [name], chunk=WHOLE))


def test_tokens_under_the_scheduler(world: World) -> None:
    """With prefix hits, and after a loss of the ranks."""
    names, lengths = ["tokens", BASE, "tokens", "both"], [35, 35, 35, 20]
    setting = Setting("llama_tokens", "odd_vocab_tied", 2, names, lengths=lengths, lost_at=14)
    compare(world, setting)


@pytest.mark.parametrize("end", ["embed", "logits"])
def test_a_row_that_is_not_set(world: World, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(TokenRows, end, lambda *args: None)
    expect_mismatch(world, Setting("llama_tokens", "odd_vocab_tied", 2, ["tokens"]))


def test_a_head_that_is_not_tied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows follow the embedding's, though the file has them once."""
    joined = peft_tokens._joined

    def apart(*args: Any) -> list[Any]:
        return [replace(rows, ends=rows.ends[:1]) for rows in joined(*args)]

    monkeypatch.setattr(peft_tokens, "_joined", apart)
    expect_mismatch(world, Setting("llama_tokens", "odd_vocab_tied", 1, ["embedding"]))


def test_a_transposed_weight_that_is_taken_as_it_lies(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a square module alone, as shapes tell the others."""

    def straight(*args: object) -> FactorNames:
        found = factor_names(*args)  # type: ignore[arg-type]
        return FactorNames(found.b, found.a) if "attn.c_proj" in found.a else found

    compare(world, Setting("gpt2_parameters", "plain", 1, ["some"]))
    monkeypatch.setattr("modeling.adapters.peft_adapter.factor_names", straight)
    expect_mismatch(world, Setting("gpt2_parameters", "plain", 1, ["some"]))
