"""Encoders' config.json and what sentence-transformers writes beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.encoders import EncoderArchitecture
from configs.architectures.select import load_architecture, model_task, parse_architecture
from configs.wire.sampling import Pooling
from configs.wire.tasks import ModelTask, ScoreActivation, TaskKind

BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 99,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
ROBERTA = {**BERT, "model_type": "roberta", "max_position_embeddings": 514}
MODULES = "sentence_transformers.models."


def write(folder: Path, **files: object) -> Path:
    """Write JSON files by their names without ending; `__` stands for a folder."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    return [
        {"path": f"{i}_{kind}" if i else "", "type": MODULES + kind} for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("config", "name", "length"),
    [
        (BERT, "BertModel", 512),
        (BERT, "BertForMaskedLM", 512),
        (ROBERTA, "RobertaForMaskedLM", 512),
        (ROBERTA | {"pad_token_id": 0}, "RobertaModel", 513),
        ({**ROBERTA, "model_type": "mpnet"}, "MPNetModel", 512),
    ],
)
def test_positions_begin_behind_the_padding(config: Any, name: str, length: int) -> None:
    found = parse_architecture({**config, "architectures": [name]})
    assert isinstance(found, EncoderArchitecture)
    assert (found.max_position_embeddings, found.num_labels) == (length, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: BertModel brings its own code"),
        ({"max_position_embeddings": None}, "does not give max_position_embeddings"),
        ({"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ({"architectures": ["JinaBertModel"]}, "JinaBertModel"),
        ({"is_decoder": True}, "BertModel"),
    ],
)
def test_refused_configs(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        parse_architecture({**BERT, **changes})


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode": "cls"}, Pooling.CLS),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}, Pooling.MAX),
        ({"word_embedding_dimension": 9}, Pooling.MEAN),
    ],
)
def test_poolings(tmp_path: Path, pooling: dict[str, Any], expected: Pooling) -> None:
    kinds = modules("Transformer", "Pooling", "Normalize")
    folder = write(tmp_path, config=BERT, modules=kinds, **{"1_Pooling__config": pooling})
    assert model_task(folder) == ModelTask(TaskKind.EMBED, pooling=expected, normalize=True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules": modules("Transformer", "Pooling", "Dense")}, "Transformer, Pooling, Dense"),
        ({}, "lacks 1_Pooling/config.json, which modules.json names"),
        ({"1_Pooling__config": {"pooling_mode": "weightedmean"}}, "weightedmean is not served"),
        ({"1_Pooling__config": {"pooling_mode": ["cls", "max"]}}, "cls, max is not served"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "prompt_name.*remove"),
        (
            {"sentence_bert_config": {"do_lower_case": True}, "1_Pooling__config": {}},
            "do_lower_case",
        ),
    ],
)
def test_what_would_change_embeddings_is_refused(
    tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    write(tmp_path, config=BERT, modules=modules("Transformer", "Pooling"))
    write(tmp_path, **files)
    with pytest.raises(ArchitectureError, match=words):
        load_architecture(tmp_path)


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({}, 512),
        ({"sentence_bert_config": {"max_seq_length": 128}}, 128),
        ({"tokenizer_config": {"model_max_length": 64}}, 64),
        ({"tokenizer_config": {"model_max_length": 1e30}}, 512),
    ],
)
def test_the_longest_text(tmp_path: Path, files: dict[str, Any], length: int) -> None:
    folder = write(tmp_path, config=BERT, **files)
    assert load_architecture(folder).max_total_tokens == length


@pytest.mark.parametrize(
    ("config", "beside", "expected"),
    [
        ({}, {}, None),
        ({"sentence_transformers": {"activation_fn": "a.Sigmoid"}}, {}, ScoreActivation.SIGMOID),
        ({"sbert_ce_default_activation_function": "a.Identity"}, {}, ScoreActivation.NONE),
        ({}, {"activation_fn": "torch.nn.Identity"}, ScoreActivation.NONE),
    ],
)
def test_activations(
    tmp_path: Path, config: Any, beside: Any, expected: ScoreActivation | None
) -> None:
    head = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "good"}}
    write(tmp_path, config={**BERT, **head, **config}, config_sentence_transformers=beside)
    assert load_architecture(tmp_path).num_labels == 1
    task = model_task(tmp_path)
    assert (task.labels, task.pair_activation, task.pad_token_id) == (("good",), expected, None)


def test_an_unknown_activation_and_a_module_behind_a_head_are_refused(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["BertForSequenceClassification"]}
    write(tmp_path, config=config, config_sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(ArchitectureError, match=r"torch\.nn\.Tanh of scores is not served"):
        load_architecture(tmp_path)
    write(tmp_path, modules=modules("Transformer", "Dense"))
    with pytest.raises(ArchitectureError, match=r"modules\.json has Dense"):
        load_architecture(tmp_path)
