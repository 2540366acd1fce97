"""The Serve shell of the routing: the router that every handle of the driver has."""

import asyncio
import random
import time
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from configs.wire.adapters import AdapterReference
from deployments.contract import GenerateRequest
from deployments.driver.routing.policy import RoutingPolicy
from deployments.early_submit import replica_chosen


class AdapterRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests to the driver replicas that hold their adapters, as `RoutingPolicy` says.

    Serve pickles this module by value, so it holds no more than what Serve calls. A request whose
    choice raises would wait for ever: nothing here does.
    """

    # Serve's 0.1 s is short: to wait for a holder costs less than to move its adapter.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve's constructor for what is ours."""
        self._routing = RoutingPolicy(random.Random())
        self._chosen_for: WeakKeyDictionary[asyncio.Task[Any], PendingRequest] = WeakKeyDictionary()
        self._open: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came, went, or reported."""
        stats = {replica.replica_id.unique_id: replica.routing_stats for replica in replicas}
        for gone in self._open.keys() - stats.keys():
            del self._open[gone]
        self._routing.update(stats, self._open, time.monotonic())
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups in the order in which Serve tries them; it asks who is full, and pauses."""
        if len(candidate_replicas) > 1:
            # Requests for which a replica was chosen are sent now, and count: else all of a burst
            # would find the same replica idle.
            await asyncio.sleep(0)
        task = asyncio.current_task()
        if pending_request is not None and task is not None:
            pending_request.routing_context.should_backoff = True
            self._chosen_for[task] = pending_request
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counts = {name: self._open[name] for name in by_name}
        adapter, now = _adapter(pending_request), time.monotonic()
        order = self._routing.order(adapter, counts, now)
        if adapter is not None and order:
            self._routing.chosen(adapter, order[0][0], now)
        return [[by_name[name] for name in group] for group in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """A request leaves for a replica.

        Serve's own count is set to what a replica told as it accepted a request, which by gRPC
        comes only with the answer, when it is long past.
        """
        super().on_send_request(replica_id)
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request that was sent has ended, in whatever way; Serve says so once for each."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._open[replica_id.unique_id] > 0:
            self._open[replica_id.unique_id] -= 1

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica, to which Serve sends the request at once: no later word says so in time."""
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        chosen = replica.replica_id.unique_id
        replica_chosen(chosen)
        self._routing.sent(_adapter(pending_request), chosen, time.monotonic())
        return replica

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """The request for which this task chose a replica.

        Serve's own way finds it by an id that all calls of one HTTP request share, and forgets
        the id with the first of them: of two at a time the other would wait for ever.
        """
        task = asyncio.current_task()
        pending = self._chosen_for.get(task) if task is not None else None
        return pending if pending is not None and not pending.future.done() else None


def _adapter(pending: PendingRequest | None) -> AdapterReference | None:
    """The adapter that a call of the driver is about."""
    for argument in pending.args if pending is not None else ():
        if isinstance(argument, GenerateRequest):
            return argument.adapter
        if isinstance(argument, AdapterReference):
            return argument
    return None
