"""config.json to one spec: both transformers layouts, and every refusal by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import Activation, ArchitectureError
from configs.architectures.llama import Architecture
from configs.architectures.rope import Rope, RopeType
from configs.architectures.select import (
    MODEL_TYPES,
    load_architecture,
    padded_reason,
    parse_architecture,
)
from configs.rope_sets import RopeSets
from tests.checkpoints import RELATIVES, VARIANTS, WINDOW, write_llama, write_relative


def load(folder: Path) -> Architecture:
    loaded = load_architecture(folder)
    assert isinstance(loaded, Architecture)
    return loaded


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> Architecture:
    parsed = parse_architecture({**LLAMA, **changes})
    assert isinstance(parsed, Architecture)
    return parsed


def test_reads_the_layout_before_transformers_5() -> None:
    spec = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 32, 8, 128)
    assert spec.rope == Rope(type=RopeType.LLAMA3, theta=5e5, **LLAMA3)
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.hidden_act is Activation.SILU


def test_reads_the_layout_of_transformers_5() -> None:
    inside = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert inside.rope == Rope(type=RopeType.LLAMA3, theta=5e5, **LLAMA3)
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 3.0}).rope.theta == 3.0
    assert parse(dtype="float16", torch_dtype=None).checkpoint_dtype == "float16"


def test_old_linear_scaling_is_named_by_type() -> None:
    spec = parse(rope_scaling={"type": "linear", "factor": 4.0})
    assert spec.rope == Rope(type=RopeType.LINEAR, factor=4.0)


def test_defaults_are_transformers_own() -> None:
    spec = parse(num_key_value_heads=None, head_dim=None, eos_token_id=None)
    assert spec.num_kv_heads == 32
    assert spec.head_dim == 128
    assert spec.rope == Rope()
    switches = (spec.tie_word_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias)
    assert not any((*switches, spec.qk_norm, spec.fused, spec.stretches))
    assert spec.attention_scale == 128**-0.5
    assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_divisor) == (1, 1, 1)
    assert spec.windows == (None,) * 32
    assert parse(head_dim=64).head_dim == 64


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_what_transformers_writes(tmp_path: Path, variant: str) -> None:
    spec = load(write_llama(tmp_path, variant))
    wanted = VARIANTS[variant]
    assert spec.vocab_size == wanted.get("vocab_size", 96)
    assert spec.tie_word_embeddings == wanted.get("tie_word_embeddings", False)
    biases = (spec.qkv_bias, spec.output_bias, spec.mlp_bias)
    assert biases == (wanted.get("mlp_bias", False),) * 3
    assert spec.rope.type == wanted.get("rope_parameters", {}).get("rope_type", "default")
    assert spec.checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BertModel"]},
            r"BertModel is not supported; known: .*LlamaForCausalLM",
        ),
        ({"architectures": None}, r"\(none named\) is not supported"),
        ({"architectures": [], "model_type": 3}, r"\(none named\) is not supported"),
        ({"rope_scaling": {"rope_type": "xpos"}}, r"rope type 'xpos'.*llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope settings do not give factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope settings do not give factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope settings do not give short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope settings do not give factor"),
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            r"partial_rotary_factor \(0.5\) with rope type 'linear' .*rotates whole heads",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope settings full_attention"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 1.0}},
            "rope settings attn_factor .* transformers does not read them; remove them",
        ),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers \(1000000000\) is above 10000"),
        ({"rope_scaling": ["linear"]}, "config.json holds another kind of value"),
        ({"rms_norm_eps": None}, "config.json: rms_norm_eps: Input should be a valid number"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of classes' names"),
        ({"sliding_window": 4096}, r"sliding_window \(4096\)"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types .* not supported for LlamaFor"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types .*sliding_attention"),
        ({"hidden_act": "prelu"}, "hidden_act 'prelu'"),
        ({"vocab_size": None}, "does not give vocab_size"),
        ({"model_type": "mistral"}, "model_type is 'mistral' and not 'llama': correct"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_key_value_heads": 5}, "must be a multiple"), ({"head_dim": 7}, "must be even")],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


SOLAR: dict[str, Any] = {"architectures": ["SolarForCausalLM"]}


def test_mistral_has_one_window_for_all_layers() -> None:
    def windows(**changes: Any) -> set[int | None]:
        return set(parse(architectures=["MistralForCausalLM"], **changes).windows)

    assert windows() == {4096}  # transformers' default
    assert windows(sliding_window=7) == {7}
    assert windows(sliding_window=None) == {None}
    assert parse(architectures=["MistralForCausalLM"], num_key_value_heads=None).num_kv_heads == 32
    assert windows(layer_types=["sliding_attention", "full_attention"] * 16) == {4096, None}
    assert windows(layer_types=["full_attention"] * 32, sliding_window=7) == {None}
    assert windows(layer_types=None, sliding_window=7, use_sliding_window=False) == {7}
    with pytest.raises(ArchitectureError, match="layer_types"):
        windows(layer_types=["sliding_attention"] * 32, sliding_window=None)
    assert windows(layer_types=["full_attention"] * 32, sliding_window=1) == {None}
    with pytest.raises(ArchitectureError, match=r"sliding_window \(1\) is not"):
        windows(sliding_window=1)


QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None, None, None)),
        (SLIDING, (None, None, None)),  # max_window_layers is 28 by default
        ({**SLIDING, "max_window_layers": 1}, (None, 8, 8)),
        ({**SLIDING, "max_window_layers": 0}, (8, 8, 8)),
        (
            {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (8, None, None),
        ),
    ],
)
def test_qwens_windows_are_a_layers_own(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse(**QWEN2, **changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window or sliding_window is off"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention are not"),
    ],
)
def test_layer_types_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**QWEN2, **changes)


def test_layer_types_must_name_every_layer() -> None:
    with pytest.raises(ArchitectureError, match="layer_types must name 3 layers"):
        parse(**QWEN2, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize("relative", RELATIVES)
def test_reads_every_relative_that_transformers_writes(tmp_path: Path, relative: str) -> None:
    name, wanted = RELATIVES[relative]
    spec = load(write_relative(tmp_path, relative))
    assert spec.architecture == f"{name}ForCausalLM"
    assert spec.head_dim == wanted.get("head_dim", 8)
    assert spec.qkv_bias == (name == "Qwen2" or wanted.get("attention_bias", False))
    assert spec.output_bias == wanted.get("attention_bias", False)
    assert (spec.qk_norm, spec.fused) == (name == "Qwen3", name == "Phi3")
    windowed = wanted.get("sliding_window") is not None
    assert (WINDOW in spec.windows) == windowed
    rope = wanted.get("rope_parameters", {})
    assert spec.rope.type == rope.get("rope_type", "default")
    assert spec.rope.fraction == rope.get("partial_rotary_factor", 1.0)
    assert not spec.stretches


def test_granites_multipliers() -> None:
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    given = dict(zip(keys, (12.0, 0.22, 0.0078125, 8.0), strict=True))
    spec = parse(architectures=["GraniteForCausalLM"], **given)
    assert (spec.embedding_multiplier, spec.residual_multiplier) == (12.0, 0.22)
    assert (spec.attention_scale, spec.logits_divisor) == (0.0078125, 8.0)
    # transformers' default is one, not 1 / sqrt(head_dim)
    assert parse(architectures=["GraniteForCausalLM"]).attention_scale == 1.0


def test_phi3s_own_names_and_places() -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    spec = parse(
        architectures=["Phi3ForCausalLM"],
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "su", **factors},
    )
    assert (spec.rope.type, spec.rope.fraction) == (RopeType.LONGROPE, 0.75)
    assert spec.rope.original_max_position_embeddings == 4096
    assert spec.rope.attention_factor == pytest.approx(1.19024, abs=1e-5)  # sqrt(1 + 5 / 12)
    assert spec.rope_sets == RopeSets(border=4096, recompute=True)
    factors["long_factor"] = [2.0] * 64
    with pytest.raises(ArchitectureError, match="long_factors must be 48 numbers, found 64"):
        parse(
            architectures=["Phi3ForCausalLM"],
            partial_rotary_factor=0.75,
            rope_scaling={"type": "longrope", **factors},
        )


def test_solars_skip_connections() -> None:
    """SOLAR-10.7B is a LlamaForCausalLM; the pro variant has skip connections."""

    def blends(**changes: Any) -> list[tuple[int, int]]:
        spec = parse(**{**SOLAR, "num_hidden_layers": 64, **changes})
        assert {blend.weight for blend in spec.blends} <= {0.8}
        return [(blend.layer, blend.source) for blend in spec.blends]

    assert blends() == [(16, 12), (24, 20), (28, 20), (36, 32), (40, 32), (48, 44)]
    assert blends(num_hidden_layers=25) == [(16, 12), (24, 20)], "the others are never reached"
    assert blends(bskcn_3=[], bskcn_4=None) == []
    assert blends(bskcn_1=[7, 3], bskcn_3=[7, 6], bskcn_4=[]) == [(6, 3), (7, 7)]
    assert set(parse(**SOLAR).windows) == {2047}
    with pytest.raises(ArchitectureError, match="bskcn_4 names layer 9, and bskcn_2 none before"):
        blends(bskcn_4=[9])
    assert parse(bskcn_1=[12], bskcn_3=[16, 24]).blends == (), "LlamaForCausalLM has none"


def test_keys_that_a_class_does_not_read_are_idle() -> None:
    for name in ("Mistral", "Qwen2", "Phi3"):
        spec = parse(
            architectures=[f"{name}ForCausalLM"], attention_bias=True, mlp_bias=True, eos_token_id=2
        )
        assert (spec.output_bias, spec.mlp_bias) == (False, False)
        assert spec.qkv_bias == (name == "Qwen2")
    spec = parse(logits_scaling=8.0, attention_multiplier=3.0, partial_rotary_factor=0.5)
    assert (spec.logits_divisor, spec.attention_scale, spec.rope.fraction) == (1, 128**-0.5, 1)


@pytest.mark.parametrize(("name", "kind"), MODEL_TYPES.items())
def test_model_type_says_the_architecture_where_nothing_else_does(name: str, kind: str) -> None:
    names: list[str]
    for names in ([], [name]):
        parsed = parse_architecture({**LLAMA, "architectures": names or None, "model_type": kind})
        assert parsed.architecture == name
        assert parsed == parse_architecture({**LLAMA, "architectures": [name]})


@pytest.mark.parametrize("name", ["PeftModelForCausalLM", "LLaMAForCausalLM"])
def test_a_name_of_no_class_leaves_it_to_model_type(name: str) -> None:
    config = {**LLAMA, "architectures": [name], "model_type": "llama"}
    assert parse_architecture(config) == parse()
    # Code of a repository may make a class of that name.
    own = {**config, "auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    assert padded_reason(parse_architecture(own)) is not None


def test_other_families_keep_their_keys_at_longropes_border() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512, **factors}
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        spec = parse(architectures=[name], head_dim=128, rope_scaling=rope)
        assert spec.rope_sets == RopeSets(border=512, recompute=False)
    assert parse().rope_sets is None


def test_the_length_of_dynamic_rope_is_fixed_by_the_operator_alone() -> None:
    spec = parse(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (spec.max_total_tokens, spec.rope.fixed_length) == (64, None)
    fixed = spec.with_rope_length(200)
    assert (fixed.max_total_tokens, fixed.rope.fixed_length) == (200, 200)
    assert spec.with_rope_length(20).max_total_tokens == 64
    with pytest.raises(ValueError, match=r"model\.dynamic_rope_length \(200\) is for models with"):
        parse().with_rope_length(200)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load(tmp_path).vocab_size == 128256


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"a":' * 100_000, "cannot be read: maximum recursion"),
        (b"[1]", "must hold an object, found list"),
        (b" " * (32 << 20) + b"{}", "cannot be read: .* bytes, more than"),
    ],
    ids=["damaged", "no text", "deep", "list", "large"],
)
def test_files_that_are_no_configs(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ArchitectureError, match=rf"{name} {message}"):
        load(tmp_path)
