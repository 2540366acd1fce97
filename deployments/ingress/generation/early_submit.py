"""One request's head start: it goes by the frames' socket as soon as its driver is chosen."""

import asyncio

from deployments.contract import GenerateRequest
from deployments.frames import FrameReceiver


class EarlySubmitter:
    """Follows one call of `generate`: told of its replicas, it sends the request ahead of it.

    A context manager around the call: an end by an exception takes the head start back. What
    cannot go ahead goes with the call alone, which is the truth in any case.
    """

    def __init__(self, receiver: FrameReceiver, request: GenerateRequest) -> None:
        """No replica is chosen yet; must run on the receiver's event loop."""
        self._receiver = receiver
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._replica: str | None = None
        self._ended = False

    def replica_selected(self, replica: str) -> None:
        """Send it to this replica, and take it back from the one before; from any event loop.

        Serve's router runs on another loop outside of throughput mode, where a hand-over would
        cost what the head start gains: there is none then.
        """
        if self._ended or replica == self._replica or asyncio.get_running_loop() is not self._loop:
            return
        self._withdraw()
        if self._receiver.submit_early(replica, self._request):
            self._replica = replica

    def __enter__(self) -> "EarlySubmitter":
        """Nothing is sent yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The call ended; one that did not return an answer wants none any more."""
        self._ended = True
        if kind is not None:
            self._withdraw()

    def _withdraw(self) -> None:
        if self._replica is not None:
            self._receiver.withdraw(self._replica, self._request.id)
            self._replica = None
