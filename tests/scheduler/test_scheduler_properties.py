"""Whole stories, whatever happens in them: every promise of the scheduler at once."""

from hypothesis import HealthCheck, given, settings

from tests.scheduler.stage import play
from tests.strategies import Story, stories

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=600, deadline=None, suppress_health_check=SLOW)
@given(stories())
def test_every_story_ends_well(story: Story) -> None:
    play(story)
