"""An encoder's embeddings and scores are those of transformers and PEFT, whatever the batch."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import ModelConfig
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Pooling, Sampling
from modeling.batch import ForwardBatch
from modeling.runner.encoder import EncoderRunner
from modeling.runner.select import load_runner
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints_encoders import (
    KINDS,
    VOCAB,
    encoder_truth,
    write_encoder,
    write_encoder_adapter,
    write_word_tokenizer,
)
from tests.modeling.prompts import prompt_of
from tests.oracle import TOLERANCE
from tests.sharding.views import LoneRank

CPU = torch.device("cpu")
LENGTHS = [3, 19, 11, 1, 20, 6, 12]
PROMPTS = [prompt_of(length, VOCAB) for length in LENGTHS]
POOLINGS = [Pooling.MEAN, Pooling.CLS, Pooling.LAST, Pooling.MAX]


def config_of(model: Path, **model_settings: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig.model_validate({"id": str(model), **model_settings}),
        device=Device.CPU,
        cache=CacheConfig(block_size=16),
        limits=LimitsConfig(max_running=8, max_step_tokens=256),
        adapters=AdaptersConfig(device_pages=8, max_device_adapters=3, host_bytes=2**22),
    )


def runner_of(model: Path, *adapters: Path) -> EncoderRunner:
    runner = load_runner(config_of(model), SingleRank(), CPU, False).allocate()
    assert isinstance(runner, EncoderRunner)
    pages = list(range(8))
    for slot, folder in enumerate(adapters):
        key = AdapterKey(slot + 1)
        shape = runner.stage(FetchedAdapter(key, folder.name, str(folder), folder.name))
        taken = [pages.pop() for _ in range(max(shape.num_pages))]
        runner.load_adapter(key, slot, [taken[:count] for count in shape.num_pages]).wait()
    return runner


def run(
    runner: EncoderRunner, asked: Sequence[tuple[list[int], int, Sampling]]
) -> list[np.ndarray]:
    """The vectors of (prompt, adapter slot, sampling), all in one step."""
    joins = [RequestJoin(i, ids, len(ids), slot, s) for i, (ids, slot, s) in enumerate(asked)]
    rows = [StepRow(i, 0, len(ids), [], False) for i, (ids, _, _) in enumerate(asked)]
    found = runner.step(ForwardBatch(joins, rows)).wait()
    runner.check()
    assert found.tokens == []
    reports = found.reports or []
    assert [report.row for report in reports] == list(range(len(asked)))
    return [np.frombuffer(report.embedding, "<f4") for report in reports]


def expected(states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    ways = {
        Pooling.MEAN: lambda: states.mean(0),
        Pooling.CLS: lambda: states[0],
        Pooling.LAST: lambda: states[-1],
        Pooling.MAX: lambda: states.max(0).values,
    }
    return ways[pooling]()


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(tmp_path: Path, kind: str) -> None:
    model = write_encoder(tmp_path / "model", kind)
    adapter = write_encoder_adapter(tmp_path / "a", model, kind, "FEATURE_EXTRACTION")
    asked = [
        (ids, i % 2 - 1, Sampling(pooling=POOLINGS[i % len(POOLINGS)]))
        for i, ids in enumerate(PROMPTS)
    ]
    if kind == "albert":
        # Its layers share their modules, so an adapter's layer cannot be told.
        with pytest.raises(AdapterError, match="a model that takes no adapters"):
            runner_of(model, adapter)
        asked = [(ids, -1, sampling) for ids, _, sampling in asked]
        found = run(runner_of(model), asked)
    else:
        found = run(runner_of(model, adapter), asked)
    truths = [encoder_truth(model, each, PROMPTS) for each in (None, adapter)]
    assert all((one - two).abs().max() > 0.1 for one, two in zip(*truths, strict=True))
    for i, (vector, (_, slot, sampling)) in enumerate(zip(found, asked, strict=True)):
        wanted = expected(truths[slot + 1][i], sampling.pooling)
        np.testing.assert_allclose(vector, wanted.numpy(), atol=TOLERANCE)


def test_an_adapter_of_the_pooler_is_refused_as_such(tmp_path: Path) -> None:
    """PEFT's all-linear has it; embeddings are not made of what it computes."""
    model = write_encoder(tmp_path / "model", "bert")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="FEATURE_EXTRACTION")
    get_peft_model(AutoModel.from_pretrained(model), config).save_pretrained(str(tmp_path / "a"))
    with pytest.raises(AdapterError, match=r"a pooler, .* name pooler\.dense in exclude_modules"):
        runner_of(model, tmp_path / "a")


@pytest.mark.parametrize("kind", KINDS)
def test_scores(tmp_path: Path, kind: str) -> None:
    model = write_encoder(tmp_path / "model", kind, num_labels=3)
    has_types = kind in ("albert", "bert", "electra", "ernie", "megatron-bert", "nomic_bert")
    if has_types:
        write_word_tokenizer(model, model_input_names=["input_ids", "token_type_ids"])
    pairs = [ids for ids in PROMPTS if len(ids) > 4]
    sampling = Sampling(pooling=Pooling.SCORE, second_at=4)
    found = run(runner_of(model), [(ids, -1, sampling) for ids in pairs])
    truth = encoder_truth(model, None, pairs, 4 if has_types else 0)
    np.testing.assert_allclose(np.stack(found), torch.stack(truth).numpy(), atol=TOLERANCE)


def test_an_adapter_of_another_head_serves_the_classifier(tmp_path: Path) -> None:
    """One trained over the model without a head names its modules without `bert`."""
    model = write_encoder(tmp_path / "model", "bert", num_labels=2)
    adapter = write_encoder_adapter(tmp_path / "a", model, "bert", "FEATURE_EXTRACTION")
    asked = [(ids, 0, Sampling(pooling=Pooling.MEAN)) for ids in PROMPTS]
    truth = [states.mean(0).numpy() for states in encoder_truth(model, adapter, PROMPTS)]
    np.testing.assert_allclose(run(runner_of(model, adapter), asked), truth, atol=TOLERANCE)


def test_an_adapters_own_head_is_refused(tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "roberta", num_labels=2)
    adapter = write_encoder_adapter(tmp_path / "a", model, "roberta", "SEQ_CLS")
    with pytest.raises(AdapterError, match="classifier"):
        runner_of(model, adapter)


@pytest.mark.parametrize(
    ("ranks", "settings", "words"),
    [
        (2, {}, r"tensor_parallel \(2\) must be 1: an encoder runs whole"),
        (1, {"quantize": "bitsandbytes"}, "encoders are not quantised"),
        (1, {"load_format": "dummy"}, "an encoder is read from its checkpoint"),
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, ranks: int, settings: dict[str, str], words: str
) -> None:
    model = write_encoder(tmp_path / "model", "bert")
    group = SingleRank() if ranks == 1 else LoneRank(0, ranks)
    with pytest.raises(ValueError, match=words):
        load_runner(config_of(model, **settings), group, CPU, False)


def test_a_checkpoint_that_lacks_a_head_is_refused(tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "bert")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks bert\.pooler\.dense\.bias"):
        runner_of(model)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    # It says whether the model takes token types, so without it scores might be wrong.
    model = write_encoder(tmp_path / "model", "bert", num_labels=1)
    write_word_tokenizer(model)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        load_runner(config_of(model), SingleRank(), CPU, False)
