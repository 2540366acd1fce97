"""Adjustments on a GPU: the CPU's bits, and no wait for the device."""

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.sampling import Sampling
from modeling.sampling.history import TokenHistory
from modeling.sampling.sampler import choose
from modeling.sampling.tensors import SamplingTensors, sampling_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB, WIDTH = 1000, 64
PARAMS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.5),
    Sampling(watermark=True, logit_bias=((5, -100.0), (7, 3.25))),
    Sampling(masked_ids=(3, 4), masked_tokens=50, repetition_penalty=0.8, watermark=True),
    Sampling(temperature=0.8, seed=5, min_p=0.05, typical_p=0.9, presence_penalty=1.5),
]
LENGTHS = [9, 40, 23, 31, 60]


def buffer(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 60, (len(PARAMS) * WIDTH,), generator=generator).to(device)


def logits(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(len(PARAMS), VOCAB, generator=generator) * 3).to(device)


def asked(tokens: Tensor) -> SamplingTensors:
    places = np.arange(len(PARAMS))
    targets = places * WIDTH + np.array(LENGTHS)
    history = TokenHistory(tokens, targets, np.full(len(PARAMS), 6), places)
    return sampling_tensors(PARAMS, LENGTHS, tokens.device, history)


def test_tokens_are_the_cpus() -> None:
    found = [
        choose(logits(device), asked(buffer(device))).tokens.tolist()
        for device in (torch.device("cpu"), torch.device("cuda"))
    ]
    assert found[0] == found[1]


def test_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda")
    tokens, values = buffer(device), logits(device)
    choose(values, asked(tokens))
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(values, asked(tokens))
    finally:
        torch.cuda.set_sync_debug_mode("default")
