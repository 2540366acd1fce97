"""What the table is made of: groups of cases, each group for one configuration of a server."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import churn, fairness
from benchmarks.fairness import Load, Terms
from benchmarks.open_loop import Arrivals
from benchmarks.serving import Case, standard_cases
from benchmarks.structured import Comparison
from benchmarks.workload import MIXED_RANKS, WorkloadRecipe, recipes

BASE = "base"
PLAIN_RANK, RESIDENT, FEW, CHURNED, CHECKS = 16, 32, 8, 128, 10
PAGE_ROWS = 8
"""Rank rows of one page of the server's pools."""


@dataclass(frozen=True)
class Start:
    """A server's start, over real weights, to its first answer."""

    name: str


@dataclass(frozen=True)
class Loading:
    """The weights' way to the device, by itself."""

    name: str


@dataclass(frozen=True)
class Fair:
    """An open loop and what its requests are like."""

    load: Load
    terms: Terms


@dataclass(frozen=True)
class Open:
    """Arrivals by chance; search: for the highest rate that meets the objective."""

    load: Arrivals
    search: bool


@dataclass(frozen=True)
class Play:
    """One case of a group: what is played, and the seconds that it takes on an H200.

    settle: ask all its adapters once before. cold: ask none of them before.
    """

    what: Case | Fair | Open | Comparison | Start | Loading
    seconds: float
    settle: bool = False
    cold: bool = False

    @property
    def name(self) -> str:
        """The case's name in results and figures."""
        match self.what:
            case Fair(load=Load(name=name)) | Open(load=Arrivals(name=name)):
                return name
            case Comparison(case=case):
                return case.name
            case named:
                return named.name

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it uses; at least the base model."""
        match self.what:
            case Case(models=models) | Comparison(case=Case(models=models)):
                return models
            case Open(load=Arrivals(models=models)):
                return models
            case Fair(load=load):
                return (*load.models, *([load.flood] if load.flood else []))
            case _:
                return (BASE,)


@dataclass(frozen=True)
class Scale:
    """How long and how many: the table's own, or small ones that two CPU cores finish.

    lengths: prompt and answer in tokens. requests: of a case, by its requests in flight. fair:
    options of benchmarks.fairness. open: changes of the open loop's arrivals. system, long: tokens
    of a prompt that many requests share, and of a long one.
    """

    lengths: tuple[int, int] = (512, 256)
    requests: Mapping[int, int] = field(default_factory=lambda: {1: 3, 64: 256, 256: 768})
    churn_lengths: tuple[int, int] = (256, 128)
    churn_requests: int = 384
    small_adapters: int = 1000
    fair: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 2
    conversation: int = 4000
    system: int = 1500
    long: int = 7000
    open: Mapping[str, Any] = field(default_factory=dict)


FULL = Scale()
SMALL = Scale(
    lengths=(32, 16),
    requests={1: 2, 64: 64, 256: 256},
    churn_lengths=(32, 16),
    churn_requests=128,
    small_adapters=64,
    fair={
        "requests": 16,
        "input_length": 32,
        "output_length": 16,
        "flood_depth": 8,
        "flood_lead_s": 1.0,
    },
    rounds=1,
    conversation=320,
    system=48,
    long=96,
    open={
        "rate": 4.0,
        "seconds": 1.0,
        "prompt": 16,
        "answer": 8,
        "longest": (64, 16),
        "system": 24,
        "long": 128,
        "tries": 2,
    },
)


@dataclass(frozen=True)
class RowGroup:
    """Cases for one server.

    gpus: tensor-parallel ranks. shape: None is the command's own. slots, pages, max_rank: of the
    adapters on the device; pages are of 8 rank rows in each projection's pool. expert_pages: the
    same of every routed expert, for shapes that have some; None: the server decides. json: the
    tokenizer can spell JSON. weights: a real checkpoint.
    """

    name: str
    about: str
    plays: tuple[Play, ...]
    gpus: int = 1
    shape: str | None = None
    slots: int = RESIDENT
    pages: int = RESIDENT * 2
    max_rank: int = PLAIN_RANK
    expert_pages: int | None = None
    json: bool = False
    weights: bool = False


def groups(scale: Scale) -> dict[str, RowGroup]:
    """All of them by name, in the order in which they are played."""
    rows, mixed_pages = (
        _standard(scale),
        RESIDENT // len(MIXED_RANKS) * sum(map(_pages, MIXED_RANKS)),
    )
    rank = max(MIXED_RANKS)
    [lora32] = [play for play in rows if play.name == "lora32-c64"]
    seventy = (
        _named(rows, "base-c1"),
        replace(lora32, seconds=25.0),
        replace(_named(rows, "base-c64"), seconds=25.0),
    )
    fair, churned = _fair(scale), _churn(scale)
    made = [
        RowGroup("one-gpu", "one GPU", (*rows, *_prompts(scale)), pages=mixed_pages, max_rank=rank),
        RowGroup("two-gpus", "two GPUs", rows, 2, pages=mixed_pages, max_rank=rank),
        RowGroup("seventy-b", "Llama-3-70B's shape over four GPUs", seventy, 4, shape="llama3-70b"),
        RowGroup("churn", f"{CHURNED} adapters on {RESIDENT} slots", churned[:-1]),
        RowGroup(
            "churn-all-resident",
            f"{CHURNED} adapters on {CHURNED} slots",
            churned[-1:],
            slots=CHURNED,
            pages=CHURNED * _pages(PLAIN_RANK),
        ),
        RowGroup("open-loop", f"arrivals by chance over {RESIDENT} adapters", _open(scale)),
        RowGroup("fairness", "6 adapters on 3 slots", fair, slots=3, pages=3 * _pages(PLAIN_RANK)),
        _kinds(scale, lora32),
        _experts(scale, rows),
        RowGroup("structured", "answers under a schema", (_structured(scale),), json=True),
        RowGroup(
            "start", "a server's start", _start(), pages=mixed_pages, max_rank=rank, weights=True
        ),
    ]
    return {group.name: group for group in made}


def written(plays: Iterable[Play]) -> list[WorkloadRecipe]:
    """The adapters that these cases ask for, and so need on disk."""
    return written_for([name for play in plays for name in play.models])


def written_for(names: Iterable[str]) -> list[WorkloadRecipe]:
    """The adapters of these names; those of a kind are counted from 0."""
    most = dict.fromkeys("amsdve", 0)
    for name in set(names) - {BASE}:
        most[name[0]] = max(most[name[0]], int(name[1:]) + 1)
    plain = most["a"], most["m"], most["s"]
    return recipes(*plain, dora=most["d"], activated=most["v"], experts=most["e"])


def rank_rows(recipe: WorkloadRecipe) -> int:
    """Return the rows that an adapter takes of each pool: DoRA has its scales in one more."""
    return recipe.rank + (recipe.kind == "dora")


def _named(plays: Sequence[Play], name: str) -> Play:
    [found] = [play for play in plays if play.name == name]
    return found


def _pages(rank: int) -> int:
    return -(-rank // PAGE_ROWS)


def _standard(scale: Scale) -> tuple[Play, ...]:
    """The rows of one and of two GPUs, those first without which the others say least."""
    plain = tuple(f"a{i}" for i in range(RESIDENT))
    mixed = tuple(f"m{i}" for i in range(RESIDENT))
    cases = standard_cases(BASE, plain)
    cases += [
        Case(f"lora{FEW}-c64", plain[:FEW], 64, 0),
        Case(f"mixed{RESIDENT}-c64", mixed, 64, 0),
    ]
    seconds = {1: 4.0, 64: 11.0, 256: 20.0}
    names = (
        "base-c1 lora1-c1 base-c64 lora8-c64 lora32-c64 lora1-c64 mixed32-c64 base-c256 lora32-c256"
    )
    sized = [
        replace(
            case,
            requests=scale.requests[case.concurrency],
            input_length=scale.lengths[0],
            output_length=scale.lengths[1],
        )
        for case in cases
    ]
    # Adapters of the cases before are on the device: those of this one may have left it.
    plays = [
        Play(case, seconds[case.concurrency], settle=len(case.models) == RESIDENT) for case in sized
    ]
    return tuple(_named(plays, name) for name in names.split())


def _prompts(scale: Scale) -> tuple[Play, ...]:
    """A system prompt that all requests of an adapter share, then long prompts."""
    models, requests, answer = _models("a", RESIDENT), scale.requests[64], scale.churn_lengths[1]
    system = Case("system32-c64", models, 64, 2 * requests, 100, answer, conversation=scale.system)
    long = Case("long32-c16", models, 16, 48, scale.long, answer)
    return Play(system, 15.0), Play(long, 18.0)


def _churn(scale: Scale) -> tuple[Play, ...]:
    """Resident, Zipf, rotation, small; last the one with a slot for each."""
    options = churn.parser().parse_args([])
    options.requests, options.small = scale.churn_requests, scale.small_adapters
    options.input_length, options.output_length = scale.churn_lengths
    resident, zipf, rotation, all_resident, small = churn.churn_cases(options)
    return (
        Play(resident, 16.0, settle=True),
        Play(zipf, 22.0, settle=True),
        Play(rotation, 24.0, settle=True),
        Play(small, 16.0, cold=True),
        Play(all_resident, 22.0, settle=True),
    )


def _fair(scale: Scale) -> tuple[Play, ...]:
    options = fairness.parser().parse_args([])
    vars(options).update(scale.fair)
    terms = Terms(
        url="",
        input_length=options.input_length,
        output_length=options.output_length,
        flood_lead_s=options.flood_lead_s,
    )
    return tuple(Play(Fair(load, terms), 80.0) for load in fairness.loads(options))


def _open(scale: Scale) -> tuple[Play, ...]:
    """A rate that must be met, and the highest that is."""
    steady = replace(Arrivals("steady", _models("a", RESIDENT), 40.0), **scale.open)
    highest = replace(steady, name="highest")
    return (
        Play(Open(steady, search=False), 16.0),
        Play(Open(highest, search=True), 16.0 * steady.tries),
    )


def _structured(scale: Scale) -> Play:
    case = Case("half-held", (BASE,), 64, scale.requests[64], *scale.lengths)
    return Play(Comparison(case, rounds=scale.rounds), 20.0 * scale.rounds)


def _kinds(scale: Scale, lora32: Play) -> RowGroup:
    """DoRA beside plain LoRA; then checks of one conversation, by the base model and by adapters.

    The first of them is the conversation's own prefill; base and activated adapters find it cached.
    """
    assert isinstance(lora32.what, Case)
    dora = replace(lora32.what, name="dora32-c64", models=_models("d", RESIDENT))
    once = Case("conversation", (BASE,), 1, 1, 14, 4, conversation=scale.conversation)
    check = replace(once, requests=CHECKS)
    plays = (
        lora32,
        Play(dora, lora32.seconds),
        Play(once, 1.0),
        Play(replace(check, name="checks-base"), 1.0),
        Play(replace(check, name="checks-alora", models=_models("v", CHECKS)), 1.0),
        Play(replace(check, name="checks-lora", models=_models("a", CHECKS)), 3.0),
    )
    needed = written(plays)
    return RowGroup(
        "kinds",
        "kinds of adapters",
        plays,
        slots=len(needed),
        pages=sum(_pages(rank_rows(each)) for each in needed),
    )


def _experts(scale: Scale, rows: Sequence[Play]) -> RowGroup:
    """Adapters of attention, then of all routed experts too."""
    plain = _named(rows, f"lora{FEW}-c64")
    assert isinstance(plain.what, Case)
    more = replace(plain.what, name=f"experts{FEW}-c64", models=_models("e", FEW))
    plays = _named(rows, "base-c64"), plain, Play(more, 2 * plain.seconds, settle=True)
    pages = FEW * _pages(PLAIN_RANK)
    return RowGroup(
        "experts",
        "adapters of routed experts",
        plays,
        slots=2 * FEW,
        pages=2 * pages,
        expert_pages=pages,
    )


def _models(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


def _start() -> tuple[Play, ...]:
    return (
        Play(Start("first"), 60.0),
        Play(Start("warm"), 40.0),
        Play(Loading("weights"), 40.0),
    )
