"""The pause of a batch whose line the server refused."""

import asyncio
import time

from deployments.batch_runner.requests import LONGEST_WAIT_S, LineReply

_TRIAL_SECONDS = 2.0


class Pause:
    """Holds a batch's lines back after a refusal; then its next line goes alone, on trial."""

    def __init__(self) -> None:
        self._until = 0.0
        self._backoff = 1.0
        self._needs_trial = False

    @property
    def holds(self) -> bool:
        """Whether no line may be sent now."""
        return time.monotonic() < self._until

    def begin(self, refusal: LineReply) -> None:
        """Pause for as long as the refusal says, or go on pausing if others said longer."""
        wait = refusal.seconds_to_wait(self._backoff)
        self._until = max(self._until, time.monotonic() + wait)
        self._needs_trial = True

    async def over(self) -> None:
        """Wait until the pause is over, by what is known of it now."""
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))

    async def trial(self, line: asyncio.Task[None]) -> None:
        """If this is the first line after a pause, wait for its reply.

        A refusal comes soon, so a line that runs for some seconds was not refused.
        """
        if self._needs_trial:
            self._needs_trial = False
            await asyncio.wait({line}, timeout=_TRIAL_SECONDS)
            # A refusal begins the next pause, which needs a trial again.
            self._backoff = min(2 * self._backoff, LONGEST_WAIT_S) if self._needs_trial else 1.0
