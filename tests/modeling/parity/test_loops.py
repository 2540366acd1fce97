"""Layers that attend several times for each token: Dory, HRM-Text, DiffLlama."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.architectures.base import ArchitectureError
from configs.engine import CacheConfig, CacheDType
from configs.model import DType, ModelConfig
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from modeling.adapters.linear import AdapterColumnLinear
from modeling.adapters.product import AdapterData
from modeling.models.generic import layer_calls
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, load_oracle, oracle_logits, write_adapter
from tests.checkpoints_generic import VOCAB_SIZE, write_generic
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
    full_logprobs,
    poison,
)
from tests.modeling.stepping import Asked, generate
from tests.oracle import TOLERANCE
from tests.sweeps import swept

LOOPS = ("dory", "hrm_text")

CALLS = {"diffllama": 4 * 2, "dory": 2 + 3 * 2, "hrm_text": 2 * (2 + 1) * 2}
"""How often a forward attends: layers outside of loops, then loops by layers in them."""

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", CALLS)
def test_each_call_has_keys_of_its_own(world: World, variant: str) -> None:
    model = load_paged(engine_config(world.model("generic", variant)), SingleRank(), CPU).parts
    assert len(model.weights.model.attention_layers) == CALLS[variant]
    # EAGLE-3's heads read one state of each layer.
    assert not model.weights.model.decoder_layers


@pytest.mark.parametrize("variant", swept(CALLS, lambda variant: variant != "hrm_text"))
def test_preempted(world: World, variant: str) -> None:
    compare(world, Setting("generic", variant, 2, [BASE, "r8", "columns"], rejoins_at=2))


@pytest.mark.parametrize("variant", swept(CALLS, lambda variant: variant != "hrm_text"))
def test_calls_that_share_a_cache(
    world: World, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    real = layer_calls.PagedLayers.__init__

    def init(self: layer_calls.PagedLayers, context: Any, forms: Any) -> None:
        first = {call: forms[call[0], 0].number for call in forms}
        real(self, context, {call: forms[call]._replace(number=first[call]) for call in forms})

    monkeypatch.setattr(layer_calls.PagedLayers, "__init__", init)
    expect_mismatch(world, Setting("generic", variant, 1, [BASE]))


@pytest.mark.parametrize("variant", swept(LOOPS, lambda variant: variant == "hrm_text"))
def test_deltas_in_the_first_loop_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    real = AdapterColumnLinear.forward
    last: dict[AdapterColumnLinear, AdapterData | None] = {}

    def forward(self: AdapterColumnLinear, x: Tensor, data: AdapterData | None) -> Tensor:
        # Each step has data of its own.
        again = data is not None and last.get(self) is data
        last[self] = data
        return real(self, x, None if again else data)

    monkeypatch.setattr(AdapterColumnLinear, "forward", forward)
    expect_mismatch(world, Setting("generic", variant, 1, ["r8"]))


def test_a_released_dory(tmp_path: Path) -> None:
    """Its files have a block of attention and one of a feed-forward for each layer."""
    model = write_generic(tmp_path / "model", "dory")
    file = model / "model.safetensors"
    tensors = {_released(name): tensor for name, tensor in load_file(file).items()}
    assert "backbone.layers.7.mixer.up_proj.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    assert _error(model) < TOLERANCE


def _released(name: str) -> str:
    found = re.search(r"layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)", name)
    if found is None:
        return name
    number, part = 2 * int(found[1]), found[2]
    block = {
        "self_attn": f"{number}.mixer", "lambda_1": f"{number}.attn_alpha",
        "mlp": f"{number + 1}.mixer", "lambda_2": f"{number + 1}.mlp_alpha",
    }[part]  # fmt: skip
    return name.replace(found[0], f"layers.{block}")


@pytest.mark.parametrize("bias", [False, True])
def test_an_hrm_text_whose_config_counts_the_layers_of_a_stack(tmp_path: Path, bias: bool) -> None:
    model = write_generic(tmp_path / "model", "hrm_text", attention_bias=bias)
    _change(model, num_hidden_layers=2, num_layers_per_stack=None)
    assert _error(model) < TOLERANCE


def test_a_cache_that_the_last_loop_writes(tmp_path: Path) -> None:
    """transformers lets earlier loops read a prompt's own keys, and the last loop's afterwards."""
    model = write_generic(tmp_path / "model", "dory")
    _change(model, recurrent_kv_cache_mode="last_loop")
    with pytest.raises(ArchitectureError, match=r"recurrent_kv_cache_mode \(last_loop\)"):
        load_paged(engine_config(model), SingleRank(), CPU)
    _change(model, n_recurrent_loops=1)
    assert _error(model) < TOLERANCE


def test_logits_of_a_dory_are_not_rounded(world: World) -> None:
    folder = world.model("generic", "dory")
    config = engine_config(folder, model=ModelConfig(id=str(folder), dtype=DType.BFLOAT16))
    model = load_paged(config, SingleRank(), CPU).parts.weights.model
    logits = model.head(torch.randn(3, model.width, dtype=torch.bfloat16), None)
    assert logits.dtype == model.logits_dtype == torch.float32
    assert (logits != logits.bfloat16().float()).any()


def test_a_copy_of_a_scaled_head_in_an_adapter_is_left_out(world: World, tmp_path: Path) -> None:
    folder = world.model("generic", "dory")
    recipe = AdapterRecipe(r=4, target_modules=("q_proj",), seed=3, save_embeddings=True)
    adapter = write_adapter(tmp_path / "adapter", folder, recipe)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.lm_head.logit_scale"
    assert name in tensors
    runner = load_paged(engine_config(folder), SingleRank(), CPU).allocate()
    assert runner.stage(FetchedAdapter(AdapterKey(1), "it", str(adapter), "it"))
    save_file({**tensors, name: tensors[name] * 2}, file)
    with pytest.raises(AdapterError, match="logit_scale is not this model's weight"):
        runner.stage(FetchedAdapter(AdapterKey(2), "it", str(adapter), "it"))


def test_parts_that_are_more_than_the_layers(tmp_path: Path) -> None:
    """transformers runs some layers twice then, and one cache has both."""
    model = write_generic(tmp_path / "model", "dory")
    _change(model, n_output_layers=8, n_recurrent_layers=-2)
    with pytest.raises(ArchitectureError, match=r"n_input_layers, n_output_layers \(1, 4\) are no"):
        load_paged(engine_config(model), SingleRank(), CPU)


def test_adapters_of_a_scaled_head_are_not_taken(world: World) -> None:
    """PEFT adds its deltas behind the scale."""
    folder = world.model("generic", "dory")
    config = engine_config(folder)
    adapters = config.adapters.model_copy(update={"vocabulary": True})
    loaded = load_paged(config.model_copy(update={"adapters": adapters}), SingleRank(), CPU)
    assert not any(each.kind.of_vocabulary for each in loaded.parts.bank.projections)


def test_scales_of_a_checkpoint_are_of_one_call(tmp_path: Path) -> None:
    model = write_generic(tmp_path / "model", "dory")
    file = model / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1)
              for layer in range(4) for part in "kv"}  # fmt: skip
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=CacheDType.FP8)
    runner = load_paged(engine_config(model, cache=cache), SingleRank(), CPU).allocate()
    assert "measured at start" in str(runner.report)


def _change(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")


def _error(model: Path) -> float:
    """How far the first token's logprobs are from transformers', of a prompt in chunks."""
    prompt = [5, 60, 6, 7, 31, 9, 11, 44, 23, 3, 70, 12, 52]
    runner = load_paged(engine_config(model), SingleRank(), CPU).allocate()
    poison(runner)
    asked = Asked(prompt, 1, sampling=Sampling(logprobs=VOCAB_SIZE), chunk=5)
    (answer,) = generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)
    told = oracle_logits(load_oracle(model), prompt)[-1].double().log_softmax(-1)
    return float((full_logprobs(answer)[0] - told).abs().max())
