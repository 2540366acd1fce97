"""Which requests get a draft in a step, and what becomes of drafts that the ranks checked.

A row with a draft begins with a token that is known, so its request waits until no plan in flight
samples for it; all others run one step ahead meanwhile. Keys and values of wrong tokens are
overwritten by the request's next row, and no block with them is in the prefix cache: that takes
blocks of known tokens alone.
"""

from collections.abc import Sequence

from scheduler.admission.limits import Limits
from scheduler.request import Request
from scheduler.step import StepBuilder


def next_draft(
    request: Request, step: StepBuilder, limits: Limits, num_running: int
) -> tuple[int, ...] | None:
    """The draft behind a running request's next token, () for none; None: no row in this step.

    num_running: requests of which each may still need a token of the step's budget.
    """
    if request.num_drafted:
        return None  # A plan in flight checks a draft: how many tokens it brings is not known.
    if num_running > limits.max_drafting or request.sampling.constraint:
        return ()
    drafter = request.drafter
    most = min(
        limits.max_draft_tokens,
        step.budget - num_running,
        request.max_total - request.total - 1,
    )
    length = min(most, drafter.length(request.total, num_running == 1)) if most > 0 else 0
    if not length:
        return ()
    draft = drafter.find(request.tokens, length)
    if request.pending:
        # Only a text that goes on as before is worth the wait.
        request.waits_for_draft = bool(draft)
        return None if draft else ()
    if request.waits_for_draft and not draft:
        drafter.failed()
    request.waits_for_draft = False
    return draft


def right_samples(request: Request, drafts: Sequence[int], sampled: list[int]) -> list[int]:
    """The samples of a row up to the first that is not the draft's; the draft is checked now."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    count = next((at for at, (draft, token) in pairs if draft != token), len(drafts))
    request.num_drafted = 0
    request.scheduled -= len(drafts) - count
    request.drafter.verified(len(drafts), count)
    return sampled[: count + 1]
