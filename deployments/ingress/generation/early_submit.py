"""Submits a request early, over the frames' socket, when its driver replica is selected."""

import asyncio

from deployments.contract import GenerateRequest
from deployments.frames import FrameReceiver


class EarlySubmitter:
    """Sends the request of one `generate` call early to the replica that Serve selects for it.

    A context manager around the call; an exception withdraws the early submit. The call contains
    the request too, so an early submit may be lost without harm.
    """

    def __init__(self, receiver: FrameReceiver, request: GenerateRequest) -> None:
        """Must run on the receiver's event loop."""
        self._receiver = receiver
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._replica: str | None = None
        self._ended = False

    def replica_selected(self, replica: str) -> None:
        """Submit to this replica and withdraw from the previous one; from any event loop."""
        # Outside of throughput mode Serve's router runs on another loop. To change to this one
        # would cost as much as the early submit saves, so none is sent.
        if self._ended or replica == self._replica or asyncio.get_running_loop() is not self._loop:
            return
        self._withdraw()
        if self._receiver.submit_early(replica, self._request):
            self._replica = replica

    def __enter__(self) -> "EarlySubmitter":
        """Nothing to do: `replica_selected` submits."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The call ended; withdraw the request if it failed."""
        self._ended = True
        if kind is not None:
            self._withdraw()

    def _withdraw(self) -> None:
        if self._replica is not None:
            self._receiver.withdraw(self._replica, self._request.id)
            self._replica = None
