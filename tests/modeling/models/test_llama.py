"""What only Llama has: sharded files, layers of another kind, LoRAX's signatures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modeling.models import llama
from sharding.group import SingleRank
from tests.checkpoints import oracle_logits, write_llama
from tests.modeling.models.paged_checks import (
    SEQUENCE,
    Checkpoint,
    assert_close,
    check_flash_signature,
    names,
    opened,
)
from tests.modeling.models.stepping import Stepper, load


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(write_llama(tmp_path_factory.mktemp("gqa"), "gqa"))


def test_a_sharded_checkpoint_is_the_same_model(gqa: Checkpoint, tmp_path: Path) -> None:
    folder = write_llama(tmp_path, "gqa", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    logits = Stepper(load(folder, SingleRank())).step([(0, SEQUENCE)])
    assert_close(logits, [oracle_logits(gqa.oracle, SEQUENCE)])


def test_another_kind_of_layer_can_be_created(gqa: Checkpoint) -> None:
    from configs.architectures.select import load_architecture
    from sharding.checkpoint import SafetensorsCheckpoint
    from sharding.loader import Weights

    made: list[tuple[int, str]] = []

    def create(layer_id: int, prefix: str, config: Any, weights: Weights) -> nn.Module:
        made.append((layer_id, prefix))
        return llama.FlashLlamaLayer(layer_id, prefix, config, weights)

    source = SafetensorsCheckpoint(gqa.folder)
    weights = Weights(source, SingleRank(), torch.float32, torch.device("cpu"))
    config = load_architecture(gqa.folder)
    assert isinstance(config, llama.LlamaConfig)
    model = llama.FlashLlamaForCausalLM("", config, weights, create)
    weights.finish()
    assert made == [(0, "model"), (1, "model")]
    logits = Stepper(model).step([(0, SEQUENCE)])
    assert_close(logits, [oracle_logits(gqa.oracle, SEQUENCE)])


def test_the_seeds_signatures() -> None:
    decoder = ["prefix", "config", "weights", "create_layer_fn"]
    assert names(llama.FlashLlamaForCausalLM.__init__) == decoder
    assert names(llama.FlashLlamaModel.__init__) == decoder
    layer = ["layer_id", "prefix", "config", "weights"]
    assert names(llama.FlashLlamaLayer.__init__) == layer
    for part in (llama.FlashLlamaAttention, llama.LlamaMLP):
        assert names(part.__init__)[:3] == ["prefix", "config", "weights"]
    assert issubclass(llama.LlamaRMSNorm, nn.Module)
    assert llama.LlamaConfig.__name__ == "Architecture"
    check_flash_signature(llama.FlashLlamaForCausalLM)
