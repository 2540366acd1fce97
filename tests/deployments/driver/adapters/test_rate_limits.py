"""Shares by name reach the scheduler by the content of the name."""

import pytest

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource, parse_reference
from configs.wire.merging import MergeRule
from deployments.driver.adapters.rate_limits import NamedRateLimits
from deployments.driver.loop import Command
from deployments.driver.loop_handle import LoopHandle
from scheduler.admission.limits import Limits
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity

ONE, TWO = AdapterKey(1), AdapterKey(2)


class RunAtOnce(LoopHandle):
    """A scheduler that hears what is posted at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(Limits(), capacity())
        self.num_commands = 0

    def post(self, command: Command) -> None:
        self.num_commands += 1
        assert not command(self.scheduler, 0.0)

    def weight(self, key: AdapterKey | None) -> float:
        return self.scheduler._admission.rate_limits.share_of(key).weight


def runtime(**adapters: float) -> RuntimeConfig:
    shares = {name.replace("__", "@"): {"weight": weight} for name, weight in adapters.items()}
    return RuntimeConfig.model_validate(
        {"adapters": shares, "adapter_default": {"weight": 5}, "base_model": {"weight": 7}}
    )


def test_a_names_share_is_applied_at_its_first_request() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.HUB, handle)
    shares.configure(runtime(red=2, blue__v2=3), [])
    assert (handle.weight(None), handle.weight(ONE)) == (7, 5)
    for text, key in (("red", ONE), ("red", ONE), ("blue@v1", TWO), ("blue@v2", AdapterKey(3))):
        shares.adapter_seen(parse_reference(text, AdapterSource.HUB), key)
    assert (handle.weight(ONE), handle.weight(TWO), handle.weight(AdapterKey(3))) == (2, 5, 3)
    assert handle.num_commands == 3, "no share is sent twice"


def test_all_revisions_have_the_names_share_but_those_with_their_own() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.LOCAL, handle)
    shares.configure(runtime(red=2, red__v9=4), [])
    shares.adapter_seen(parse_reference("red@v1", AdapterSource.LOCAL), ONE)
    shares.adapter_seen(parse_reference("local:red@v9", AdapterSource.HUB), TWO)
    assert (handle.weight(ONE), handle.weight(TWO)) == (2, 4)


def test_of_two_names_of_one_content_the_first_in_the_config_counts() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.HUB, handle)
    shares.configure(runtime(first=2, second=3), [])
    for text in ("second", "first", "second"):
        shares.adapter_seen(parse_reference(text, AdapterSource.HUB), ONE)
    assert handle.weight(ONE) == 2


def test_a_merge_applies_the_shares_of_its_parts() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.HUB, handle)
    shares.configure(runtime(red=2, blue=3), [])
    parts = tuple(parse_reference(text, AdapterSource.HUB) for text in ("red", "blue@v1"))
    rule = MergeRule((1.0, 1.0))
    merge = AdapterReference(AdapterSource.HUB, "red,blue@v1", parts=parts, rule=rule)
    shares.adapter_seen(merge, AdapterKey(9), (ONE, TWO))
    assert [handle.weight(key) for key in (ONE, TWO, AdapterKey(9))] == [2, 3, 5]


def test_an_edited_config_counts_for_what_is_known_already() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.HUB, handle)
    red = parse_reference("red", AdapterSource.HUB)
    shares.configure(runtime(red=2), [(red, ONE)])
    assert handle.weight(ONE) == 2
    shares.configure(runtime(red=9), [(red, ONE)])
    assert handle.weight(ONE) == 9
    shares.configure(RuntimeConfig(), [(red, ONE)])
    assert handle.weight(ONE) == 1


def test_a_name_that_cannot_be_parsed_changes_nothing() -> None:
    handle = RunAtOnce()
    shares = NamedRateLimits(AdapterSource.HUB, handle)
    with pytest.raises(ValueError, match="needs a name"):
        shares.configure(RuntimeConfig.model_validate({"adapters": {" ": {}}}), [])
    assert handle.num_commands == 0


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0}, {"max_concurrent": 0}, {"tokens_per_second": 0}, {"priority": 9}, {"wait": 1}],
)
def test_an_invalid_share_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RuntimeConfig.model_validate({"adapters": {"red": wrong}})
