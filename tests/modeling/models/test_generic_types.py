"""Every type that is paged by transformers' modules loads, and computes what transformers does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import PAGED_TYPES
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.adapters.kernels.groups import group_of
from modeling.adapters.linear import AdapterColumnLinear
from modeling.models.generic.cuts import CutPlan, Style
from modeling.models.generic.model import GenericForCausalLM
from modeling.models.generic.modules import keep_inside
from modeling.models.generic.waits import HostNumbers
from modeling.runner.load_paged import load_paged
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints import load_oracle, oracle_logits
from tests.modeling.models.sweep_truth import VOCAB_SIZE, prompts
from tests.modeling.models.tiny_causal import kinds, tiny_config, write_tiny
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    engine_config,
    full_logprobs,
    poison,
)
from tests.modeling.stepping import Asked, generate
from tests.ranks import MemoryRank, Table
from tests.sweeps import swept

TOLERANCE = {DType.FLOAT32: 1e-4, DType.BFLOAT16: 0.5}
"""On any logprob; one of bfloat16 is off by more now and then, hence the second bound."""
CHUNK = 11
"""Of a prompt of more tokens, and fewer than two of it."""

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "olmoe": ({"sliding_window": 8}, r"sliding_window \(8\).* the cache of transformers forgets"),
    "mixtral": ({"sliding_window": 1}, r"sliding_window \(1\) is not"),
    "glm4": ({"hidden_size": "wide"}, r"transformers does not take this config.json of a glm4"),
    "gemma4_text": ({"vocab_size": 97}, r"vocab_size_per_layer_input \(96\) is below"),
    "gemma2": ({"hidden_activation": "mine"}, r"builds no gemma2 of this config.json: KeyError"),
    "gemma": ({"num_attention_heads": 0}, r"does not take this config.json of a gemma|builds no"),
    "deepseek_v3": ({"head_dim": 32}, r"deepseek_v3 cannot be computed by this config.json"),
    "qwen3_moe": ({"layer_types": ["sliding_attention"] * 2}, r"no cache .* do not fit each other"),
    "helium": ({"layer_types": ["sliding_attention"] * 2}, r"no cache .*no attribute 'sliding_w"),
    "olmo2": ({"architectures": ["OlmoForCausalLM"]}, r"model_type olmo2 is a Olmo2ForCausalLM"),
}
"""What a config.json may say too, of which parts of transformers hold different things."""


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path: Path, kind: str) -> None:
    model = write_tiny(tmp_path / "model", kind)
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    changes, message = CONTRADICTIONS[kind]
    (model / "config.json").write_text(json.dumps(settings | changes), encoding="utf-8")
    with pytest.raises(ArchitectureError, match=message):
        load_paged(engine_config(model), SingleRank(), torch.device("cpu"))


@pytest.mark.parametrize("names", [None, ["PeftModelForCausalLM"]])
def test_model_type_says_the_class_where_nothing_else_does(tmp_path: Path, names: Any) -> None:
    model = write_tiny(tmp_path / "model", "olmo2")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**settings, "architectures": names}))
    load_paged(engine_config(model), SingleRank(), torch.device("cpu"))


def test_outputs_that_config_json_wants_as_tuples(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "olmo2")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**settings, "return_dict": False}))
    runner = load_paged(engine_config(model), SingleRank(), torch.device("cpu")).allocate()
    (answer,) = generate(runner, [Asked([5, 6], 2)], NUM_BLOCKS, BLOCK_SIZE)
    assert len(answer.tokens) == 2


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "glm4_moe")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    count = settings["num_hidden_layers"]
    tensors = load_file(model / "model.safetensors")
    extra = {f"model.layers.{count}.eh_proj.weight": torch.ones(2, 2)}
    save_file({**tensors, **extra}, model / "model.safetensors")

    def load(layers: int) -> None:
        text = json.dumps({**settings, "num_nextn_predict_layers": layers})
        (model / "config.json").write_text(text, encoding="utf-8")
        load_paged(engine_config(model), SingleRank(), torch.device("cpu"))

    load(1)
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors .*eh_proj"):
        load(0)


def test_queries_are_cut_with_and_without_latent_factors() -> None:
    """GLM-4.7's plan has those of a model with factors alone."""
    config = tiny_config("glm4_moe_lite")
    config.q_lora_rank = None
    plan = CutPlan(config, "model", MemoryRank(Table(2), 1))
    cut = plan.of("model.layers.0.self_attn.q_proj", nn.Linear(32, 64))
    assert (cut.style, cut.outputs) == (Style.COLUMN, ((32, 64),))


@pytest.mark.parametrize("dtype", swept(TOLERANCE, lambda dtype: dtype is DType.FLOAT32))
@pytest.mark.parametrize("kind", sorted(PAGED_TYPES.intersection(kinds())))
@pytest.mark.filterwarnings("ignore")
def test_a_prompt_in_two_chunks(tmp_path: Path, kind: str, dtype: DType) -> None:
    """The tiny model's windows are shorter than the prompt."""
    model = write_tiny(tmp_path / "model", kind)
    _, prompt = prompts()[1]
    assert CHUNK < len(prompt) < 2 * CHUNK
    error = _error(model, prompt, dtype)
    assert error.max() <= TOLERANCE[dtype]
    assert error.square().mean().sqrt() <= TOLERANCE[dtype] / 3


