"""When CUDA graphs are recorded beside steps: one at a time, and half of the time at most."""

from unittest.mock import create_autospec

from deployments.driver.later_graphs import LaterGraphs
from deployments.rank.messages import Recorded
from deployments.rank.transport import RankLinks
from tests.deployments.driver.fake_ranks import FakeGroup


def test_busy_ranks_rest_as_long_as_they_record() -> None:
    links, group, now = create_autospec(RankLinks, instance=True), FakeGroup(2), 10.0
    graphs = LaterGraphs(lambda: now)
    graphs.request(links, busy=False)
    assert links.send.call_count == 0
    group.graphs_left = 3
    graphs.begin([group._report(rank) for rank in range(2)])
    graphs.request(links, busy=True)
    graphs.request(links, busy=False)
    assert links.send.call_count == 1
    now = 11.0
    graphs.recorded(Recorded(0, 2))
    graphs.request(links, busy=False)
    assert links.send.call_count == 1
    graphs.recorded(Recorded(1, 2))
    now = 11.9
    graphs.request(links, busy=True)
    assert links.send.call_count == 1
    now = 12.0
    graphs.request(links, busy=True)
    assert links.send.call_count == 2
    graphs.recorded(Recorded(0, 0))
    graphs.recorded(Recorded(1, 0))
    graphs.request(links, busy=False)
    assert links.send.call_count == 2
