"""Answers with drafts are those without, token by token, whatever else is in the batch."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from configs.engine import CacheDType
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from scheduler.drafts import Drafter
from sharding.group import TensorParallel
from tests.modeling.parity.comparison import BLOCK_SIZE, FAMILIES, World, engine_config
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer, Asked

Find = Callable[[Drafter, list[int], int, Sequence[int]], tuple[int, ...]]

NUM_TOKENS = 40

HEAD = torch.randint(30, 96, (BLOCK_SIZE + 3,), generator=torch.Generator().manual_seed(1)).tolist()

REQUESTS = [
    Asked([*HEAD, 40], NUM_TOKENS, sampling=Sampling(logprobs=3)),
    Asked([*HEAD, 41], NUM_TOKENS, 1, Sampling(temperature=0.8, top_p=0.9, seed=5), joins_at=3),
    Asked(
        [*HEAD, 40, 42, 43],
        NUM_TOKENS,
        0,
        Sampling(repetition_penalty=1.3, frequency_penalty=0.2, logprobs=0),
    ),
    Asked(
        [50, 51, *HEAD],
        NUM_TOKENS,
        sampling=Sampling(
            temperature=1.2,
            seed=7,
            watermark=True,
            bad_words=((44,), (45, 46)),
            logit_bias=((60, 1.0),),
            masked_ids=(61,),
            masked_tokens=9,
        ),
        joins_at=5,
    ),
    Asked([*HEAD, 40, 44], NUM_TOKENS, 1, joins_at=8),
]


def informed(texts: Sequence[list[int]]) -> Find:
    """Drafts of what the texts will be, every sixth token wrong."""

    def find(
        drafter: Drafter, tokens: list[int], length: int, guessed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        text = next(text for text in texts if text[: len(tokens)] == tokens)
        known = len(tokens) + len(guessed)
        found = enumerate(text[known : known + length], known)
        return tuple(token + (position % 6 == 0) for position, token in found)

    return find


@pytest.mark.parametrize(
    ("family", "variant", "ranks", "lost_at", "sure", "captured", "cache"),
    [
        ("llama", "gqa", 1, 12, speculation.SURE, True, CacheDType.AUTO),
        ("llama", "gqa", 2, None, 0.0, False, CacheDType.AUTO),
        ("llama", "gqa", 1, None, 0.0, False, CacheDType.FP8),
        ("generic", "gemma2", 1, None, 0.0, False, CacheDType.AUTO),
    ],
)
def test_drafts_change_no_token(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    variant: str,
    ranks: int,
    lost_at: int | None,
    sure: float,
    captured: bool,
    cache: CacheDType,
) -> None:
    """Greedy and sampled, over adapters and without, in chunks, with a prefix that others cached.

    lost_at: after so many turns the ranks are lost and rebuilt. sure: at 0, no row waits, and many
    are void. captured: whether steps with drafts are replays where they have no prompts.
    """
    monkeypatch.setattr(speculation, "SURE", sure)
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    config = engine_config(world.model(family, variant))
    own = config.cache.model_copy(update={"dtype": cache})
    config = config.model_copy(update={"cache": own})
    names = list(FAMILIES[family].adapters)[:2]
    found = [world.adapter(family, variant, name) for name in names]
    adapters = [folder for folder in found if folder is not None]

    skipped: list[int] = []

    def answers(num_drafts: int, lost_at: int | None, group: TensorParallel) -> list[Answer]:
        def start() -> ModelRunner:
            runner = load_paged(config, group, torch.device("cpu")).allocate()
            if captured and num_drafts:
                runner._decode_graphs, *checked = [
                    capture_on_cpu(runner, queries=queries) for queries in (1, 4, 6)
                ]
                runner._checked_graphs = tuple(checked)
            return runner

        run = Ranks(start, adapters, 7, group, num_drafts)
        made = generate_scheduled(run, REQUESTS, lost_at)
        skipped[:] = [len(run.ended["r", index].skipped) for index in range(len(REQUESTS))]
        assert (run.runner.num_captured > 5) == (captured and num_drafts > 0)
        return made

    [plain] = world.run(1, partial(answers, 0, None))
    assert not any(skipped)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    for made in world.run(ranks, partial(answers, 5, lost_at)):
        assert min(skipped) >= NUM_TOKENS // 3, "many tokens came as drafts"
        for one, other in zip(made, plain, strict=True):
            assert one.tokens == other.tokens
            assert len(one.logprobs) == len(other.logprobs)
            for new, old in zip(one.logprobs, other.logprobs, strict=True):
                assert new is not None
                assert old is not None
                assert new.logprob == pytest.approx(old.logprob, abs=1e-4)
