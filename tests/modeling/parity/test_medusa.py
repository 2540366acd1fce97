"""Medusa heads guess what a plain reimplementation guesses, and change no token."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.architectures.base import ArchitectureError
from configs.engine import EngineConfig, SpeculationConfig, SpeculationKind
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from deployments.rank.host import capacity_of
from modeling.batch import ForwardBatch, StepOutput
from modeling.models.medusa import MedusaHeads
from modeling.runner import guesses
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from modeling.sampling.sampler import sample_tokens
from modeling.sampling.tensors import sampling_tensors
from scheduler import speculation
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank, TensorParallel
from tests import medusa
from tests.checkpoints import LLAMA, load_oracle
from tests.modeling.parity.comparison import FAMILIES, World, engine_config
from tests.modeling.parity.test_speculation import NUM_TOKENS, REQUESTS
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer
from tests.oracle import final_states
from tests.ranks import run_in_memory, run_ranks
from tests.sweeps import swept, swept_rows

NUM_HEADS = 4
VOCAB, WIDTH = LLAMA["vocab_size"], LLAMA["hidden_size"]
CPU = torch.device("cpu")

Texts = list[list[int]]


class WatchedRanks(Ranks):
    """Ranks that keep the drafts of steps: by request, (position of the first, its tokens)."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.drafted: list[tuple[int, int, tuple[int, ...]]] = []

    def _land(self) -> None:
        step = self.scheduler._flights[0]
        for request, row in zip(step.requests, step.rows, strict=True):
            if row.drafts and request.takes(row.start):
                at = row.start + row.length - len(row.drafts)
                self.drafted.append((request.id[1], at, row.drafts))
        super()._land()


def answers(
    config: EngineConfig,
    adapters: Sequence[Path],
    num_drafts: int,
    lost_at: int | None,
    captured: bool,
    group: TensorParallel,
) -> tuple[list[Answer], WatchedRanks]:
    """What all requests get, and the ranks that it was generated on."""

    def start() -> ModelRunner:
        runner = load_paged(config, group, CPU).allocate()
        if captured and num_drafts:
            runner._decode_graphs, *checked = [
                capture_on_cpu(runner, queries=queries) for queries in (1, 3, 5)
            ]
            runner._checked_graphs = tuple(checked)
        return runner

    run = WatchedRanks(start, adapters, 7, group, num_drafts)
    return generate_scheduled(run, REQUESTS, lost_at), run


def adapters_of(world: World, family: str, variant: str, folder: Path) -> list[Path]:
    """Copies of two adapters, to which heads may be added."""
    names = list(FAMILIES[family].adapters)[:2]
    found = [world.adapter(family, variant, name) for name in names]
    return [copytree(each, folder / each.name) for each in found if each is not None]


def states_of(model: Path, adapters: Sequence[Path], texts: Texts) -> list[Tensor]:
    """transformers' final states of the requests' texts."""
    slots = [request.slot for request in REQUESTS]
    folders = [adapters[slot] if slot >= 0 else None for slot in slots]
    return [final_states(model, *each) for each in zip(folders, texts, strict=True)]


