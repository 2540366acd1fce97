"""Whole stories, whatever happens in them: every promise of the scheduler at once."""

import pytest
from hypothesis import HealthCheck, given, settings

from scheduler.admission import admission_queue
from tests.scheduler.stage import play
from tests.strategies import Story, stories

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(stories())
def test_every_story_ends_well(story: Story) -> None:
    play(story)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(stories(num_adapters=8))
def test_every_story_ends_well_with_more_pending_loads_than_a_step_looks_at(story: Story) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_queue, "MAX_LOADS_SEEN", 1)
        play(story)
