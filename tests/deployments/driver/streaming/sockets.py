"""Ingress replicas whose sockets take so many frames and then none."""

from deployments.contract import ReplyAddress, TokenFrame
from deployments.ingress.generation.frames import RequestInbox, RequestInboxes

HERE, THERE = ReplyAddress("a", 1, ""), ReplyAddress("b", 2, "")


class Sockets:
    """Replicas that take `room` frames each, and then none until they are given room again."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = {HERE: room, THERE: room}
        self.inboxes = {HERE: RequestInboxes(), THERE: RequestInboxes()}
        self.frames: list[TokenFrame] = []

    def has_room(self, address: ReplyAddress) -> bool:
        return self.room[address] > 0

    def send(self, address: ReplyAddress, frame: TokenFrame) -> bool:
        if not self.has_room(address):
            return False
        self.room[address] -= 1
        self.frames.append(frame)
        self.inboxes[address].deliver(frame)
        return True


def heard(inbox: RequestInbox, index: int = 0) -> list[int]:
    """What the ingress could write by now."""
    update = inbox._channels[index].take(index)
    assert update.logprobs is None or len(update.logprobs) == len(update.tokens)
    return update.tokens
