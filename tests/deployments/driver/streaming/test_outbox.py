"""Tokens for replicas that are slow, gone, or never came: none is lost, none is kept long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.contract import TokenRun
from deployments.driver.streaming import outbox
from deployments.driver.streaming.outbox import Outbox
from tests.deployments.driver.streaming.sockets import HERE, THERE, Sockets, heard
from tests.fakes import token_logprobs


def token_run(start: int, name: str = "r", index: int = 0) -> TokenRun:
    skipped = [start] if start % 3 else []
    return TokenRun(name, index, start, [start], [token_logprobs(start, 1)], skipped=skipped)


def say(box: Outbox, start: int, name: str = "r") -> None:
    box.add(HERE, token_run(start, name))
    box.flush()


def test_a_stream_continues_as_soon_as_its_socket_has_room() -> None:
    sockets = Sockets()
    box = Outbox(sockets)
    inbox = sockets.inboxes[HERE].open("r", 1)
    say(box, 0)
    sockets.room[HERE] = 0
    for start in range(1, 6):
        say(box, start)
    assert heard(inbox) == [0]
    sockets.room[HERE] = 9
    box.resend(HERE)
    assert heard(inbox) == [1, 2, 3, 4, 5], "without another token, let alone the end"
    assert box.num_unsent == 0
    assert box.num_delayed == 5
    say(box, 6)
    assert heard(inbox) == [6]


def test_stored_tokens_are_sent_before_later_ones() -> None:
    sockets = Sockets(room=0)
    box = Outbox(sockets)
    inbox = sockets.inboxes[HERE].open("r", 1)
    for start in range(3):
        say(box, start)
    sockets.room[HERE] = 1
    say(box, 3)
    assert heard(inbox) == [0, 1, 2, 3]
    assert len(sockets.frames) == 1


def test_a_slow_replica_delays_no_other() -> None:
    sockets = Sockets()
    sockets.room[THERE] = 0
    box = Outbox(sockets)
    inbox = sockets.inboxes[HERE].open("r", 1)
    for start in range(4):
        box.add(THERE, token_run(start, "other"))
        say(box, start)
    assert heard(inbox) == [0, 1, 2, 3]
    assert box.num_unsent == 4


def test_each_token_is_stored_once_and_dropped_with_its_request() -> None:
    box = Outbox(Sockets(room=0))
    for start in range(100):
        for name in ("r", "s"):
            box.add(HERE, token_run(start, name))
            box.add(HERE, token_run(start, name, index=1))
        box.flush()
    assert box.num_unsent == 400
    box.forget(HERE, "r", 2)
    assert box.num_unsent == 200
    box.forget(THERE, "s", 2)
    box.drop(HERE)
    assert box.num_unsent == 0


def test_many_stored_tokens_are_sent_in_frames_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "_FRAME_TOKENS", 7)
    sockets = Sockets(room=0)
    box = Outbox(sockets)
    inboxes = [sockets.inboxes[HERE].open(name, 1) for name in "rst"]
    for start in range(20):
        for name in "rst":
            box.add(HERE, token_run(start, name))
        box.flush()
    sockets.room[HERE] = 4
    box.resend(HERE)
    assert box.num_unsent == 60 - 4 * 7
    sockets.room[HERE] = 99
    box.resend(HERE)
    assert [heard(inbox) for inbox in inboxes] == [list(range(20))] * 3
    sizes = [sum(len(run.tokens) for run in frame.runs) for frame in sockets.frames]
    assert max(sizes) == 7
    for frame in sockets.frames:
        for run in frame.runs:
            assert run.skipped == [token for token in run.tokens if token % 3]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_whatever_the_socket_does_tokens_come_once_in_order(
    rounds: list[tuple[int, int, bool]],
) -> None:
    """In each round some sequences get a token, and the socket takes frames or reports room."""
    sockets = Sockets(room=0)
    box = Outbox(sockets)
    inbox = sockets.inboxes[HERE].open("r", 3)
    said = [0, 0, 0]
    got: list[list[int]] = [[], [], []]
    for sequences, room, reply in rounds:
        sockets.room[HERE] = room
        for index in range(sequences):
            box.add(HERE, token_run(said[index], index=index))
            said[index] += 1
        box.flush()
        if reply:
            box.resend(HERE)
        for index in range(3):
            got[index] += heard(inbox, index)
        assert box.num_unsent == sum(said) - sum(map(len, got)), "kept, or heard"
        if room > 1 and (sequences or reply):
            assert box.num_unsent == 0
    assert got == [list(range(len(each))) for each in got]
