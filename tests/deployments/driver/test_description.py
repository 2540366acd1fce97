"""What `/info` says of a start."""

import pytest
from msgspec.structs import replace

from configs.engine import SpeculationConfig, SpeculationKind
from configs.wire.plan import Capacity
from deployments.driver.description import startup_info
from deployments.rank.messages import LoadReport

LOOKUP = SpeculationConfig(kind=SpeculationKind.PROMPT_LOOKUP)
MEDUSA = SpeculationConfig(kind=SpeculationKind.MEDUSA, model="heads")
EAGLE3 = SpeculationConfig(kind=SpeculationKind.EAGLE3, model="heads", max_tokens=4)


@pytest.mark.parametrize(
    ("config", "drafts", "heads", "expected"),
    [
        (SpeculationConfig(), True, None, "none"),
        (LOOKUP, False, None, "none: prompt_lookup needs a paged model, without recurrent layers"),
        (LOOKUP, True, None, "prompt_lookup, up to 8 tokens"),
        (MEDUSA, True, 3, "medusa, up to 3 tokens"),
        (MEDUSA, False, None, "none: medusa needs a paged model, without recurrent layers"),
        (EAGLE3, True, 4, "eagle3, up to 4 tokens"),
        (EAGLE3, False, None, "none: eagle3 needs a paged model, without recurrent layers"),
    ],
)
def test_what_guesses_tokens(
    config: SpeculationConfig,
    drafts: bool,
    heads: int | None,
    expected: str,
) -> None:
    capacity = Capacity(9, 4, (), 0, 1, 0, 99, drafts=drafts)
    report = load_report(replace(capacity, draft_heads=heads))
    assert startup_info([report], config)["speculation"] == expected


@pytest.mark.parametrize(
    ("blocks", "longest", "expected"),
    [
        (9, 36, "9 of 4 tokens, 0.36 MB; a request has at most 36 tokens, not 99"),
        (24, 96, "24 of 4 tokens, 0.96 MB; a request has at most 96 tokens, not 99"),
        (25, 99, "25 of 4 tokens, 27.00 GB"),
    ],
)
def test_a_cache_smaller_than_the_longest_request_is_named(
    blocks: int, longest: int, expected: str
) -> None:
    capacity = Capacity(blocks, 4, (), 0, 1, 0, 99)
    assert capacity.longest_sequence == longest
    cache_bytes = 40_000 * blocks if blocks < 25 else 27_000_000_000
    report = replace(load_report(capacity), cache_bytes=cache_bytes)
    assert startup_info([report], SpeculationConfig())["pages"] == expected


def test_pages_of_experts() -> None:
    capacity = Capacity(9, 4, ("q_proj", "experts.up_proj"), 7, 3, 0, 99)
    ranks = [load_report(replace(capacity, pool_pages=(7, count))) for count in (256, 128)]
    said = startup_info(ranks, SpeculationConfig())["adapter pages"]
    assert said.startswith("7 of 8 rank rows a projection, 3 slots; 128 of 8 rows of one expert")


def load_report(capacity: Capacity) -> LoadReport:
    return LoadReport(
        rank=0,
        pid=0,
        capacity=capacity,
        dtype="float32",
        device="cpu",
        attention="sdpa",
        adapter_kernel="none",
        all_reduce="none",
        weight_bytes_resident=0,
        cache_bytes=0,
        adapter_bytes=0,
        load_seconds=0.0,
    )