def guessed(logits: Tensor, sampling: Sampling, position: int) -> list[int]:
    """What heads' logits [count, vocab] say of the tokens from this position on."""
    count = len(logits)
    positions = range(position, position + count)
    plain = Sampling(sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
    tensors = sampling_tensors([plain] * count, positions, logits.device)
    return sample_tokens(logits, tensors).tokens.tolist()


def with_heads(model: Path, folder: Path, of_adapters: int = 0) -> EngineConfig:
    speculates = SpeculationConfig(kind=SpeculationKind.MEDUSA, model=str(folder))
    plain = engine_config(model, speculation=speculates)
    adapters = plain.adapters.model_copy(update={"draft_heads": of_adapters})
    return plain.model_copy(update={"adapters": adapters})


@pytest.mark.parametrize(
    ("family", "variant", "ranks", "own", "layers", "lost_at", "brings", "captured"),
    swept_rows(
        [
            ("llama", "gqa", 1, True, 1, 12, True, True),
            ("llama", "gqa", 1, False, 1, None, False, False),
            ("llama", "gqa", 2, True, 2, None, False, False),
            ("llama", "gqa", 2, False, 1, None, True, False),
            ("gpt2", "plain", 4, True, 1, None, False, False),
            ("gpt_neox", "parallel", 1, False, 1, None, False, False),
        ],
        lambda family, _, ranks, own, *rest: family == "llama" and own == (ranks == 1),
    ),
)
def test_heads_guess_as_in_plain_torch_and_change_no_token(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    variant: str,
    ranks: int,
    own: bool,
    layers: int,
    lost_at: int | None,
    brings: bool,
    captured: bool,
) -> None:
    """Greedy and sampled, over adapters and without, in chunks, with a prefix of others.

    own: of version 1. brings: an adapter has heads of its own. captured: steps are replays where
    they have no prompts.
    """
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    compare(world, tmp_path, (family, variant), ranks, own, layers, lost_at, brings, captured)


def compare(
    world: World,
    folder: Path,
    named: tuple[str, str],
    ranks: int,
    own: bool,
    layers: int,
    lost_at: int | None,
    brings: bool,
    captured: bool,
) -> None:
    """Train heads and compare; folder: where to write them. named: family and variant."""
    model, adapters = world.model(*named), adapters_of(world, *named, folder)
    [(plain, _)] = run_in_memory(
        1, partial(answers, engine_config(model), adapters, 0, None, False)
    )
    texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
    heads, wanted = write_trained(model, adapters, texts, folder / "heads", own, layers, brings)
    config = with_heads(model, heads, int(brings))
    for made, run in run_ranks(
        ranks, partial(answers, config, adapters, NUM_HEADS, lost_at, captured)
    ):
        assert (run.runner.num_captured > 5) == captured
        check_guesses(made, plain, run, wanted)


def write_trained(
    model: Path,
    adapters: Sequence[Path],
    texts: Texts,
    folder: Path,
    own: bool,
    layers: int,
    brings: bool,
) -> tuple[Path, list[Tensor]]:
    """Train heads on the requests' texts and write them to a folder.

    Returns it, and by request their logits [text, count, vocab]. brings: the second adapter gets
    heads of its own.
    """
    states = states_of(model, adapters, texts)
    head = load_oracle(model).get_output_embeddings().weight.detach().float()
    heads = medusa.Heads(head, NUM_HEADS, layers, own)
    heads.train_on(list(zip(states, texts, strict=True)))
    wanted = [heads(each) for each in states]
    if brings:
        others = medusa.Heads(head, NUM_HEADS)
        mine = [index for index, request in enumerate(REQUESTS) if request.slot == 1]
        others.train_on([(states[index], texts[index]) for index in mine])
        others.write(adapters[1])
        for index in mine:
            wanted[index] = others(states[index])
    return heads.write(folder), wanted


def check_guesses(
    made: list[Answer], plain: list[Answer], run: WatchedRanks, wanted: list[Tensor]
) -> None:
    """Assert that tokens are as without heads, and drafts what heads' logits `wanted` say."""
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    assert len(run.drafted) >= 20
    for index, at, drafts in run.drafted:
        # The state two positions before chose the token before the draft.
        logits = wanted[index][at - 2]
        expected = guessed(logits, REQUESTS[index].sampling, at)[: len(drafts)]
        assert list(drafts) == expected, f"guesses differ: request {index} at {at}"
    skipped = [len(run.ended["r", index].skipped) for index in range(len(REQUESTS))]
    assert sum(skipped) >= NUM_TOKENS, skipped


def test_heads_that_guess_wrong_change_no_token(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are another model's: of random blocks."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    model, adapters = world.model("llama", "gqa"), adapters_of(world, "llama", "gqa", tmp_path)
    [(plain, _)] = run_in_memory(
        1, partial(answers, engine_config(model), adapters, 0, None, False)
    )
    heads = medusa.Heads(torch.randn(VOCAB, WIDTH), NUM_HEADS, own=True)
    config = with_heads(model, heads.write(tmp_path / "heads"))
    [(made, run)] = run_in_memory(1, partial(answers, config, adapters, NUM_HEADS, None, False))
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    assert len(run.drafted) > 20
    assert sum(len(run.ended["r", index].skipped) for index in range(len(REQUESTS))) < 20


@pytest.mark.parametrize(
    "fault", swept(["order", "an adapter's are forgotten"], lambda fault: fault == "order")
)
def test_faults_on_purpose_are_noticed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The comparison with plain torch must fail."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    if fault == "order":
        right = MedusaHeads.states
        monkeypatch.setattr(MedusaHeads, "states", lambda self, *given: right(self, *given).flip(1))
    else:
        monkeypatch.setattr(guesses, "groups_of", lambda *_: [])
    with pytest.raises(AssertionError, match="guesses differ"):
        compare(world, tmp_path, ("llama", "gqa"), 1, False, 1, None, True, False)


def write_heads(folder: Path, **config: Any) -> Path:
    return medusa.Heads(torch.zeros(VOCAB, WIDTH), 2, own=True).write(folder, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0, it must be from 1 to 64"),
        ({"medusa_num_heads": "2"}, "medusa_num_heads is '2'"),
        ({"medusa_num_heads": 3}, "no tensor '2.0.linear.weight'.*are they for another model"),
        ({"medusa_num_heads": 1}, "does not use 3 tensors"),
        ({"medusa_num_layers": 2}, "no tensor '0.1.linear.weight'"),
    ],
)
def test_heads_that_are_not_as_their_config_says_are_refused(
    world: World, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write_heads(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        load_paged(with_heads(world.model("llama", "gqa"), folder), SingleRank(), CPU)


def test_heads_of_other_models_and_files_are_refused(world: World, tmp_path: Path) -> None:
    model = world.model("llama", "gqa")

    def load(folder: Path) -> None:
        load_paged(with_heads(model, folder), SingleRank(), CPU)

    wide = medusa.Heads(torch.zeros(VOCAB, 2 * WIDTH), 2).write(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=f"the model is {WIDTH} wide"):
        load(wide)
    more = medusa.Heads(torch.zeros(VOCAB + 8, WIDTH), 2, own=True).write(tmp_path / "more")
    with pytest.raises(CheckpointError, match=f"with {VOCAB} tokens"):
        load(more)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"medusa_num_heads": 2}')
    with pytest.raises(CheckpointError, match=r"convert medusa_lm_head\.pt"):
        load(empty)
    with pytest.raises(ArchitectureError, match="it describes no Medusa heads"):
        load(model)
    (empty / "config.json").write_text("[")
    with pytest.raises(ArchitectureError, match="cannot be read"):
        load(empty)
    heads = medusa.Heads(torch.zeros(VOCAB, WIDTH), 2)
    load(heads.write(tmp_path / "other", name="heads.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 3}, "has 3 heads, the server's own are 2: train as many"),
        ({"own": True}, "of version 1.*adapters bring version 2 alone"),
        ({"width": 2 * WIDTH}, "0.0.linear.weight of medusa_lm_head.safetensors must have shape"),
        ({"bias": float("nan")}, "0.0.linear.bias holds values that are not finite"),
        ({"config": "{}"}, "it describes no Medusa heads"),
    ],
)
def test_bad_heads_of_adapters_are_refused(
    world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model, base = world.model("llama", "gqa"), tmp_path / "base"
    [adapter, _] = adapters_of(world, "llama", "gqa", tmp_path)
    given: dict[str, Any] = {"count": 2, "own": False, "width": WIDTH, "bias": 0.0, **changes}
    heads = medusa.Heads(torch.zeros(VOCAB, given["width"]), given["count"], own=given["own"])
    heads.state_dict()["blocks.0.0.linear.bias"].fill_(given["bias"])
    heads.write(adapter)
    if "config" in changes:
        (adapter / "config.json").write_text(changes["config"])
    write_heads(base)
    fetched = FetchedAdapter(AdapterKey(1), "a", str(adapter), "a")
    runner = load_paged(with_heads(model, base, 1), SingleRank(), CPU).allocate()
    with pytest.raises(AdapterError, match=message):
        runner.stage(fetched)
    # Where no adapter's heads are read, they are no part of it.
    load_paged(with_heads(model, base), SingleRank(), CPU).allocate().stage(fetched)


def test_a_rank_says_how_many_tokens_heads_guess(world: World, tmp_path: Path) -> None:
    config = with_heads(world.model("llama", "gqa"), write_heads(tmp_path))
    report = load_paged(config, SingleRank(), CPU).allocate().report
    assert capacity_of(report).draft_heads == 2
    assert capacity_of(report).drafts


def test_warm_up_steps_guess(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no request waits until a kernel of heads is compiled."""
    model = world.model("llama", "gqa")
    heads = medusa.Heads(torch.zeros(LLAMA["vocab_size"], LLAMA["hidden_size"]), NUM_HEADS)
    loaded = load_paged(with_heads(model, heads.write(tmp_path)), SingleRank(), CPU)
    runner, guessed_rows = loaded.allocate(40), list[int]()
    step = runner.step

    def watched(batch: ForwardBatch) -> StepOutput:
        output = step(batch)
        guesses = output.wait().guesses
        assert guesses is not None
        guessed_rows.append(sum(len(each) == NUM_HEADS for each in guesses))
        return output

    monkeypatch.setattr(runner, "step", watched)
    loaded._warm_up(runner, 39)
    assert min(guessed_rows) >= 1


def test_a_config_names_heads_where_they_are_read_alone() -> None:
    with pytest.raises(ValueError, match="kind medusa needs the folder or hub id"):
        SpeculationConfig(kind=SpeculationKind.MEDUSA)
    with pytest.raises(ValueError, match="model names heads, which kind prompt_lookup does not"):
        SpeculationConfig(kind=SpeculationKind.PROMPT_LOOKUP, model="heads")
