"""Steps of nobody: what a runner computes before the first request, to measure and to warm up."""

from collections.abc import Iterator, Sequence

from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.input_batch import BatchSize

EVERYTHING = Sampling(
    temperature=1.0, top_k=5, top_p=0.9, logprobs=1, min_p=0.01, typical_p=0.9,
    repetition_penalty=1.1, frequency_penalty=0.1, watermark=True, logit_bias=((0, 1.0),),
)  # fmt: skip
"""Parameters that take every path of the sampler."""

WIDEST = Sampling(
    temperature=1.0, top_p=0.9, typical_p=0.9, logprobs=0, repetition_penalty=1.1, watermark=True,
    prompt_logprobs=0,
)  # fmt: skip
"""Parameters whose rows take the most memory."""

TOKENS = (64, 512)
"""Tokens of rehearsed steps beside the most: kernels come in sizes for few, for some, for many."""


def widest_step(size: BatchSize, max_step_tokens: int) -> ForwardBatch:
    """Every place computes its share of the tokens and draws one, each in blocks of its own."""
    length = min(max_step_tokens // size.max_running, size.max_total_tokens)
    count = -(-length // size.block_size)
    places = range(size.max_running)
    blocks = [list(range(place * count, (place + 1) * count)) for place in places]
    return _prefill(blocks, length, -1, WIDEST)


def warmup_batches(
    size: BatchSize, max_step_tokens: int, scratch_page: int, slots: Sequence[int]
) -> Iterator[ForwardBatch]:
    """Steps of few, some and most tokens for each adapter slot: prefill, then mixed with decode.

    Everything lies in one page that nobody owns, so the results mean nothing.
    """
    for tokens in sorted({min(n, max_step_tokens) for n in (*TOKENS, max_step_tokens)}):
        longest = size.max_total_tokens - 1
        num_rows = min(max(2, -(-tokens // longest)), size.max_running, tokens)
        length = min(tokens // num_rows, longest)
        blocks = [[scratch_page] * (-(-length // size.block_size))] * num_rows
        for slot in slots:
            first = _prefill(blocks, length, slot, EVERYTHING)
            yield first
            crosses = length % size.block_size == 0
            decode = StepRow(0, length, 1, [scratch_page] if crosses else [], True)
            yield ForwardBatch(first.joins[1:], [decode, *first.rows[1:]])


def _prefill(
    blocks: Sequence[list[int]], length: int, slot: int, sampling: Sampling
) -> ForwardBatch:
    """As many new requests as there are block tables, all of one length."""
    return ForwardBatch(
        joins=[
            RequestJoin(place, [0] * length, length, slot, sampling) for place in range(len(blocks))
        ],
        rows=[StepRow(place, 0, length, own, True) for place, own in enumerate(blocks)],
    )
