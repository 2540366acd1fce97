"""When ranks record the CUDA graphs that their start has left, beside the steps."""

import logging
import time
from collections.abc import Callable, Sequence

from deployments.rank.messages import LoadReport, Recorded, RecordGraph
from deployments.rank.transport import RankLinks

logger = logging.getLogger("loray.driver.loop")


class LaterGraphs:
    """One graph after the other: at once while nothing runs, else for half of the time.

    No step begins while a graph is recorded, for 0.1 to 0.5 s. Until a step's graph is there, its
    kernels are launched one by one, which takes longer but is right.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_ranks = 0
        self._left = 0
        self._waiting = 0
        self._sent = 0.0
        self._began = self._rest_until = 0.0

    def begin(self, reports: Sequence[LoadReport]) -> None:
        """Begin anew, with ranks that have just started."""
        self._num_ranks = len(reports)
        self._left = max(report.graphs_left for report in reports)
        self._waiting = 0
        self._began, self._rest_until = self._clock(), 0.0

    def request(self, links: RankLinks, busy: bool) -> None:
        """Have every rank record a graph, if it is time; busy: steps are in flight.

        All ranks receive it between the same steps, for they sum in a recording too.
        """
        now = self._clock()
        if self._left and not self._waiting and (not busy or now >= self._rest_until):
            self._sent, self._waiting = now, self._num_ranks
            links.send(RecordGraph())

    def recorded(self, report: Recorded) -> None:
        """Take a rank's answer; the last one's allows the next graph."""
        self._waiting -= 1
        if not self._waiting:
            now = self._clock()
            self._left = report.left
            self._rest_until = now + (now - self._sent)
            if not self._left:
                logger.info("all CUDA graphs are recorded, %.1f s after start", now - self._began)
