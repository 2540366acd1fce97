"""Causal language models of no known family: few numbers under many names, and refusals."""

from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.padded import DEFAULT_LENGTH, PaddedArchitecture
from configs.architectures.select import load_architecture, load_padded, parse_architecture
from tests.checkpoints import write_llama
from tests.checkpoints_padded import CONFIGS, write_padded

GPTJ: dict[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "vocab_size": 50400,
    "n_layer": 28,
    "n_positions": 2048,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "torch_dtype": "float16",
}


def parse(**changes: Any) -> PaddedArchitecture:
    parsed = parse_architecture({**GPTJ, **changes})
    assert isinstance(parsed, PaddedArchitecture)
    return parsed


def test_reads_the_few_numbers() -> None:
    spec = parse()
    assert (spec.architecture, spec.vocab_size, spec.num_layers) == ("GPTJForCausalLM", 50400, 28)
    assert (spec.max_position_embeddings, spec.stretches) == (2048, False)
    assert spec.bos_token_id == 50256
    assert spec.checkpoint_dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "length", "stretches"),
    [
        ({"n_positions": None, "max_seq_len": 512}, 512, False),
        ({"n_positions": None, "max_position_embeddings": 99}, 99, False),
        ({"n_positions": None}, DEFAULT_LENGTH, True),
        ({"max_position_embeddings": 2048, "alibi": True}, DEFAULT_LENGTH, True),
    ],
)
def test_the_length_is_the_models_own_or_a_guess(
    changes: dict[str, Any], length: int, stretches: bool
) -> None:
    spec = parse(**changes)
    assert (spec.max_position_embeddings, spec.stretches) == (length, stretches)


def test_a_model_type_alone_names_what_is_built() -> None:
    assert parse(architectures=None, model_type="doge").architecture == "dogeForCausalLM"


@pytest.mark.parametrize("kind", CONFIGS)
def test_reads_what_transformers_writes(tmp_path: Path, kind: str) -> None:
    spec = load_padded(write_padded(tmp_path, kind))
    assert isinstance(spec, PaddedArchitecture)
    assert (spec.vocab_size, spec.num_layers) == (96, 2)
    assert spec.max_position_embeddings == (DEFAULT_LENGTH if spec.stretches else 256)
    assert spec.stretches == (kind in ("bloom", "falcon_alibi"))


def test_a_known_family_can_be_read_so_too(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    assert not isinstance(load_architecture(folder), PaddedArchitecture)
    assert load_padded(folder).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForCond.* is not supported"),
        ({"architectures": ["BertForMaskedLM"]}, "any other causal language model"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"vocab_size": None}, "does not give vocab_size"),
        ({"n_layer": None}, "none of num_hidden_layers, n_layer"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


def test_a_folder_that_holds_no_causal_model(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"holds no config\.json"):
        load_padded(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ArchitectureError, match="BertModel is not supported"):
        load_padded(tmp_path)
