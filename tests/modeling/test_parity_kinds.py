"""Kinds of LoRA that name other things than modules: PEFT's answers, beside plain adapters."""

import pytest

from modeling.adapters.factor_names import FactorNames, factor_names
from tests.modeling.parity import BASE, WHOLE, Setting, World, compare, expect_mismatch

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

PARAMETERS = {"llama_parameters": "gqa", "gpt2_parameters": "plain", "generic_parameters": "qwen3"}
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