def _error(model: Path, prompt: list[int], dtype: DType = DType.FLOAT32) -> Tensor:
    """How far the first token's logprobs are from transformers'; [vocab]."""
    config = engine_config(model, model=ModelConfig(id=str(model), dtype=dtype))
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    poison(runner)
    asked = Asked(prompt, 1, sampling=Sampling(logprobs=VOCAB_SIZE), chunk=CHUNK)
    (answer,) = generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)
    told = oracle_logits(load_oracle(model), prompt)[-1].double().log_softmax(-1)
    return (full_logprobs(answer)[0] - told).abs()


def test_layers_that_share_weights_have_them_once(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "zamba2")
    parts = load_paged(engine_config(model), SingleRank(), torch.device("cpu")).parts
    found = parts.weights.model
    assert isinstance(found, GenericForCausalLM)
    for name in ("feed_forward.down_proj", "self_attn.o_proj"):
        first, other, third = (
            found.causal.get_submodule(f"model.layers.{layer}.shared_transformer.{name}.linear")
            for layer in (1, 2, 3)
        )
        assert first.base is third.base
        assert first.base is not other.base


def test_layers_that_could_share_weights_and_have_their_own(tmp_path: Path) -> None:
    """As transformers reads a checkpoint that has both: each by its own tensor."""
    model = write_tiny(tmp_path / "model", "zamba2")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.{}.shared_transformer.self_attn.o_proj.weight"
    assert name.format(3) not in tensors
    tensors[name.format(3)] = tensors[name.format(1)].roll(1, 0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert _error(model, [5, 60, 6, 7]).max() <= TOLERANCE[DType.FLOAT32]


ENDS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("stored", [ENDS[:1], ENDS[1:], ENDS])
def test_a_row_of_padding_that_transformers_clears(tmp_path: Path, stored: Sequence[str]) -> None:
    """It does so in the embedding alone, before a head that is stored too is compared with it."""
    model = write_tiny(tmp_path / "model", "youtu")
    tensors = load_file(model / "model.safetensors")
    table = tensors.pop(ENDS[0])
    assert table[0].abs().min() > 0
    save_file({**tensors, **{name: table.clone() for name in stored}}, model / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    assert _error(model, [5, 0, 6, 0]).max() <= TOLERANCE[DType.FLOAT32]


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "qwen3_moe"])
def test_projections_of_one_product_have_the_same_layers(tmp_path: Path, kind: str) -> None:
    """Layers that share another one's keys have queries alone; kernels ask it of a launch."""
    model = write_tiny(tmp_path / "model", kind)
    parts = load_paged(engine_config(model), SingleRank(), torch.device("cpu")).parts
    modules = cast(nn.Module, parts.weights.model).modules()
    merged = [each for each in modules if isinstance(each, AdapterColumnLinear)]
    assert merged
    for each in merged:
        group_of(parts.bank, each._targets, 0)


def test_numbers_that_a_step_brings_to_a_device_are_copied_once() -> None:
    device = torch.device("meta")
    numbers = HostNumbers(device)
    for _ in range(2):
        with numbers:
            made = [
                torch.tensor(0.95, dtype=torch.float32, device=device),
                torch.tensor(data=1, device=device),
                torch.tensor(1e-5).to(device),
                torch.tensor(1e-5).to(device, torch.bfloat16),
            ]
            assert torch.tensor(0.95).item() == pytest.approx(0.95)
            assert torch.ones(2).to(torch.float64).sum() == 2
            assert torch.tensor(2).to(torch.float32) == 2
        assert [each.device.type for each in made] == ["meta"] * 4
        types = [torch.float32, torch.int64, torch.float32, torch.bfloat16]
        assert [each.dtype for each in made] == types
        assert len(numbers._kept) == 4
    assert made[0] is not next(iter(numbers._kept.values()))


def test_tokens_that_a_table_lacks_read_its_first_row() -> None:
    table = nn.Embedding(4, 2)
    keep_inside(table, 6)
    found = table(torch.tensor([3, 4, 5, 0]))
    assert torch.equal(found, table.weight[[3, 0, 0, 0]])


def test_a_step_that_fails_between_parts_of_a_product_spoils_no_later_one(tmp_path: Path) -> None:
    """q, k and v are one product: k and v of the failed step are never called."""
    runner = load_paged(
        engine_config(write_tiny(tmp_path / "model", "olmo2")), SingleRank(), torch.device("cpu")
    ).allocate()
    asked = Asked(prompts()[0][1], 4)
    answers = [generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)[0].tokens]
    model = runner._forward.model
    assert isinstance(model, GenericForCausalLM)
    query = model.causal.get_submodule("model.layers.0.self_attn.q_proj")
    query(torch.randn(1, 3, 32))
    answers.append(generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)[0].tokens)
    assert answers[0] == answers[1]
