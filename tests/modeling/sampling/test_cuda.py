"""Adjustments on a GPU: the CPU's bits, and no wait for the device."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.grammars import Grammars
from modeling.sampling.history import TokenHistory
from modeling.sampling.sampler import sample_tokens
from modeling.sampling.tensors import SamplingTensors, sampling_tensors
from modeling.transfer import no_waits
from tests.fakes import EOS, token_id, write_tokenizer

pytestmark = pytest.mark.gpu

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


def tensors_of(tokens: Tensor) -> SamplingTensors:
    slots = np.arange(len(PARAMS))
    targets = slots * WIDTH + np.array(LENGTHS)
    history = TokenHistory(tokens, targets, np.full(len(PARAMS), 6), slots)
    return sampling_tensors(PARAMS, LENGTHS, tokens.device, history)


def test_tokens_are_the_cpus() -> None:
    found = [
        sample_tokens(logits(device), tensors_of(buffer(device))).tokens.tolist()
        for device in (torch.device("cpu"), torch.device("cuda"))
    ]
    assert found[0] == found[1]


def test_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda")
    tokens, values = buffer(device), logits(device)
    sample_tokens(values, tensors_of(tokens))
    with no_waits():
        sample_tokens(values, tensors_of(tokens))


def held(folder: Path, slots: int) -> Grammars:
    """Two letters for every row."""
    eos = token_id(write_tokenizer(folder), EOS)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    grammars = Grammars(lambda: folder, VOCAB)
    assert grammars.prepare(0, "start: /[a-z][0-9]/") == ""
    for slot in range(slots):
        grammars.join(slot, 0)
    return grammars


def test_masks_are_the_cpus(tmp_path: Path) -> None:
    """A letter, then a digit, then the end: rows beside them are as they would be."""
    pytest.importorskip("llguidance")
    params = [Sampling(grammar="start: /[a-z][0-9]/"), Sampling(), Sampling(grammar="start: /x/")]
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        grammars, steps = held(tmp_path, 1), []
        assert grammars.prepare(1, "start: /x/") == ""
        grammars.join(2, 1)
        for length in range(3):
            slots, ends = np.arange(3), [6 + length] * 3
            targets = slots * WIDTH + np.array(ends)
            history = TokenHistory(buffer(device), targets, np.full(3, 6), slots, grammars)
            sampled = sample_tokens(
                logits(device)[:3], sampling_tensors(params, ends, device, history)
            )
            grammars.advance([0, 1, 2], sampled.tokens)
            steps.append(sampled.tokens.tolist())
        found.append(steps)
    assert found[0] == found[1]
    assert found[0][0][1] == int(logits(torch.device("cpu"))[1].argmax())


def test_masks_wait_for_their_own_step_and_for_nothing_after_it(tmp_path: Path) -> None:
    """The device is busy with the next step when they are requested, and still when they come."""
    pytest.importorskip("llguidance")
    device = torch.device("cuda")
    letter = write_tokenizer(tmp_path).encode("a", add_special_tokens=False).ids[0]
    for _ in range(2):  # The first time takes pinned memory, which waits for the device.
        grammars = held(tmp_path, 2)
        begin = grammars.masks([0, 1], device)
        torch.cuda.synchronize()
        grammars.advance([0, 1], torch.full((2,), letter, device=device))
        torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
        after = torch.cuda.Event()  # type: ignore[no-untyped-call]
        after.record()
        masks = grammars.masks([0, 1], device)
        busy = not after.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    assert busy
    assert not torch.equal(masks, begin)
