"""Steps without requests: a runner computes them at start, to measure and to warm up."""

from collections.abc import Iterator, Sequence

import msgspec

from configs.engine import MOST_DRAFTED, SpeculationConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import ALL_PARAMETERS, Sampling
from modeling.batch import ForwardBatch
from modeling.runner.block_tables import BatchSize

WIDEST = Sampling(
    temperature=1.0, top_p=0.9, typical_p=0.9, logprobs=0, repetition_penalty=1.1, watermark=True,
    prompt_logprobs=0,
)  # fmt: skip
"""Parameters that need the most memory."""

DRAWN = Sampling(temperature=1.0, top_k=5, top_p=0.9, typical_p=0.9)
PENALISED = Sampling(repetition_penalty=1.1)
"""Parameters that take the sampler's paths over the model's own logits, and those of the best."""

TOKENS = (64, 512)
"""Tokens of warm-up steps beside the most: kernels differ for few, some and many tokens."""

INTEGER_TOKENS = (128, 192, 256, 384)
"""Tokens of more of them where weights are integers: their kernels differ (`TILED_CUTS`)."""


def widest_step(
    size: BatchSize, max_step_tokens: int, speculation: SpeculationConfig
) -> ForwardBatch:
    """Every batch slot computes its share of the tokens, in blocks of its own, and samples.

    As many rows have drafts as ever do in a step, of all tokens that they may.
    """
    length = min(max_step_tokens // size.max_running, size.max_total_tokens)
    count = size.blocks(length)
    slots = range(size.max_running)
    blocks = [list(range(slot * count, (slot + 1) * count)) for slot in slots]
    batch = _prefill(blocks, length, -1, WIDEST)
    drafts = (0,) * min(speculation.most_tokens, length - 1)
    count = min(speculation.max_running, MOST_DRAFTED // max(1, len(drafts)))
    drafted = [msgspec.structs.replace(row, drafts=drafts) for row in batch.rows[:count]]
    return ForwardBatch(batch.joins, drafted + batch.rows[count:])


def warmup_batches(
    size: BatchSize,
    max_step_tokens: int,
    dummy_block: int,
    slots: Sequence[int],
    more: Sequence[int] = (),
) -> Iterator[ForwardBatch]:
    """Steps of few, some and most tokens for each adapter slot: prefill, then mixed with decode.

    All rows read and write the dummy block, so the results mean nothing. more: tokens of more of
    them.
    """
    counts = sorted({min(n, max_step_tokens) for n in (*TOKENS, *more, max_step_tokens)})
    for tokens in counts:
        longest = size.max_total_tokens - 1
        num_rows = min(max(2, -(-tokens // longest)), size.max_running, tokens)
        length = min(tokens // num_rows, longest)
        blocks = [[dummy_block] * size.blocks(length)] * num_rows
        for slot in slots:
            first = _prefill(blocks, length, slot, ALL_PARAMETERS)
            yield first
            more = [dummy_block] * (size.blocks(length + 1) - size.blocks(length))
            decode = StepRow(0, length, 1, more, True)
            yield ForwardBatch(first.joins[1:], [decode, *first.rows[1:]])
        if tokens == counts[0]:
            yield _prefill(blocks, length, slots[0], DRAWN, Sampling())
            yield _prefill(blocks, length, slots[0], PENALISED)


def _prefill(
    blocks: Sequence[list[int]], length: int, slot: int, *sampling: Sampling
) -> ForwardBatch:
    """As many new requests as there are block tables, all of one length; parameters by turns."""
    own = (sampling * len(blocks))[: len(blocks)]
    return ForwardBatch(
        joins=[RequestJoin(i, [0] * length, length, slot, each) for i, each in enumerate(own)],
        rows=[StepRow(i, 0, length, table, True) for i, table in enumerate(blocks)],
    )
