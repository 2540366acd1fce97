"""What a runner tells about prompts, against transformers and PEFT."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.wire.sampling import Pooling, Sampling
from tests.modeling.stepping import Answer, Asked
from tests.oracle import MIN_SHIFT, TOLERANCE, final_states, prompt_logits, truth

NUM_TOP = 3
NUM_TOKENS = 5

_OTHERS: list[tuple[Pooling, Callable[[Tensor], Tensor]]] = [
    (Pooling.MAX, lambda states: states.amax(0)),
    (Pooling.CLS, lambda states: states[0]),
]

Prompts = Sequence[tuple[Path | None, list[int]]]
"""(adapter, prompt) of each client."""


def prompt_of(length: int, vocab_size: int) -> list[int]:
    """A seeded prompt; the longer one does not begin as the shorter one does."""
    generator = torch.Generator().manual_seed(100 + length)
    ids: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
    return ids


def questions(told: Prompts, chunk: int, rejoins_at: int | None = None) -> list[Asked]:
    """Five requests for each prompt: scored and generating, scored alone, and three embeddings.

    Every other scored one asks for alternatives; rejoins_at: as in Asked, for the generating ones.
    """
    adapters = list(dict.fromkeys(folder for folder, _ in told if folder is not None))
    asked = []
    for i, (folder, prompt) in enumerate(told):
        slot = -1 if folder is None else adapters.index(folder)
        scored = Sampling(prompt_logprobs=NUM_TOP if i % 2 else 0, logprobs=0)
        asked += [
            Asked(prompt, NUM_TOKENS, slot, scored, chunk + i, 2 * i, rejoins_at),
            Asked(prompt, 0, slot, scored, chunk, 1 + i),
            Asked(prompt, 0, slot, Sampling(pooling=Pooling.MEAN), chunk + i, i),
            Asked(prompt, 0, slot, Sampling(pooling=Pooling.LAST), chunk + 1, 2 * i),
            Asked(prompt, 0, slot, Sampling(pooling=_OTHERS[i % 2][0]), chunk, i),
        ]
    return asked


def check_answers(
    model: Path,
    told: Prompts,
    asked: list[Asked],
    answers: list[Answer],
    tolerance: float = TOLERANCE,
) -> None:
    """Compare all that was told with the oracle, and the generated tokens too."""
    for i, (folder, prompt) in enumerate(told):
        own = answers[5 * i : 5 * i + 5]
        logprobs = prompt_logits(model, folder, prompt).double().log_softmax(-1)
        states = final_states(model, folder, prompt)
        for answer, question in zip(own[:2], asked[5 * i :], strict=False):
            num_top = question.sampling.prompt_logprobs
            _check_scores(answer, prompt, logprobs, num_top, tolerance)
        _check_embedding(own[2], states.mean(0), tolerance)
        _check_embedding(own[3], states[-1], tolerance)
        _check_embedding(own[4], _OTHERS[i % 2][1](states), tolerance)
        assert own[0].tokens == truth(model, folder, prompt).tokens[:NUM_TOKENS]
        assert all(not each.tokens for each in own[1:])
        if folder is not None:
            base = prompt_logits(model, None, prompt).double().log_softmax(-1)
            assert (base - logprobs).abs().max() >= MIN_SHIFT, "the adapter shows nowhere"


def _check_scores(
    answer: Answer, prompt: list[int], logprobs: Tensor, num_top: int, tolerance: float
) -> None:
    seen: set[int] = set()
    for part in answer.prompts:
        assert part.embedding == b""
        for position, found in enumerate(part.logprobs, part.first):
            seen.add(position)
            row = logprobs[position - 1]
            assert abs(found.logprob - float(row[prompt[position]])) <= tolerance
            best = row.topk(num_top).values
            assert len(found.top_ids) == num_top
            torch.testing.assert_close(row[found.top_ids], best, atol=tolerance, rtol=0)
            told = torch.tensor(found.top_logprobs, dtype=torch.float64)
            torch.testing.assert_close(told, best, atol=tolerance, rtol=0)
    assert seen == set(range(1, len(prompt))), "not every token of the prompt, or one too many"


def _check_embedding(answer: Answer, states: Tensor, tolerance: float) -> None:
    (embedding,) = [part.embedding for part in answer.prompts if part.embedding]
    assert all(not part.logprobs for part in answer.prompts)
    found = torch.from_numpy(np.frombuffer(embedding, dtype="<f4").copy())
    torch.testing.assert_close(found, states, atol=tolerance, rtol=0)
