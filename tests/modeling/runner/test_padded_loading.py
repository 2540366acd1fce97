"""Loading a padded model: what it takes, which pad token, and every reason not to load one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CpmAntConfig,
    MambaConfig,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_rjieba_available

from configs.architectures.base import ArchitectureError
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from modeling.runner import padded_loading as causal_lm_loading
from modeling.runner.padded_loading import (
    LoadedCausalLM,
    load_causal_lm,
    pad_token_id,
    quantization_config,
)
from sharding import progress
from sharding.checkpoint import CheckpointError
from tests.checkpoints_padded import write_padded
from tests.fakes import EOS, token_id, write_tokenizer
from tests.modeling.models.tiny_causal import tiny_config

CPU = torch.device("cpu")


def load(folder: Path, **fields: Any) -> LoadedCausalLM:
    return load_causal_lm(ModelConfig(id=str(folder), **fields), CPU, spread=True)


@pytest.fixture
def gptj(tmp_path: Path) -> Path:
    return write_padded(tmp_path / "gptj", "gptj")


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_long_start_says_how_far_it_is(
    gptj: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_A_LINE", 0.0)
    caplog.set_level("INFO", logger="loray.progress")
    count = sum(1 for _ in load(gptj).model.model.parameters())
    assert re.match(f"tensors: {count} of {count} in ", caplog.messages[-1])
    load(gptj, load_format=LoadFormat.DUMMY)
    assert re.match(r"tensors filled with random numbers: \d+ \(0.0 GB\)", caplog.messages[-1])


def test_what_was_loaded_is_counted(gptj: Path) -> None:
    loaded = load(gptj)
    file = gptj / "model.safetensors"
    tensors = load_file(file)
    assert loaded.bytes_read == file.stat().st_size
    assert loaded.bytes_resident == sum(tensor.nbytes for tensor in tensors.values())
    assert loaded.architecture.architecture == "GPTJForCausalLM"
    assert not any(p.requires_grad for p in loaded.model.model.parameters())


def test_another_type_is_taken_when_asked_for(gptj: Path) -> None:
    assert load(gptj, dtype=DType.BFLOAT16).model.dtype == torch.bfloat16


def in_half(folder: Path) -> None:
    path = folder / "model.safetensors"
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(halved, path, metadata={"format": "pt"})


def test_auto_is_the_checkpoints_own_type_on_every_device(gptj: Path) -> None:
    """The config's word, as transformers has it; where it says none, that of the tensors."""
    assert load(gptj).model.dtype == torch.float32
    in_half(gptj)
    rewrite_config(gptj, dtype=None)
    assert load(gptj).model.dtype == torch.bfloat16
    assert load(gptj, load_format=LoadFormat.DUMMY).model.dtype == torch.float32
    rewrite_config(gptj, dtype="float16")
    assert load(gptj).model.dtype == torch.float16
    assert load(gptj, load_format=LoadFormat.DUMMY).model.dtype == torch.float16


