"""Serve's request router for the driver: every handle of the driver has one."""

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
from deployments.early_submit import replica_selected


class AdapterRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests to the driver replicas that hold their adapters, as `RoutingPolicy` says.

    Serve pickles this module by value, so it has only what Serve calls. Nothing here may raise:
    the request would wait for ever.
    """

    # Serve's 0.1 s is short: waiting for a replica that has the adapter costs less than loading it.
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, **kwargs: Any) -> None:
        """Set up; Serve's constructor calls this."""
        self._routing = RoutingPolicy(random.Random())
        self._selected_for: WeakKeyDictionary[asyncio.Task[Any], PendingRequest] = (
            WeakKeyDictionary()
        )
        self._open: Counter[str] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the present replicas and their last reports."""
        stats = {replica.replica_id.unique_id: replica.routing_stats for replica in replicas}
        for removed in self._open.keys() - stats.keys():
            del self._open[removed]
        self._routing.update(stats, self._open, time.monotonic())
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups in the order in which Serve tries them until one is not full."""
        if len(candidate_replicas) > 1:
            # Requests that have a replica are sent meanwhile, and then count. Otherwise all
            # requests of a burst would find the same replica idle.
            await asyncio.sleep(0)
        task = asyncio.current_task()
        if pending_request is not None and task is not None:
            pending_request.routing_context.should_backoff = True
            self._selected_for[task] = pending_request
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counts = {name: self._open[name] for name in by_name}
        adapter, now = _adapter(pending_request), time.monotonic()
        groups = self._routing.order(adapter, counts, now)
        if adapter is not None and groups:
            self._routing.selected(adapter, groups[0][0], now)
        return [[by_name[name] for name in group] for group in groups]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent to a replica.

        Serve's own count is the one that a replica reported when it accepted a request. By gRPC
        that report comes with the reply, when it is long out of date.
        """
        super().on_send_request(replica_id)
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request that has ended; Serve calls this once for each."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._open[replica_id.unique_id] > 0:
            self._open[replica_id.unique_id] -= 1

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that Serve selects, and sends the request to at once."""
        replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        name = replica.replica_id.unique_id
        replica_selected(name)
        self._routing.sent(_adapter(pending_request), name, time.monotonic())
        return replica

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """The request for which this task selected a replica.

        Serve's own method finds it by an id that all calls of one HTTP request share, and forgets
        the id with the first call: a second one at the same time would wait for ever.
        """
        task = asyncio.current_task()
        pending = self._selected_for.get(task) if task is not None else None
        return pending if pending is not None and not pending.future.done() else None


def _adapter(pending: PendingRequest | None) -> AdapterReference | None:
    """The adapter that a call of the driver is about."""
    for argument in pending.args if pending is not None else ():
        if isinstance(argument, GenerateRequest):
            return argument.adapter
        if isinstance(argument, AdapterReference):
            return argument
    return None
