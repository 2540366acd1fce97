"""The messages between the driver and a rank, besides plans and results."""

import msgspec

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sums import MeasuredSums


class RankHello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank's first message; a wrong secret ends the connection."""

    secret: str
    rank: int


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Run this plan."""

    plan: StepPlan


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Read this adapter into the host tier, beside the steps.

    attempt: the number of this staging. Replies have it, because one may come after the driver has
    given up.
    """

    adapter: FetchedAdapter
    attempt: int = 0


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Make the matcher of a constraint beside the steps; first free those in `gone`."""

    number: int
    constraint: str
    gone: list[int]


class RecordGraph(msgspec.Struct, frozen=True, tag="record"):
    """Record one more CUDA graph, between the steps that are sent before and after."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop."""


class StepDone(msgspec.Struct, frozen=True, tag="stepped"):
    """Rank 0's result of a step."""

    result: StepResult


class Staged(msgspec.Struct, frozen=True, tag="staged"):
    """This rank has the adapter in its host tier."""

    rank: int
    key: AdapterKey
    shape: AdapterShape
    attempt: int = 0


class StageDeferred(msgspec.Struct, frozen=True, tag="deferred"):
    """This rank's host tier has no room for the adapter now."""

    rank: int
    key: AdapterKey
    shape: AdapterShape
    attempt: int = 0


class StageNeedsSums(msgspec.Struct, frozen=True, tag="needs_sums"):
    """This rank stages a DoRA adapter once it has the sum of all ranks' parts."""

    rank: int
    key: AdapterKey
    part: bytes
    attempt: int = 0


class Loaded(msgspec.Struct, frozen=True, tag="placed"):
    """This rank has loaded the adapter: its bytes are on the device."""

    rank: int
    key: AdapterKey


class StageFailed(msgspec.Struct, frozen=True, tag="stage_failed"):
    """This rank refuses the adapter."""

    rank: int
    key: AdapterKey
    refusal: AdapterRefusal
    message: str
    attempt: int = 0


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """This rank has made a matcher. fault: why it could not; "" if it has."""

    rank: int
    number: int
    fault: str = ""


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """This rank has recorded a CUDA graph. left: how many are not recorded yet."""

    rank: int
    left: int


class RankBroken(msgspec.Struct, frozen=True, tag="broken"):
    """A step or a copy raised on this rank: the group is unusable from now on."""

    rank: int
    message: str


Command = RunStep | Stage | Prepare | RecordGraph | Stop
StageAnswer = Staged | StageDeferred | StageFailed | StageNeedsSums
Report = StepDone | StageAnswer | Loaded | Prepared | Recorded | RankBroken


class StoreAddress(msgspec.Struct, frozen=True):
    """The address of the store by which the ranks of a group connect to each other."""

    host: str
    port: int
    size: int


class MeasuredMemory(msgspec.Struct, frozen=True):
    """What fits on a rank beside its weights.

    num_blocks: of cache. free_bytes: of its GPU before any were allocated; None on a CPU.
    sums: how its group sums; None where there was nothing to measure.
    """

    num_blocks: int
    free_bytes: int | None
    sums: MeasuredSums | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """A rank's report when its weights are loaded and its cache is allocated.

    pid: of the rank's process.
    ..._bytes: of this rank alone.
    weight_forms: the bytes of its weights in each form.
    graphs_left: CUDA graphs that are recorded while steps run already.
    state_bytes: of what recurrent layers keep of sequences.
    """

    rank: int
    pid: int
    capacity: Capacity
    dtype: str
    device: str
    attention: str
    adapter_kernel: str
    all_reduce: str
    weight_bytes_resident: int
    cache_bytes: int
    adapter_bytes: int
    load_seconds: float
    weight_forms: dict[str, int] = {}
    graphs_left: int = 0
    state_bytes: int = 0
