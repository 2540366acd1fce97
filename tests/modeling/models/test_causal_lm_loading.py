"""Loading a padded model: what it takes, which pad token, and every reason not to load one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MambaConfig, PretrainedConfig

from configs.architectures.base import ArchitectureError
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from modeling.models import causal_lm_loading
from modeling.models.causal_lm_loading import (
    LoadedCausalLM,
    load_causal_lm,
    pad_token_id,
    quantization_config,
)
from sharding.checkpoint import CheckpointError
from tests.checkpoints_padded import write_padded
from tests.fakes import EOS, token_id, write_tokenizer

CPU = torch.device("cpu")


def load(folder: Path, **fields: Any) -> LoadedCausalLM:
    return load_causal_lm(ModelConfig(id=str(folder), **fields), CPU, spread=True)


@pytest.fixture
def gptj(tmp_path: Path) -> Path:
    return write_padded(tmp_path / "gptj", "gptj")


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_loaded_is_counted(gptj: Path) -> None:
    loaded = load(gptj)
    file = gptj / "model.safetensors"
    tensors = load_file(file)
    assert loaded.bytes_read == file.stat().st_size
    assert loaded.bytes_resident == sum(tensor.nbytes for tensor in tensors.values())
    assert loaded.architecture.architecture == "GPTJForCausalLM"
    assert loaded.model.dtype == torch.float32, "AUTO on a CPU, whatever the checkpoint says"
    assert not any(p.requires_grad for p in loaded.model.model.parameters())


def test_another_type_is_taken_when_asked_for(gptj: Path) -> None:
    assert load(gptj, dtype=DType.BFLOAT16).model.dtype == torch.bfloat16


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
    with pytest.raises(CheckpointError, match="no place for 1 tensors of the checkpoint: spare"):
        load(gptj)


def test_pickled_weights_are_not_read_unasked(gptj: Path) -> None:
    tensors = load_file(gptj / "model.safetensors")
    (gptj / "model.safetensors").unlink()
    torch.save(tensors, gptj / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(gptj)
    assert load(gptj, allow_pickle=True).model.dtype == torch.float32


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mamba"
    with pytest.raises(ArchitectureError, match="linear_attention: recurrent"):
        load(tmp_path, load_format=LoadFormat.DUMMY)
