"""Which requests get a draft in a step, and what becomes of drafts that the ranks checked.

A row with a draft may begin with a token that a plan in flight samples, as every row may; the
draft then guesses that token too. A row behind a draft that is still checked begins where that one
ends, if it will probably be right. Otherwise its request waits. Where a draft was wrong, rows in
flight behind it are void. Their keys and values, and those of wrong tokens, are overwritten by the
request's next row, and no block with them is in the prefix cache: that takes blocks of known
tokens alone.
"""

from configs.wire.plan import StepRow
from scheduler.admission.limits import Limits
from scheduler.request import Request
from scheduler.step import StepBuilder


def next_draft(
    request: Request, step: StepBuilder, limits: Limits, num_running: int
) -> tuple[int, ...] | None:
    """The draft behind a running request's next token, () for none; None: no row in this step.

    num_running: requests of which each may still need a token of the step's budget.
    """
    drafter, guessed, alone = request.drafter, request.drafts, num_running == 1
    unknown = request.pending - len(guessed)
    if guessed and (unknown > 1 or not drafter.is_sure(alone)):
        return None
    if unknown > 1 or num_running > limits.max_drafting or request.sampling.constraint:
        return ()
    room = request.max_total - request.total - 1
    most = min(limits.max_draft_tokens, step.budget - num_running, room)
    length = min(most, drafter.length(request.total, alone)) if most > 0 else 0
    if not length:
        return ()
    return drafter.find(request.tokens, length + unknown, guessed)[unknown:]


def right_samples(request: Request, row: StepRow, sampled: list[int]) -> list[int]:
    """The samples of a row up to the first that is not its draft's; the draft is checked now."""
    pairs = enumerate(zip(row.drafts, sampled, strict=False))
    count = next((at for at, (draft, token) in pairs if draft != token), len(row.drafts))
    request.drafter.verified(len(row.drafts), count)
    if count < len(row.drafts):
        request.scheduled = row.start + row.length - len(row.drafts) + count
        request.pending, request.drafts = 0, ()
    elif not request.pending:
        request.drafts = ()
    return sampled[: count + 1]
