"""A stage for stories: the loop of a driver over fake ranks, and its clients."""

from collections import deque
from dataclasses import dataclass, field, replace

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey, AdapterRefusal
from configs.wire.plan import StepPlan, StepResult
from configs.wire.sampling import FinishReason, Pooling, Sampling
from scheduler.adapters.resident import AdapterState
from scheduler.admission.limits import InvalidRequest
from scheduler.events import (
    AdapterArrived,
    AdapterEvent,
    AdapterFailed,
    AdapterFailure,
    AdapterLoaded,
    AdapterPinned,
    AdapterStaged,
    AdapterUnloaded,
    AdapterWanted,
    ClientCancelled,
    ConstraintFailure,
    Ended,
    NewTokens,
    RanksFailure,
    RequestEvent,
    RequestId,
)
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.automaton import FakeRanks, about, alone
from tests.strategies import (
    Action,
    Arrive,
    Cancel,
    LoseGroup,
    Pin,
    Relimit,
    Reshare,
    Story,
    Ticks,
    Unload,
    Want,
)


@dataclass
class Client:
    """One arrival and what came of it."""

    arrival: Arrive
    id: RequestId
    arrived: int
    received: list[int] = field(default_factory=list)
    ended: Ended | None = None
    cancelled: bool = False
    stop_due: int | None = None
    first_tick: int | None = None


