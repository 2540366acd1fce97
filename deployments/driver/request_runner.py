"""Runs a request over a resolved adapter, in the scheduler, until its stream is complete."""

import time
from collections.abc import Sequence

import msgspec

from configs.wire.adapters import AdapterKey, active_from
from configs.wire.sampling import FinishReason
from deployments.contract import Completion, ErrorKind, Failed, GenerateRequest, ReplyAddress
from deployments.driver.loop_handle import LoopHandle
from deployments.driver.streaming.streams import Streams, refusal, unavailable
from deployments.driver.usage import AdapterUsage
from scheduler.admission.limits import InvalidRequest, Overloaded
from scheduler.events import Event
from scheduler.request import Request
from scheduler.scheduler import Scheduler


class RequestRunner:
    """Runs requests to their end; lives on the replica's event loop."""

    def __init__(self, handle: LoopHandle, streams: Streams, usage: AdapterUsage) -> None:
        self._handle = handle
        self._streams = streams
        self._usage = usage

    async def run(
        self,
        request: GenerateRequest,
        key: AdapterKey | None,
        parts: Sequence[AdapterKey],
        invocation: Sequence[int],
        arrived: float,
        reply_to: ReplyAddress | None,
        origin: str = "",
    ) -> Completion:
        """Run all sequences to their end; cancelling this call ends them within two steps.

        key: the adapter's, held by the caller; None for the base model. parts: of a merge.
        invocation: the tokens that activate the adapter; () for one that is active always.
        arrived: seconds of the monotonic clock. reply_to: None sends no frames. origin: as in
        `TokenRun`.
        """
        own = key, arrived, tuple(dict.fromkeys(parts)), request.cache_salt, request.background
        sequences = [
            Request(
                (request.id, i),
                s.prompt,
                s.sampling,
                s.stopping,
                *own,
                active_from=active_from(s.prompt, invocation),
                resumed=request.resubmissions > 0,
                given=s.generated,
                given_logprobs=s.logprobs,
            )
            for i, s in enumerate(request.sequences)
        ]
        try:
            msgspec.msgpack.encode(request.sequences)
        except (OverflowError, UnicodeEncodeError) as error:
            # A plan that cannot be encoded would end the loop, and every other request with it.
            return refusal(request, Failed(ErrorKind.VALIDATION, f"not a token request: {error}"))
        completion = self._streams.open(request, reply_to, origin)
        if self._handle.failure is not None:  # The loop may have failed since the caller looked.
            self._streams.fail_all(unavailable(self._handle.failure))
        try:
            self._handle.post(lambda scheduler, now: self._admit(scheduler, sequences, now))
            ended = await completion
        finally:
            self._cancel(request.id)
        self._usage.finished(request, ended, time.monotonic() - arrived)
        return ended

    def finish(self, request_id: str, index: int, at: int) -> None:
        """End a sequence after `at` generated tokens: the ingress matched a stop string."""
        sequence, reason = (request_id, index), FinishReason.STOP_STRING
        self._handle.post(lambda scheduler, now: scheduler.finish(sequence, at, reason))

    def _admit(
        self, scheduler: Scheduler, sequences: Sequence[Request], now: float
    ) -> Sequence[Event]:
        """Add all sequences of one HTTP request, or none; runs on the engine loop's thread."""
        ended: list[Event] = []
        try:
            for sequence in sequences:
                # Of several sequences some may have ended on the driver that was lost.
                if (reason := sequence.given_end) is not None:
                    ended.append(sequence.ended(reason))
                else:
                    scheduler.add(sequence, now)
        except Overloaded as error:
            failure = Failed(ErrorKind.OVERLOADED, str(error), error.retry_after_s)
        except InvalidRequest as error:
            failure = Failed(ErrorKind.VALIDATION, str(error))
        else:
            return ended
        request_id = sequences[0].id[0]
        # Streams belong to the event loop, and this is the engine loop's thread.
        self._handle.call_soon(self._streams.fail, request_id, failure)
        return [event for sequence in sequences for event in scheduler.cancel(sequence.id)]

    def _cancel(self, request_id: str) -> None:
        """Close the request's stream and cancel the sequences that the scheduler still has."""
        open_ids = [(request_id, index) for index in self._streams.close(request_id)]
        if open_ids:
            self._handle.post(
                lambda scheduler, now: [e for i in open_ids for e in scheduler.cancel(i)]
            )
