"""StepCosts: how many prompt tokens fit into a step beside rows that generate.

What a step costs depends on the GPU, the model and the adapters, so it is learned while steps run:
the seconds of steps that only generate, and what a prompt token adds to one of the size that is
planned now. Sizes are corrected step by step, so the costs need not be a straight line.
"""

from collections.abc import Sequence

from scheduler.admission.limits import Limits
from scheduler.request import Request
from scheduler.step import StepBuilder

LEAST_TOKENS = 128
"""Fewer cost as much: a step reads all weights whatever its size."""

FIRST_TOKENS = 512
"""Before anything is known."""

ALIGNMENT = 128
"""Sizes of recorded steps are multiples of it, from there on; a step takes the next larger one."""

RISE, FALL = 0.5, 0.25
"""Of the newest step in an average: costs are believed sooner than savings."""

LEAST_SHARE = 2.0
"""Of a step without prompts: what prompts may always add to it."""

GROWTH = 1.5
"""From the size that was measured to the next one."""

PROBE_STEPS = 64
"""Steps with prompts in a row, at most, before one without them shows what decoding takes now."""

LONGEST = 2.0
"""Times the average: a step that took longer was disturbed, and counts as this."""


class StepCosts:
    """Learns from steps, given their prompt tokens and seconds.

    decode_s: of a step that only generates. token_s: what one prompt token adds. None: unknown.
    """

    def __init__(self) -> None:
        self.decode_s: float | None = None
        self.token_s: float | None = None
        self._budget = self._measured = FIRST_TOKENS
        self._applied_at = 0.0
        self._mixed = 0
        self._rows = 0

    def applied(self, step: StepBuilder, now: float) -> None:
        """Learn from a step that was applied at `now`, in seconds."""
        # Ranks run plans in order: a step begins when the one before it ends.
        self.record(step.tokens, step.generating, now - max(step.planned, self._applied_at))
        self._applied_at = now

    def prompt_budget(self, limits: Limits, generating: Sequence[Request]) -> int:
        """Prompt tokens beside these requests' next tokens, so that those come in time."""
        most = limits.max_mixed_prompt_tokens or limits.max_step_tokens
        # Requests of batches run in the background: gaps between their tokens do not matter.
        if limits.token_gap_s is None or all(request.background for request in generating):
            return most
        if self._is_probe(len(generating)):
            return 0
        return min(most, self.budget(limits.token_gap_s, len(generating)))

    def _is_probe(self, generating: int) -> bool:
        """Whether a step should have no prompts, to learn what it takes without."""
        self._mixed += 1
        if self._mixed <= PROBE_STEPS and generating <= GROWTH * self._rows:
            return False
        self._rows, self._mixed = generating, 0
        return True

    def record(self, tokens: int, generating: int, seconds: float) -> None:
        """A step computed so many tokens, `generating` of them the next ones of requests."""
        prompt_tokens = tokens - generating
        if not tokens:
            return
        if not prompt_tokens:
            # Of another number of rows it says little.
            is_alike = generating <= GROWTH * self._rows
            self.decode_s = _average(self.decode_s if is_alike else None, seconds)
            self._rows, self._mixed = generating, 0
        # What a token adds to a much smaller step says nothing about one of this size.
        elif prompt_tokens >= max(LEAST_TOKENS, self._budget / 2):
            before = (self.decode_s or 0.0) if generating else 0.0
            added = max(seconds - before, 0.0) / prompt_tokens
            self.token_s = _average(self.token_s, added)
            self._measured = prompt_tokens

    def budget(self, gap_s: float, generating: int) -> int:
        """Prompt tokens with which a step takes `gap_s` at most, beside so many generated ones.

        A step may always be three times as long as it is without prompts. Shorter ones cost
        throughput, and prompts would wait for ever where decoding alone takes long.
        """
        if not self.token_s:
            return FIRST_TOKENS
        decode_s = self.decode_s or 0.0
        room_s = max(gap_s - decode_s, LEAST_SHARE * decode_s)
        wanted = room_s / self.token_s
        # Step by step: what is known holds near the size that was measured.
        most = max(self._measured * GROWTH, self._measured + 2 * ALIGNMENT)
        tokens = int(min(max(wanted, self._measured / 2), most))
        aligned = (tokens + generating) // ALIGNMENT * ALIGNMENT - generating
        self._budget = max(aligned, LEAST_TOKENS)
        return self._budget


def _average(before: float | None, newest: float) -> float:
    # Results that arrive late make the step behind them take no time at all.
    if not before:
        return newest
    change = min(newest, LONGEST * before) - before
    return before + (RISE if change > 0 else FALL) * change
