"""A driver deployment over a timed rank, which keeps the times of first tokens."""

from pathlib import Path

from benchmarks.timed_ranks import TimedRanks
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from configs.wire.plan import Capacity
from deployments.contract import Completion, GenerateRequest, ReplyAddress
from deployments.driver.deployment import DriverDeployment
from deployments.driver.rank_start import RankGroup


class TimedDriver(DriverDeployment):
    """The driver, except for its ranks."""

    async def __init__(  # type: ignore[misc]
        self, config: ServeConfig, capacity: Capacity, step_seconds: float, tokens: range
    ) -> None:
        """capacity, step_seconds, tokens: as in TimedRanks."""
        self._timed = (capacity, step_seconds, tokens)
        self._firsts: list[float] = []
        await super().__init__(config)

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """One HTTP request, to its end."""
        completion = await super().generate(request, reply_to)
        self._firsts += [outcome.first_token_seconds for outcome in completion.sequences]
        return completion

    async def take_firsts(self) -> list[float]:
        """Seconds from arrival to first token of each request since the last call."""
        taken, self._firsts = self._firsts, []
        return taken

    async def leads(self) -> tuple[int, float]:
        """How many requests ran before Serve's call arrived, and by how many seconds in all."""
        early = self._running.early_submits
        return early.num_attached, early.lead_seconds

    def _group(self, engine: EngineConfig, folder: Path) -> RankGroup:
        return TimedRanks(*self._timed)
