"""The two ends' deltas against their equations, on every rank's run of an uneven vocabulary."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.wire.adapters import AdapterKey, FetchedAdapter
from modeling.adapters.bank import AdapterBank, BankSize
from modeling.adapters.kernels.reference import reference_batch
from modeling.adapters.product import OutputSlice
from modeling.adapters.vocabulary import (
    EndNames,
    VocabularyAdapters,
    adapts_more,
    vocabulary_projections,
)
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.loader import Weights
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.sharding.views import LoneRank

CPU = torch.device("cpu")
VOCAB, HIDDEN, RANKS = 9, 32, 4  # runs of 3, 3, 3 and 0 token ids
SLOTS = np.array([-1, 2, 2, -1, 2])
IDS = torch.tensor([4, 0, 8, 2, 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("vocabulary")
    model = write_llama(root / "model", vocab_size=VOCAB)
    targets = ("embed_tokens", "lm_head")
    recipe = AdapterRecipe(r=11, alpha=22, target_modules=targets, save_embeddings=True)
    return model, write_adapter(root / "adapter", model, recipe)


def bank_of(rank: int, folders: tuple[Path, Path]) -> AdapterBank:
    weights = Weights(SafetensorsCheckpoint(folders[0]), LoneRank(rank, RANKS), torch.float32, CPU)
    embedding = VocabParallelEmbedding("model.embed_tokens", VOCAB, HIDDEN, weights)
    head = ParallelHead("lm_head", VOCAB, HIDDEN, weights)
    names = EndNames("model.embed_tokens", "lm_head")
    ends = vocabulary_projections(names, embedding, head)
    bank = AdapterBank(ends, BankSize(4, 3, 16, 2**20), torch.float32, CPU)
    bank.stage(FetchedAdapter(AdapterKey(1), "a", str(folders[1]), "a"))
    bank.load(AdapterKey(1), 2, [[3, 1], [0, 2]])
    return bank


def batch_of(bank: AdapterBank) -> VocabularyAdapters:
    layers = reference_batch(bank, SLOTS.tolist(), [1] * len(SLOTS))
    return VocabularyAdapters(layers, bank, SLOTS, SLOTS[[4, 0, 2]])


def factors(folders: tuple[Path, Path], end: str) -> tuple[Tensor, Tensor]:
    tensors = load_file(folders[1] / "adapter_model.safetensors")
    names = sorted(name for name in tensors if end in name and "lora_" in name)
    a, b = (tensors[name] for name in names)
    return a, 2 * b  # alpha / r


def test_the_ranks_embedding_deltas_sum_to_the_whole(folders: tuple[Path, Path]) -> None:
    total = torch.zeros(5, HIDDEN)
    for rank in range(RANKS):
        bank = bank_of(rank, folders)
        start, stop = min(3 * rank, VOCAB), min(3 * rank + 3, VOCAB)
        foreign = (start > IDS) | (stop <= IDS)
        batch_of(bank).embed(total, (IDS - start).masked_fill(foreign, 0), foreign)
    a, b = factors(folders, "embed_tokens")
    expected = (a[:, IDS].T @ b.T) * torch.from_numpy(SLOTS >= 0).unsqueeze(1)
    torch.testing.assert_close(total, expected)


def test_each_ranks_logits_deltas_are_its_own_columns(folders: tuple[Path, Path]) -> None:
    x = torch.randn(3, HIDDEN)
    a, b = factors(folders, "lm_head")
    expected = x @ a.T @ b.T
    expected[1] = 0  # the base model's row
    for rank in range(RANKS):
        z = torch.zeros(3, 3)
        batch_of(bank_of(rank, folders)).logits(z, x)
        own = expected[:, 3 * rank : 3 * rank + 3]
        torch.testing.assert_close(z[:, : own.shape[1]], own)
        assert not z[:, own.shape[1] :].any()  # padding


def test_logits_of_other_rows_than_announced(folders: tuple[Path, Path]) -> None:
    with pytest.raises(AssertionError):
        batch_of(bank_of(0, folders)).logits(torch.zeros(5, 3), torch.zeros(5, HIDDEN))


def test_layers_are_the_kernels_own(folders: tuple[Path, Path]) -> None:
    batch, x = batch_of(bank_of(0, folders)), torch.randn(5, HIDDEN)
    y = torch.zeros(5, 3)
    batch.add(y, x, 0, (OutputSlice(1, 0),))
    a, b = factors(folders, "lm_head")
    torch.testing.assert_close(y[4], x[4] @ a.T @ b[:3].T)


def test_which_adapters_change_the_vocabulary(folders: tuple[Path, Path]) -> None:
    bank = bank_of(0, folders)
    assert adapts_more(bank, [-1, 2])
    assert not adapts_more(bank, [-1, 1])  # nothing was loaded there
    assert not adapts_more(bank, [-1])
