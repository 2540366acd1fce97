"""Handles the events of the connections to ingress replicas."""

from deployments.contract import GenerateRequest, ReplyAddress
from deployments.driver.request_runner import RequestRunner
from deployments.driver.streaming.early_submit import EarlySubmits
from deployments.driver.streaming.streams import Streams
from deployments.frames import Finish


class IngressDispatch:
    """Passes each event of `IngressConnections` to the part that handles it."""

    def __init__(
        self, runner: RequestRunner, early_submits: EarlySubmits, streams: Streams
    ) -> None:
        self._runner = runner
        self._early_submits = early_submits
        self._streams = streams

    def on_finish(self, finish: Finish) -> None:
        """A stop string ended a sequence."""
        self._runner.finish(finish.request_id, finish.index, finish.at)

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        """Run a request before its call arrives."""
        self._early_submits.start(request, address)

    def on_withdraw(self, request_id: str) -> None:
        """Cancel an early submit: its call is not coming."""
        self._early_submits.withdraw(request_id)

    def on_room(self, address: ReplyAddress) -> None:
        """Send the tokens that this ingress replica had no room for."""
        self._streams.resend(address)

    def on_lost(self, address: ReplyAddress) -> None:
        """End the requests of an ingress replica that is gone."""
        self._early_submits.ingress_lost(address)
        self._streams.abandon(address)