class Stage:
    """The loop of a driver over fake ranks; every transition is followed by `check`."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.scheduler = Scheduler(story.limits, story.capacity)
        self.clients: list[Client] = []
        self.tick = 0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.staging: dict[AdapterKey, int] = {}
        self.loading: dict[AdapterKey, int] = {}
        self.making: dict[int, int] = {}
        self.has_failed: set[AdapterKey] = set()
        self.wanted: set[AdapterKey] = set()
        self.computed = 0  # positions, over all plans
        self.num_losses = 0
        self.ranks = self._new_ranks()
        self.set_shares(story.shares)

    def set_shares(self, shares: dict[AdapterKey | None, AdapterShare]) -> None:
        even = AdapterShare()
        own = {key: share for key, share in shares.items() if key is not None}
        self.scheduler.set_shares(shares.get(None, even), even, own)

    def play(self) -> None:
        """Act the story, then run until all is quiet; a story without end is an error."""
        for action in self.story.actions:
            self.act(action)
        self.run(self.patience())
        for _ in range(60):
            self.go_round()  # what is only wanted may still be on its way, or come back for room
        self.run(self.patience())
        self.check_end()

    def run(self, max_ticks: int) -> None:
        deadline = self.tick + max_ticks
        while self.scheduler.has_work:
            assert self.tick < deadline, f"still at work: {self.scheduler.snapshot()}"
            self.go_round()

    def patience(self) -> int:
        """Ticks that surely suffice if every tick computes something."""
        work = sum(client.arrival.stopping.max_new_tokens + 20 for client in self.clients)
        waits = 5 * (self.story.limits.patience_steps + max(self.story.delays.values(), default=0))
        rates = [s.tokens_per_second for s in self.story.all_shares() if s.tokens_per_second]
        tokens = sum(
            len(client.arrival.prompt) + client.arrival.stopping.max_new_tokens
            for client in self.clients
        )
        in_debt = int(tokens / min(rates)) + 10 if rates else 0
        return 100 + 4 * work + (len(self.clients) + 5) * waits + in_debt

    def act(self, action: Action) -> None:
        match action:
            case Arrive():
                self.arrive(action)
            case Cancel(index) if index < len(self.clients):
                self.clients[index].cancelled = True
                self.receive(self.scheduler.cancel(self.clients[index].id))
            case Ticks(count):
                for _ in range(count):
                    self.go_round()
            case LoseGroup():
                self.lose_group()
            case Pin(key, pinned):
                self.send(AdapterPinned(key, pinned))
            case Unload(key):
                self.send(AdapterUnloaded(key))
            case Want(key):
                self.wanted.add(key)
                self.send(AdapterWanted(key))
            case Reshare(shares):
                self.set_shares(shares)
            case Relimit(tokens):
                first = self.story.limits
                tokens = min(tokens, first.max_step_tokens)
                self.scheduler.reconfigure(replace(first, max_step_tokens=tokens))
        self.scheduler.check()

    def arrive(self, arrival: Arrive) -> Client:
        client = Client(arrival, ("r", len(self.clients)), self.tick)
        request = Request(
            id=client.id,
            prompt=list(arrival.prompt),
            sampling=Sampling(
                logprobs=0 if arrival.logprobs else -1,
                prompt_logprobs=0 if arrival.scored else -1,
                pooling=Pooling.MEAN if arrival.pooled else Pooling.NONE,
                grammar=arrival.constraint,
            ),
            stopping=arrival.stopping,
            adapter=arrival.adapter,
            arrival=float(self.tick),
            parts=self.story.merges.get(arrival.adapter, ()) if arrival.adapter else (),
            background=arrival.background,
            active_from=arrival.active_from if arrival.adapter else 0,
            cache_salt=arrival.salt,
        )
        try:
            self.scheduler.add(request, float(self.tick))
        except InvalidRequest:
            return client
        self.clients.append(client)
        return client

    def go_round(self) -> None:
        """One round of the loop: reply, schedule, send, and apply when enough is in flight."""
        self.tick += 1
        self.answer_staging()
        self.answer_loading()
        self.answer_making()
        self.match_stop_strings()
        plan = self.scheduler.schedule(float(self.tick))
        self.scheduler.check()
        if not plan.empty:
            self.in_flight.append((plan, self.ranks.execute(plan)))
        self.computed += sum(row.length for row in plan.rows)
        for load in plan.loads:
            self.loading[load.key] = self.tick + 1 + self.story.copies.get(load.key, 0)
        if self.tick in self.story.meanwhile:
            self.act(self.story.meanwhile[self.tick])
        if plan.empty or len(self.in_flight) >= self.story.limits.steps_ahead:
            self.apply_oldest()

    def apply_oldest(self) -> None:
        if not self.in_flight:
            return
        plan, result = self.in_flight.popleft()
        events = self.scheduler.apply(plan, result, float(self.tick))
        self.ranks.applied(plan)
        self.receive(events)
        self.scheduler.check()

    def answer_staging(self) -> None:
        for key in self.scheduler.to_stage():
            assert key not in self.staging, f"adapter {key} is named twice"
            self.staging[key] = self.tick + self.story.delays.get(key, 0)
        for key in [key for key, due in self.staging.items() if due <= self.tick]:
            del self.staging[key]
            if key in self.story.failing and key not in self.has_failed:
                self.has_failed.add(key)
                self.send(AdapterFailed(key, AdapterRefusal.UNAVAILABLE, "no such file"))
            else:
                shape = self.story.shapes[key]
                self.send(AdapterStaged(key, shape, kept=self.ranks.stage(key, shape)))

    def answer_loading(self) -> None:
        for key in [key for key, due in self.loading.items() if due <= self.tick]:
            del self.loading[key]
            self.ranks.loaded(key)
            self.send(AdapterLoaded(key))

    def answer_making(self) -> None:
        for command in self.scheduler.matchers_to_prepare():
            assert command.number not in self.making, "a matcher is made twice"
            assert command.number not in self.ranks.matchers, "a matcher is made again"
            for number in command.released:
                del self.ranks.matchers[number]
            self.making[command.number] = self.tick + self.story.making
            held = len(self.making) + len(self.ranks.matchers)
            assert held <= self.story.limits.max_matchers
        for number in [number for number, due in self.making.items() if due <= self.tick]:
            del self.making[number]
            self.ranks.matchers[number] = set()
            self.receive(self.scheduler.matcher_prepared(number, ""))
            self.scheduler.check()

    def match_stop_strings(self) -> None:
        for client in self.clients:
            at = client.arrival.stop_at
            if client.stop_due is not None and client.stop_due <= self.tick and at is not None:
                client.stop_due = None
                self.receive(self.scheduler.finish(client.id, at))
                self.scheduler.check()

    def lose_group(self) -> None:
        self.num_losses += 1
        stale = list(self.in_flight)
        self.in_flight.clear()
        self.staging.clear()
        self.loading.clear()
        self.making.clear()
        self.receive(self.scheduler.group_lost())
        self.scheduler.check()
        self.ranks = self._new_ranks()
        for plan, result in stale:
            assert self.scheduler.apply(plan, result, float(self.tick)) == []

    def send(self, event: AdapterEvent) -> None:
        events = self.scheduler.handle_adapter_event(event)
        for arrived in [each for each in events if isinstance(each, AdapterArrived)]:
            assert arrived.key in self.wanted, "not requested, or replied before"
            self.wanted.remove(arrived.key)
        self.receive([each for each in events if not isinstance(each, AdapterArrived)])
        self.scheduler.check()

    def receive(self, events: list[RequestEvent]) -> None:
        for event in events:
            client = self.clients[event.request_id[1]]
            assert client.ended is None, f"{event} after the end"
            if isinstance(event, NewTokens):
                self._receive_tokens(client, event)
            else:
                client.ended = event
                self.check_ended(client, event)

    def check_ended(self, client: Client, event: Ended) -> None:
        arrival = client.arrival
        expected, reason = alone(arrival, self.story.capacity.rope_sets)
        assert event.tokens == expected[: len(event.tokens)], "tokens differ from those alone"
        assert event.tokens == client.received[: len(event.tokens)]
        self.check_cached(client, event.cached_tokens)
        if arrival.logprobs:
            assert event.logprobs is not None
            assert [-each.logprob for each in event.logprobs] == event.tokens
        else:
            assert event.logprobs is None
        match event.ending:
            case FinishReason.STOP_STRING:
                assert len(event.tokens) == arrival.stop_at
            case FinishReason():
                assert (event.tokens, event.ending) == (expected, reason)
                self.check_prompt_report(arrival, event)
            case ClientCancelled():
                assert client.cancelled
            case ConstraintFailure():
                assert arrival.constraint
                assert len(event.tokens) >= self.story.wear, "another wore its lexer out"
            case RanksFailure(message):
                assert self.num_losses >= 3 or "less memory" in message
            case AdapterFailure(refusal):
                assert arrival.adapter is not None
                large = refusal is AdapterRefusal.TOO_LARGE
                assert large or arrival.adapter in self.has_failed

    def check_cached(self, client: Client, count: int) -> None:
        """What was cached of a prompt, another with the same salt and adapter has computed."""
        own, states = client.arrival, self.story.capacity.kept_states
        assert 0 <= count <= len(own.prompt)
        assert not count or states != 0
        assert not count or any(
            other is not client
            and other.arrival.salt == own.salt
            and (*other.arrival.prompt, *other.received)[:count] == own.prompt[:count]
            and all(other.arrival.adapter_at(i) == own.adapter_at(i) for i in range(count))
            for other in self.clients
        )

    def check_prompt_report(self, arrival: Arrive, event: Ended) -> None:
        """The whole prompt was reported once, if that was requested."""
        scores, embedding = about(arrival, self.story.capacity.rope_sets)
        assert event.prompt_logprobs == (scores if arrival.scored else None)
        assert event.embedding == (embedding if arrival.pooled else b"")
        if arrival.scored or arrival.pooled:
            assert event.cached_tokens == 0, "a cached position reports nothing"

    def check_end(self) -> None:
        """Every request has ended, and nothing is held any more."""
        assert all(client.ended is not None for client in self.clients)
        snapshot = self.scheduler.snapshot()
        assert snapshot.queued == snapshot.running == snapshot.draining == 0
        assert snapshot.plans_in_flight == 0
        kept = self.scheduler.adapter_states()
        assert self.wanted <= set(kept), "an adapter with an open request was forgotten"
        assert {kept[key] for key in self.wanted} <= {AdapterState.DISK}, "it was not answered"
        assert snapshot.free_blocks == snapshot.num_blocks
        self.scheduler.check()

    def _receive_tokens(self, client: Client, event: NewTokens) -> None:
        assert event.start == len(client.received), "a gap or an overlap"
        if client.first_tick is None:
            client.first_tick = self.tick
        client.received += event.tokens
        at = client.arrival.stop_at
        if at is not None and client.stop_due is None and len(client.received) >= at:
            client.stop_due = self.tick + 1 + client.arrival.late

    def _new_ranks(self) -> FakeRanks:
        epoch, story = self.scheduler.epoch, self.story
        ranks = FakeRanks(story.capacity, story.limits.max_running, epoch)
        ranks.wear = story.wear
        return ranks


def play(story: Story) -> Stage:
    """Play a whole story; any broken promise is an AssertionError."""
    stage = Stage(story)
    stage.play()
    return stage
