"""The kernels choose the reference's tokens, whatever the parameters and the logits.

On a GPU, or without one by Triton's interpreter: TRITON_INTERPRET=1, and numpy below 2.4.
"""

import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling import adjustments as adjusting
from modeling.sampling.adjustments import Adjustments, adjust, adjustments
from modeling.sampling.history import TokenHistory
from modeling.sampling.kernels.select import _triton_kernels
from modeling.sampling.sampler import logprobs_of, sample_tokens
from modeling.sampling.tensors import sampling_tensors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # numpy, which stands for the device, warns where infinities cancel and integers wrap.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

SIZES = [1, 2, 7, 300, 5000] if INTERPRETED else [1, 7, 5000, 50257, 128256]
INF = float("inf")


def drawn(logits: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The tokens that the kernels choose."""
    from modeling.sampling.kernels.sampler import draw

    found = sampling_tensors(params, positions, DEVICE).random
    assert found is not None
    tokens = torch.full((len(params),), -1, device=DEVICE)
    draw(logits.to(DEVICE), found, tokens)
    return [int(token) for token in tokens.tolist()]


def reference(logits: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    tokens: list[int] = sample_tokens(
        logits, sampling_tensors(params, positions, CPU)
    ).tokens.tolist()
    return tokens


def some_logits(rng: random.Random, rows: int, vocab: int) -> Tensor:
    """Flat or steep, with many equal ones or few, with masked ones or none."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    logits = torch.randn(rows, vocab, generator=generator) * rng.choice([0.0, 0.01, 1, 1.3, 4, 20])
    if rng.random() < 0.3:
        logits = (logits * 2).round()
    if rng.random() < 0.3:
        logits[:, :: rng.randint(1, 4)] = -INF
    if not INTERPRETED and rng.random() < 0.6:
        return logits.bfloat16()
    return logits.bfloat16().float() if rng.random() < 0.5 else logits


def some_params(rng: random.Random, vocab: int) -> Sampling:
    return Sampling(
        temperature=rng.choice([1e-7, 0.05, 0.7, 1.0, 1.0, 3.0, 1e9]),
        seed=rng.getrandbits(64),
        top_k=rng.choice([0, 0, 1, 5, 50, vocab // 2, vocab, vocab + 7]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9, 0.99999, 1 - 2**-24]),
        min_p=rng.choice([0.0, 0.0, 1e-4, 0.05, 0.5, 1.0]),
        typical_p=rng.choice([1.0, 1.0, 1.0, 0.9, 0.2, 1e-9, 0.9999]),
    )


@pytest.mark.parametrize("vocab", SIZES)
def test_tokens_are_the_references(vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(2 if INTERPRETED else 4):
        rows = rng.randint(1, 4 if INTERPRETED else 12)
        logits = some_logits(rng, rows, vocab)
        params = [some_params(rng, vocab) for _ in range(rows)]
        positions = [rng.randrange(10000) for _ in range(rows)]
        expected = reference(logits, params, positions)
        found = drawn(logits, params, positions)
        assert found == expected, [
            (params[row], found[row], expected[row])
            for row in range(rows)
            if found[row] != expected[row]
        ]


def test_guessed_tokens_are_the_references() -> None:
    """Some are kept at once, some after another guess, some by the cut; half of all are equal."""
    rng = random.Random(1)
    rows, vocab = 8, SIZES[3]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    logits[::2] = (logits[::2] * 2).round()
    kinds = [
        Sampling(temperature=1.0, top_p=0.95),
        Sampling(temperature=1.0, typical_p=0.9),
        Sampling(temperature=1.0, top_p=0.5),
        Sampling(temperature=1.0, top_p=0.7, min_p=0.1),
    ]
    params = [replace(kinds[row % 4], seed=rng.getrandbits(64)) for row in range(rows)]
    positions = [rng.randrange(10000) for _ in range(rows)]
    assert drawn(logits, params, positions) == reference(logits, params, positions)


def adjusted_rows(device: torch.device, vocab: int) -> Adjustments:
    """Penalties, watermarks, masks and biases over tokens that repeat, in 6 rows of 3 kinds."""
    tokens = torch.randint(0, 40, (6 * 400,), generator=torch.Generator().manual_seed(vocab))
    kinds = [
        Sampling(repetition_penalty=1.3, frequency_penalty=0.7, logit_bias=((5, 2.5),)),
        Sampling(watermark=True, presence_penalty=-0.5, allowed_ids=(0, 3, 39, vocab - 1)),
        Sampling(repetition_penalty=0.8, watermark=True, masked_ids=(3, 4), masked_tokens=999),
    ]
    lengths = [1, 50, 256, 257, 399, 120]
    ends = np.arange(6) * 400 + np.array(lengths)
    prompts = np.array([1, 20, 250, 100, 0, 60])
    history = TokenHistory(tokens.to(device), ends, prompts, np.arange(6))
    found = adjustments([kinds[row % 3] for row in range(6)], lengths, history, device)
    assert found is not None
    return found


@pytest.mark.parametrize("vocab", SIZES[3:])
def test_adjusted_logits_are_the_references(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    expected = adjust(logits, adjusted_rows(CPU, vocab))
    kernels = _triton_kernels()
    assert kernels is not None
    monkeypatch.setattr(adjusting, "sampling_kernels", lambda device: kernels)
    found = adjust(logits.to(DEVICE), adjusted_rows(DEVICE, vocab))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("num_top", [0, 5])
@pytest.mark.parametrize("vocab", SIZES)
def test_logprobs_are_torchs(vocab: int, num_top: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[0, :-1] = -INF
    tokens = torch.tensor([vocab - 1, 0, vocab // 2])
    expected = logprobs_of(logits, tokens, num_top)
    kernels = _triton_kernels()
    assert kernels is not None
    found = kernels.logprobs(logits.to(DEVICE), tokens.to(DEVICE), min(num_top, vocab))
    own, ids, top = (tensor.cpu() for tensor in found)
    torch.testing.assert_close(own, expected.logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top, expected.top_logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[1:], expected.top_ids[1:])


def test_best_is_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, SIZES[-1])
    logits[1, 4000:] = 2.0
    logits[2] = -INF
    kernels = _triton_kernels()
    assert kernels is not None
    assert kernels.best(logits.to(DEVICE)).tolist() == [0, 4000, 0]
