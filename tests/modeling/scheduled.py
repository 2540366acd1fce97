"""A runner under the real scheduler, in one thread: what a driver and its ranks do, without links.

The scheduler is deterministic and every rank samples the same tokens, so each rank of a group runs
one of its own.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.plan import StepPlan, TokenLogprobs
from configs.wire.sampling import Stopping
from deployments.rank.host import capacity_of
from deployments.rank.worker import step_result
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.paged import ModelRunner
from scheduler.admission.limits import Limits
from scheduler.events import AdapterLoaded, AdapterStaged, Ended, NewTokens, RequestEvent
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from sharding.group import TensorParallel
from tests.modeling.staging import stage
from tests.modeling.stepping import Answer, Asked

MAX_RUNNING = 16
WHOLE = 200
"""A chunk that holds any prompt here."""


LONGEST_STORY = 2000
"""Steps; the stories that are told here end long before."""


class Ranks:
    """One rank's runner and its scheduler.

    start: makes a runner, for every group anew. folders: of adapters, by the slots that requests
    name. chunk: tokens of prompts in a step, beside those of answers. group: the ranks'. drafts:
    tokens of a draft, at most.
    """

    def __init__(
        self,
        start: Callable[[], ModelRunner],
        folders: Sequence[Path] = (),
        chunk: int = WHOLE,
        group: TensorParallel | None = None,
        drafts: int = 0,
    ) -> None:
        self._start = start
        self._group = group
        self._folders = folders
        self.runner = start()
        tokens = chunk + MAX_RUNNING * (1 + drafts)
        limits = Limits(tokens, chunk, MAX_RUNNING, max_draft_tokens=drafts)
        self.scheduler = Scheduler(limits, capacity_of(self.runner.report))
        self._flying: deque[tuple[StepPlan, StepOutput]] = deque()
        self.answers: dict[object, Answer] = {}
        self.ended: dict[object, Ended] = {}

    def ask(self, index: int, asked: Asked, salt: bytes = b"") -> None:
        """Add a request; its adapter is the folder at its slot."""
        adapter = None if asked.slot < 0 else AdapterKey(asked.slot + 1)
        request = Request(
            ("r", index), list(asked.prompt), asked.sampling, Stopping(asked.num_tokens), adapter
        )
        request.cache_salt, request.active_from = salt, asked.active_from
        self.answers[request.id] = Answer()
        self.scheduler.add(request, 0.0)

    def turn(self) -> bool:
        """Launch the next plan, or take the oldest result; whether anything was done."""
        self._stage()
        self._prepare()
        plan = self.scheduler.schedule(0.0)
        if not plan.empty:
            self._launch(plan)
            return True
        if not self._flying:
            return False
        self._land()
        return True

    def run(self, steps: int = LONGEST_STORY) -> None:
        """Go on until nothing is left to do, or for so many turns."""
        for _ in range(steps):
            if not self.turn():
                return
        assert steps < LONGEST_STORY, "the story has no end"

    def lose(self) -> None:
        """The ranks are gone with all plans in flight, and others start in their place."""
        for _, output in self._flying:
            output.wait()
        self._flying.clear()
        self.scheduler.group_lost()
        self.runner = self._start()
        self.scheduler.regroup(capacity_of(self.runner.report))

    def _stage(self) -> None:
        for key in self.scheduler.to_stage():
            folder = self._folders[int(key) - 1]
            fetched = FetchedAdapter(key, folder.name, str(folder), folder.name)
            shape = stage(self.runner, fetched, self._group)
            self.scheduler.handle_adapter_event(AdapterStaged(key, shape))

    def _prepare(self) -> None:
        for wanted in self.scheduler.matchers_to_prepare():
            fault = self.runner.prepare(wanted.number, wanted.constraint, wanted.released)
            self._take(self.scheduler.matcher_prepared(wanted.number, fault))

    def _launch(self, plan: StepPlan) -> None:
        for fill in plan.loads:
            self.runner.load_adapter(fill.key, fill.slot, fill.pages)
        for key in plan.drops:
            self.runner.drop(key)
        batch = ForwardBatch(plan.joins, plan.rows, plan.guesses)
        self._flying.append((plan, self.runner.step(batch)))
        for fill in plan.loads:
            self.scheduler.handle_adapter_event(AdapterLoaded(fill.key))

    def _land(self) -> None:
        plan, output = self._flying.popleft()
        self._take(self.scheduler.apply(plan, step_result(plan, output.wait(), 0.0), 0.0))
        self.scheduler.check()

    def _take(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, NewTokens):
                answer = self.answers[event.request_id]
                answer.tokens += event.tokens
                answer.logprobs += [
                    TokenLogprobs(one.logprob, one.top_ids, one.top_logprobs)
                    for one in event.logprobs or ()
                ]
            else:
                self.ended[event.request_id] = event


def generate_scheduled(
    ranks: Ranks, requests: Sequence[Asked], lost_at: int | None = None
) -> list[Answer]:
    """Run all requests together; each joins at its own turn.

    lost_at: after how many turns the ranks are lost and rebuilt; None for never.
    """
    waiting = deque(sorted(range(len(requests)), key=lambda i: requests[i].joins_at))
    for turn in range(LONGEST_STORY):
        while waiting and requests[waiting[0]].joins_at <= turn:
            index = waiting.popleft()
            ranks.ask(index, requests[index])
        if turn == lost_at:
            ranks.lose()
        if not ranks.turn() and not waiting:
            break
    return [ranks.answers["r", index] for index in range(len(requests))]
