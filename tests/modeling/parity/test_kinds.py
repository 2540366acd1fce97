"""Kinds of LoRA that name other things than modules: PEFT's answers, beside plain adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from configs.wire.adapters import AdapterError
from modeling.adapters.peft import tokens as peft_tokens
from modeling.adapters.peft.factor_names import FactorNames, factor_names
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.token_rows import TokenRows
from modeling.runner.adapter_check import adaptable
from tests.checkpoints import AdapterRecipe, load_oracle, write_adapter
from tests.modeling.kinds import once
from tests.modeling.parity.comparison import (
    ADAPTERS,
    BASE,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)
from tests.modeling.parity.test_peft import check_served

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

TOKENS = [
    *(("llama_tokens", "odd_vocab", 2), ("llama_tokens", "odd_vocab_tied", 4)),
    *(("gpt2_tokens", "plain", 1), ("generic_tokens", "olmo2", 2)),
]
ROWS = ["tokens", BASE, "embedding", "both", "plain", "head"]
MIXED = ["parameters", BASE, "some", "plain"]


@pytest.mark.parametrize(("family", "variant", "ranks"), once("parameters"))
def test_parameters_together(world: World, family: str, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting(family, variant, ranks, MIXED, rejoins_at=3))


def test_parameters_alone(world: World) -> None:
    compare(world, Setting("gpt2_parameters", "plain", 1, ["parameters"], chunk=WHOLE))


@pytest.mark.parametrize("variant", ["odd_vocab", "odd_vocab_tied"])
def test_parameters_of_the_ends(world: World, variant: str) -> None:
    """PEFT adapts each end for itself, even where their weights are one."""
    compare(world, Setting("ends_parameters", variant, 2, ["bare", BASE], vocabulary=True))


def test_parameters_under_the_scheduler(world: World) -> None:
    """With prefix hits."""
    names, lengths = ["parameters", BASE, "parameters"], [35, 35, 35]
    compare(world, Setting("gpt2_parameters", "plain", 2, names, lengths=lengths))


@pytest.mark.parametrize(("family", "variant", "ranks"), TOKENS)
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
    monkeypatch.setattr("modeling.adapters.peft.adapter.factor_names", straight)
    expect_mismatch(world, Setting("gpt2_parameters", "plain", 1, ["some"]))


def write_parts(folder: Path, fused: Path) -> Path:
    """Write a Phi-3 as a Mistral, whose q, k, v and gate, up are matrices of their own."""
    phi = load_oracle(fused)
    names = transformers.MistralConfig().to_dict().keys() - {"architectures", "model_type"}
    given = {name: value for name, value in phi.config.to_dict().items() if name in names}
    config = transformers.MistralConfig(**given)
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    state = dict(phi.state_dict())
    for key in list(state):
        if "qkv_proj" in key:
            for name, part in zip(
                "qkv", state.pop(key).split([heads * size, *[kv * size] * 2]), strict=True
            ):
                state[key.replace("qkv_proj", f"{name}_proj")] = part.clone()
        elif "gate_up_proj" in key:
            for name, part in zip(("gate", "up"), state.pop(key).chunk(2), strict=True):
                state[key.replace("gate_up_proj", f"{name}_proj")] = part.clone()
    model = transformers.MistralForCausalLM(config)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    return folder


def test_fused_factors_over_parts(world: World, tmp_path: Path) -> None:
    """PEFT computes over Phi-3, the server over the same weights as a Mistral."""
    fused = world.model("fused", "phi3")
    folders = [world.adapter("fused", "phi3", name) for name in ("r8", "columns", "patterns")]
    recipe = AdapterRecipe(
        target_modules=(), extra={"target_parameters": ["0.self_attn.qkv_proj.weight"]}, std=0.3
    )
    bare = write_adapter(tmp_path / "bare", fused, recipe)
    made = [*(folder for folder in folders if folder is not None), bare]
    check_served(write_parts(tmp_path / "parts", fused), made, trained_on=fused)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
def test_fused_factors_that_are_not_cut(world: World, tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", world.model("fused_dora", "phi3"))
    for name in ("dora", "biased"):
        folder = world.adapter("fused_dora", "phi3", name)
        assert folder is not None
        with pytest.raises(AdapterError, match="serve the base model that it was trained on"):
            open_adapter(folder, adaptable(engine_config(parts)), 64)
    dora = AdapterRecipe(extra={"use_dora": True})
    apart = write_adapter(tmp_path / "apart", parts, dora)
    fused = adaptable(engine_config(world.model("fused_dora", "phi3")))
    with pytest.raises(AdapterError, match=r"adapts parts of .*qkv_proj, with DoRA"):
        open_adapter(apart, fused, 64)


def test_factors_of_parts_over_a_fused_map(world: World, tmp_path: Path) -> None:
    """PEFT computes over the parts, the server over Phi-3."""
    fused = world.model("fused", "phi3")
    parts = write_parts(tmp_path / "parts", fused)
    names = {"some": ("q_proj", "v_proj"), "keys": ("k_proj",), "ups": ("up_proj", "o_proj")}
    recipes = {"patterns": ADAPTERS["patterns"], "rslora": ADAPTERS["rslora"]}
    recipes |= {n: AdapterRecipe(target_modules=t, std=0.3) for n, t in names.items()}
    made = [write_adapter(tmp_path / name, parts, each) for name, each in recipes.items()]
    check_served(fused, made, trained_on=parts)