def test_dummy_weights_need_only_a_config(tmp_path: Path, gptj: Path) -> None:
    (tmp_path / "config.json").write_text((gptj / "config.json").read_text())
    first, second = (load(tmp_path, load_format=LoadFormat.DUMMY) for _ in range(2))
    assert first.bytes_read == 0
    pairs = zip(first.model.model.parameters(), second.model.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def config_with(**fields: int | list[int] | None) -> PretrainedConfig:
    config = PretrainedConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_the_pad_token_is_found_in_the_order_of_the_seed(tmp_path: Path) -> None:
    bare, told = tmp_path / "bare", tmp_path / "told"
    bare.mkdir()
    told.mkdir()
    (bare / "config.json").write_text("{}")
    tokenizer = write_tokenizer(told, template=None)
    rewrite = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (told / "tokenizer_config.json").write_text(json.dumps(rewrite))
    size = tokenizer.get_vocab_size()
    assert pad_token_id(config_with(pad_token_id=5, eos_token_id=2), told, size) == 5
    assert pad_token_id(config_with(pad_token_id=None, eos_token_id=2), told, size) == 2
    assert pad_token_id(config_with(pad_token_id=-1, eos_token_id=[8, 9]), told, size) == 8
    neither = config_with(pad_token_id=None, eos_token_id=None)
    assert pad_token_id(neither, told, size) == token_id(tokenizer, EOS)
    del rewrite["eos_token"]
    (told / "tokenizer_config.json").write_text(json.dumps(rewrite))
    assert pad_token_id(neither, told, size + 1) == size, "the new [PAD]"
    assert pad_token_id(neither, told, size) == 0, "[PAD] has no row in the embedding"
    assert pad_token_id(neither, bare, size) == 0, "no tokenizer"


@pytest.mark.parametrize("package", ["bitsandbytes", "accelerate"])
def test_quantised_weights_say_what_to_install(
    gptj: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("bitsandbytes", "accelerate"):
        is_there = each != package
        monkeypatch.setattr(
            causal_lm_loading, f"is_{each}_available", lambda is_there=is_there: is_there
        )
    with pytest.raises(ValueError, match=rf"package {package}, or a newer one: pip install"):
        load(gptj, quantize=Quantize.BITSANDBYTES)


def test_dummy_weights_are_not_quantised(gptj: Path) -> None:
    with pytest.raises(ValueError, match=r"dummy weights are not quantised"):
        load(gptj, quantize=Quantize.BITSANDBYTES_NF4, load_format=LoadFormat.DUMMY)


def test_what_bitsandbytes_is_told() -> None:
    assert quantization_config(Quantize.NONE, torch.float16) is None
    eight = quantization_config(Quantize.BITSANDBYTES, torch.float16)
    assert eight is not None
    assert (eight.load_in_8bit, eight.load_in_4bit) == (True, False)
    four = quantization_config(Quantize.BITSANDBYTES_NF4, torch.bfloat16)
    assert four is not None
    assert (four.load_in_4bit, four.bnb_4bit_quant_type) == (True, "nf4")
    assert four.bnb_4bit_compute_dtype == torch.bfloat16


def test_code_of_the_models_own_is_not_run_unasked(gptj: Path) -> None:
    ran = gptj / "ran"
    (gptj / "modeling_mine.py").write_text(f"open({str(ran)!r}, 'w')")
    auto_map = {
        "AutoConfig": "modeling_mine.MyConfig",
        "AutoModelForCausalLM": "modeling_mine.MyForCausalLM",
    }
    rewrite_config(gptj, architectures=["MyForCausalLM"], model_type="mine", auto_map=auto_map)
    with pytest.raises(ArchitectureError, match=r"brings its own code.*trust_remote_code"):
        load(gptj)
    assert not ran.exists()


def test_a_model_type_that_transformers_does_not_know_is_refused(gptj: Path) -> None:
    rewrite_config(gptj, architectures=["NobodyForCausalLM"], model_type="nobody")
    with pytest.raises(ArchitectureError, match="transformers cannot build gptj"):
        load(gptj)


def missing_package(*_: object, **__: object) -> Any:
    raise ImportError("TimmModel requires the timm library but it was not found")


@pytest.mark.parametrize("builder", ["from_pretrained", "from_config"])
def test_a_package_that_the_models_code_wants_is_named(
    gptj: Path, monkeypatch: pytest.MonkeyPatch, builder: str
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, builder, missing_package)
    fields = {"load_format": LoadFormat.DUMMY} if builder == "from_config" else {}
    with pytest.raises(ArchitectureError, match=r"cannot build .*requires the timm library"):
        load(gptj, **fields)


def test_a_package_that_the_models_config_wants_is_named(
    gptj: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoConfig, "from_pretrained", missing_package)
    with pytest.raises(ArchitectureError, match=r"cannot build gptj: .*requires the timm library"):
        load(gptj)


def test_a_tokenizer_whose_package_is_missing_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """CpmAnt's wants rjieba; the model itself is refused, for the cache that it keeps."""
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "dim_head": 8,
        "num_attention_heads": 4,
    }
    config = CpmAntConfig(num_hidden_layers=2, dim_ff=48, **fields)
    config.architectures, config.eos_token_id = ["CpmAntForCausalLM"], None
    config.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    tokenizer = {"tokenizer_class": "CpmAntTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if not is_rjieba_available():
        with pytest.raises(ImportError, match="rjieba"):
            AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not one key and value for each position"):
        load(tmp_path, load_format=LoadFormat.DUMMY)


def write_dummy(folder: Path, kind: str, variant: str = "plain", **changes: Any) -> Path:
    config = tiny_config(kind, variant)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.save_pretrained(folder)
    rewrite_config(folder, **changes)
    return folder


@pytest.mark.parametrize(
    ("kind", "variant", "longest", "why"),
    [
        ("olmo2", "dynamic", 32, "what was computed before"),
        ("moshi", "plain", 24, "cache forgets"),
        ("mistral", "plain", 256, ""),
        ("gpt_oss", "plain", 256, ""),
        ("llama4_text", "plain", 256, ""),
        ("olmo2", "longrope", 256, ""),
    ],
)
def test_no_sequence_is_longer_than_its_own_answer_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, variant: str, longest: int,
    why: str,
) -> None:  # fmt: skip
    """Dynamic rope keeps state between calls; a window may be known to the cache alone."""
    folder = write_dummy(tmp_path, kind, variant)
    with caplog.at_level("INFO", "loray.modeling.causal_lm"):
        architecture = load(folder, load_format=LoadFormat.DUMMY).architecture
    assert (architecture.max_position_embeddings, architecture.stretches) == (longest, False)
    assert ("no sequence is longer" in caplog.text) == bool(why)
    assert why in caplog.text


def test_a_window_of_one_is_refused(tmp_path: Path) -> None:
    folder = write_dummy(tmp_path, "mistral", sliding_window=1)
    with pytest.raises(ArchitectureError, match=r"sliding_window \(1\) is not"):
        load(folder, load_format=LoadFormat.DUMMY)


def test_missing_weights_are_named_not_made_up(gptj: Path) -> None:
    path = gptj / "model.safetensors"
    tensors = load_file(path)
    gone = "transformer.h.1.mlp.fc_in.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != gone}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=gone):
        load(gptj)


def test_tensors_without_a_use_are_named(gptj: Path) -> None:
    path = gptj / "model.safetensors"
    old = {
        "transformer.h.0.attn.masked_bias": torch.zeros(1),
        "transformer.h.1.attn.rotary_emb.inv_freq": torch.zeros(4),
        "transformer.h.1.attn.q_proj.bias": torch.ones(32),  # as transformers, which warns of it
    }
    save_file({**load_file(path), **old}, path, metadata={"format": "pt"})
    load(gptj)
    save_file({**load_file(path), "spare": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not use 1 tensors of the checkpoint: spare"):
        load(gptj)


def test_pickled_weights_are_not_read_unasked(gptj: Path) -> None:
    tensors = load_file(gptj / "model.safetensors")
    (gptj / "model.safetensors").unlink()
    torch.save(tensors, gptj / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"set model\.allow_pickle to true"):
        load(gptj)
    assert load(gptj, allow_pickle=True).model.dtype == torch.float32


def test_damaged_files_and_other_shapes_are_named(gptj: Path) -> None:
    path = gptj / "model.safetensors"
    tensors = load_file(path)
    wide = {"transformer.ln_f.weight": torch.ones(5)}
    save_file({**tensors, **wide}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ln_f.weight' has shape \(5,\), the model needs"):
        load(gptj)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="it is incomplete"):
        load(gptj)
    path.rename(gptj.parent / "elsewhere.safetensors")
    named = dict.fromkeys(tensors, "../elsewhere.safetensors")
    (gptj / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    with pytest.raises(CheckpointError, match="is outside of its folder"):
        load(gptj)


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mamba"
    with pytest.raises(ArchitectureError, match=r"linear_attention: .* keep a recurrent state"):
        load(tmp_path, load_format=LoadFormat.DUMMY)


def test_layers_that_keep_more_than_keys_are_called_by_their_own_name(tmp_path: Path) -> None:
    """Paged they are served, but not with every kind of angles."""
    with pytest.raises(ArchitectureError, match=r"indexed_attention: .* keep an index") as told:
        load(write_dummy(tmp_path, "deepseek_v32", "longrope"), load_format=LoadFormat.DUMMY)
    assert "recurrent" not in str(told.value)


def test_recurrent_models_that_are_paged_otherwise_are_refused_for_what_is_not(
    tmp_path: Path,
) -> None:
    with pytest.raises(ArchitectureError, match="but rope_type longrope is not served paged"):
        load(write_dummy(tmp_path, "bamba", "longrope"), load_format=LoadFormat.DUMMY)
