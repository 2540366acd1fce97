"""EAGLE-3 heads guess what a plain reimplementation guesses, and change no token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.architectures.base import ArchitectureError
from configs.engine import CudaGraphs, EngineConfig, SpeculationConfig, SpeculationKind
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.models.eagle3 import Eagle3Heads
from modeling.runner import layer_guesses, loading
from modeling.runner.cuda_graphs import Record, graph_sizes
from modeling.runner.layer_graphs import ChainGraphs, LayerGraphs
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank, TensorParallel
from tests import eagle3
from tests.checkpoints import (
    LLAMA,
    AdapterRecipe,
    load_oracle,
    write_adapter,
    write_llama,
    write_relative,
)
from tests.checkpoints_generic import write_generic
from tests.checkpoints_others import write_gpt2
from tests.modeling.models.tiny_causal import write_tiny
from tests.modeling.parity.comparison import BLOCK_SIZE, engine_config
from tests.modeling.parity.test_medusa import WatchedRanks, guessed
from tests.modeling.parity.test_speculation import NUM_TOKENS, REQUESTS
from tests.modeling.runner.test_cuda_graphs import CapturedSdpa, capture_on_cpu
from tests.modeling.scheduled import generate_scheduled
from tests.modeling.stepping import Answer
from tests.oracle import inner_states
from tests.ranks import run_in_memory, run_ranks

CPU = torch.device("cpu")
NUM_DRAFTS = 4
VOCAB, WIDTH = LLAMA["vocab_size"], LLAMA["hidden_size"]
RECIPES = [AdapterRecipe(r=8, seed=2), AdapterRecipe(r=3, target_modules=("q_proj",))]

FIRST = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}
"""Of a config: what models of two layers have."""

MOST = [*range(3, VOCAB, 4), *range(4, VOCAB, 4), *range(5, VOCAB, 4)]
"""Three in four tokens."""


ROOMS = (1, 3, 5)
"""Tokens of a row in captured steps."""


class Captures(Enum):
    """What is captured: the target alone, or entries of heads too, or all."""

    NONE = "none"
    TARGET = "target"
    ENTRIES = "entries"
    HEADS = "heads"


def prepare_heads(runner: ModelRunner, states: Tensor, record: Record) -> LayerGraphs:
    """Let a CPU runner record entries and guesses; states: where its replays leave them."""
    drafter = runner._parts.drafter
    assert drafter is not None
    backend = CapturedSdpa(drafter.backend.spec)
    drafts = replace(drafter, backend=backend).allocate(runner.report.num_blocks + 1)
    with torch.inference_mode():
        rooms = [(queries, graph_sizes(8)) for queries in ROOMS]
        graphs = drafts.graphs(runner._input_batch, states, rooms, record)
    runner._drafts, runner._graphs = drafts, runner._graphs._replace(heads=graphs)
    return graphs


def capture_heads(runner: ModelRunner, states: Tensor, guesses: bool) -> None:
    """Let a CPU runner replay entries, and guesses."""
    graphs = prepare_heads(runner, states, lambda compute: compute)
    if not guesses:
        graphs.chain.unrecorded.clear()
    while runner.num_unrecorded:
        runner.record_next()


def answers(
    config: EngineConfig,
    adapters: Sequence[Path],
    num_drafts: int,
    lost_at: int | None,
    captures: Captures,
    group: TensorParallel,
) -> tuple[list[Answer], WatchedRanks]:
    """What all requests get, and the ranks that it was generated on."""

    def start() -> ModelRunner:
        runner = load_paged(config, group, CPU).allocate()
        if captures is not Captures.NONE:
            most = capture_on_cpu(runner, queries=ROOMS[-1])
            outputs = most._outputs
            runner._decode_graphs, *checked = [
                capture_on_cpu(runner, queries=queries, outputs=outputs) for queries in ROOMS[:-1]
            ]
            runner._checked_graphs = (*checked, most)
            if captures is not Captures.TARGET:
                capture_heads(runner, outputs.states, captures is Captures.HEADS)
        return runner

    run = WatchedRanks(start, adapters, 7, group, num_drafts)
    return generate_scheduled(run, REQUESTS, lost_at), run


def with_heads(model: Path, folder: Path) -> EngineConfig:
    speculates = SpeculationConfig(
        kind=SpeculationKind.EAGLE3, model=str(folder), max_tokens=NUM_DRAFTS
    )
    return engine_config(model, speculation=speculates)


def write_target(name: str, folder: Path) -> Path:
    """Six layers, of which heads read those behind 1, 2 and 2 unless their config says else."""
    if name == "llama":
        return write_llama(folder, "gqa", num_hidden_layers=6)
    if name == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * 3
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        return write_generic(
            folder, name, num_hidden_layers=6, layer_types=kinds, rope_scaling=None, **sizes
        )
    return write_relative(folder, name, num_hidden_layers=6)


def embedding_of(model: Path) -> Tensor:
    embedding: Tensor = load_oracle(model).get_input_embeddings().weight.detach().float()
    return embedding


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "speculators", "layers", "lost_at", "captures"),
    [
        ("llama", 1, MOST, False, (1, 2, 2), 12, Captures.HEADS),
        ("qwen3", 2, None, True, (0, 2, 4), None, Captures.NONE),
        pytest.param(
            *("gpt_oss", 1, MOST, False, (1, 2, 3), None, Captures.ENTRIES),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_heads_guess_as_in_plain_torch_and_change_no_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ranks: int,
    tokens: list[int] | None,
    speculators: bool,
    layers: tuple[int, ...],
    lost_at: int | None,
    captures: Captures,
) -> None:
    """Greedy and sampled, over adapters and without, in chunks, with a prefix of others.

    tokens: those that can be guessed. layers: behind which states are read. lost_at: in the middle
    of replays the ranks are lost.
    """
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    compare(tmp_path, name, ranks, tokens, speculators, layers, lost_at, captures)


def compare(
    folder: Path,
    name: str,
    ranks: int,
    tokens: list[int] | None,
    speculators: bool,
    layers: tuple[int, ...],
    lost_at: int | None,
    captures: Captures,
) -> None:
    """Compare the answers of all ranks; tokens, speculators and layers as in `Trained`."""
    model, adapters = write_all(name, folder)
    [(plain, _)] = run_in_memory(
        1, partial(answers, engine_config(model), adapters, 0, None, Captures.NONE)
    )
    trained = Trained(folder, model, adapters, plain, tokens, speculators, layers)
    captured = captures is not Captures.NONE
    own = partial(answers, trained.config, adapters, NUM_DRAFTS, lost_at, captures)
    for made, run in run_ranks(ranks, own):
        assert (run.runner.num_captured > 5) == captured
        trained.check(made, run)


def test_graphs_that_find_no_memory_are_given_up(tmp_path: Path) -> None:
    """Those of heads too: else each step would try again."""
    model = write_target("llama", tmp_path / "model")
    heads = eagle3.Heads(embedding_of(model), MOST, False).write(tmp_path / "heads", False)
    runner = load_paged(with_heads(model, heads), SingleRank(), CPU).allocate()

    def record(compute: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("nothing is left")

    prepare_heads(runner, torch.zeros(8, 3 * WIDTH), record)
    assert runner.num_unrecorded > len(ROOMS)
    runner.record_next()
    assert runner.num_unrecorded == 0


def write_all(name: str, folder: Path) -> tuple[Path, list[Path]]:
    """Write a target and two adapters."""
    model = write_target(name, folder / "model")
    return model, [write_adapter(folder / f"a{i}", model, each) for i, each in enumerate(RECIPES)]


class Trained:
    """Heads that were trained on answers, and what they should guess.

    plain: the answers. tokens: those that can be guessed. layers: behind which states are read.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        adapters: Sequence[Path],
        plain: list[Answer],
        tokens: list[int] | None,
        speculators: bool,
        layers: tuple[int, ...],
    ) -> None:
        self._plain = plain
        self._texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
        folders = [adapters[each.slot] if each.slot >= 0 else None for each in REQUESTS]
        self._states = [
            inner_states(model, own, text, layers)
            for own, text in zip(folders, self._texts, strict=True)
        ]
        torch.manual_seed(4)
        own = eagle3.Heads(embedding_of(model), tokens and sorted(tokens), speculators)
        self._heads: eagle3.Guesses = own
        own.train_on(list(zip(self._states, self._texts, strict=True)))
        ids: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
        if speculators:
            ids = {"eagle_aux_hidden_state_layer_ids": [each + 1 for each in layers]}
        elif layers == (1, 2, 2):
            ids = {}
        self.config = with_heads(model, own.write(folder / "heads", speculators, **ids))

    def check(self, made: list[Answer], run: WatchedRanks) -> None:
        """Assert that tokens are as without heads, and drafts what plain torch guesses."""
        assert [one.tokens for one in made] == [one.tokens for one in self._plain]
        assert len(run.drafted) >= 20
        for index, at, drafts in run.drafted:

            def pick(logits: Tensor, position: int, index: int = index) -> int:
                return guessed(logits[None], REQUESTS[index].sampling, position)[0]

            # The state two positions before chose the token before the draft.
            text, own = self._texts[index], self._states[index]
            expected, _ = self._heads.chain(text, own, at - 2, len(drafts), pick)
            assert list(drafts) == expected, f"guesses differ: request {index} at {at}"
        skipped = [len(run.ended["r", index].skipped) for index in range(len(REQUESTS))]
        assert sum(skipped) >= NUM_TOKENS, skipped


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "captures"),
    [
        ("positions", Captures.NONE),
        ("entries", Captures.NONE),
        ("order", Captures.TARGET),
        ("begin", Captures.HEADS),
        ("drafts", Captures.HEADS),
    ],
)
def test_faults_on_purpose_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, captures: Captures
) -> None:
    """The comparison with plain torch must fail."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    if fault == "positions":
        right = Eagle3Heads.forward
        monkeypatch.setattr(
            Eagle3Heads,
            "forward",
            lambda self, ids, at, *rest: right(self, ids, at // 2, *rest),
        )
    elif fault == "entries":
        tables = layer_guesses.LayerGuesser._tables
        monkeypatch.setattr(
            layer_guesses.LayerGuesser, "_tables", lambda *given: tables(*given) * 0
        )
    elif fault == "begin":
        begin = ChainGraphs.begin
        monkeypatch.setattr(ChainGraphs, "begin", lambda self, g, at: begin(self, -g, at))
    elif fault == "drafts":
        cumprod = Tensor.cumprod
        monkeypatch.setattr(Tensor, "cumprod", lambda self, dim: cumprod(self, dim) * 0)
    else:
        take = layer_guesses.LayerStates.take
        monkeypatch.setattr(layer_guesses.LayerStates, "take", lambda self: take(self).flip(1))
    with pytest.raises(AssertionError, match="guesses differ"):
        compare(tmp_path, "llama", 1, MOST, False, (1, 2, 3), None, captures)


def test_logits_are_those_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in chunks, of a draft that is half right, and of chains over a page's end."""
    model = write_target("llama", tmp_path / "model")
    torch.manual_seed(5)
    heads = eagle3.Heads(embedding_of(model), sorted(MOST)).requires_grad_(False)
    folder = heads.write(tmp_path / "heads")
    runner = load_paged(with_heads(model, folder), SingleRank(), CPU).allocate()
    served: list[Tensor] = []
    right = Eagle3Heads.logits

    def logits(self: Eagle3Heads, g: Tensor) -> Tensor:
        served.append(right(self, g)[0])
        return served[-1][None]

    monkeypatch.setattr(Eagle3Heads, "logits", logits)
    prompt = torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(6)).tolist()
    join = RequestJoin(0, prompt, len(prompt), -1, Sampling())
    first = ForwardBatch([join], [StepRow(0, 0, 9, [3], False)], 0)
    second = ForwardBatch([], [StepRow(0, 9, 5, [], True)], 4)
    assert runner.step(first).wait().guesses is None
    told = runner.step(second).wait()
    [token] = told.tokens
    [draft] = told.guesses or [[]]
    text = [*prompt, token]
    check(heads, model, text, 13, draft, served)
    # One guess is made right, the next one wrong.
    best = runner.step(ForwardBatch([], [StepRow(0, 14, 1, [], True)], 0)).wait().tokens[0]
    served.clear()
    drafts = (best, 2)
    third = ForwardBatch([], [StepRow(0, 14, 3, [5], True, drafts=drafts)], 4)
    told = runner.step(third).wait()
    assert told.tokens[0] == best
    assert told.tokens[1] != 2
    [draft] = told.guesses or [[]]
    check(heads, model, [*text, *told.tokens[:2]], 15, draft, served)


def check(
    heads: eagle3.Heads,
    model: Path,
    text: list[int],
    at: int,
    draft: list[int],
    served: list[Tensor],
) -> None:
    """Assert that logits and guesses behind `at` are those of plain torch."""
    states = inner_states(model, None, text, (1, 2, 2))
    expected, logits = heads.chain(text, states, at, len(served), lambda x, _: int(x.argmax()))
    assert len(served) == 4
    assert draft == expected
    torch.testing.assert_close(torch.stack(served), logits, atol=1e-4, rtol=0)


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    model = write_target("llama", tmp_path / "model")

    def load(folder: Path, model: Path = model) -> None:
        load_paged(with_heads(model, folder), SingleRank(), CPU)

    heads = eagle3.Heads(torch.zeros(VOCAB, WIDTH), sorted(MOST))
    folder = heads.write(tmp_path / "heads")
    load(folder)
    wide = eagle3.Heads(torch.zeros(VOCAB, 2 * WIDTH)).write(tmp_path / "wide")
    with pytest.raises(CheckpointError, match=f"The model is {WIDTH} wide.*for another model"):
        load(wide)
    first = heads.write(tmp_path / "first", eagle_config=FIRST)
    heads.guessed = None
    with pytest.raises(CheckpointError, match="no tensor 'd2t', and fewer tokens"):
        load(heads.write(tmp_path / "unmapped"))
    few: dict[str, Any] = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 6]}}
    with pytest.raises(ArchitectureError, match="behind layers 0, 1, 6, and the model has 6"):
        load(heads.write(tmp_path / "few", **few))
    with pytest.raises(ValueError, match="cannot read the states of this model's layers"):
        load(folder, write_gpt2(tmp_path / "gpt2", "plain"))
    with pytest.raises(ValueError, match="cannot read the states of this model's layers"):
        load(folder, write_tiny(tmp_path / "indexed", "glm_moe_dsa"))
    windowed = write_relative(tmp_path / "windowed", "mistral", sliding_window=8)
    with pytest.raises(ValueError, match="each layer of this model has a window"):
        load(first, windowed)


def test_on_gpus_heads_need_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.LAUNCHED_ON == ("cpu",)
    model = write_target("llama", tmp_path / "model")
    folder = eagle3.Heads(torch.zeros(VOCAB, WIDTH)).write(tmp_path / "heads")
    monkeypatch.setattr(loading, "LAUNCHED_ON", ())
    config = with_heads(model, folder)
    load_paged(config, SingleRank(), CPU)
    launched = config.model_copy(update={"cuda_graphs": CudaGraphs.NONE})
    with pytest.raises(ValueError, match=r"set engine.cuda_graphs to decode or all"):
        load_paged(launched, SingleRank(), CPU)


def test_entries_rest_where_no_guesses_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come again with a prompt, and where guesses are wanted."""
    model = write_target("llama", tmp_path / "model")
    folder = eagle3.Heads(torch.zeros(VOCAB, WIDTH)).write(tmp_path / "heads")
    runner = load_paged(with_heads(model, folder), SingleRank(), CPU).allocate()
    made: list[int] = []
    states, at = Eagle3Heads.from_target, iter(range(9, 40))

    def counted(self: Eagle3Heads, inner: Tensor) -> Tensor:
        made.append(len(inner))
        return states(self, inner)

    def prompt(slot: int, block: int) -> None:
        join = RequestJoin(slot, list(range(5, 14)), 9, -1, Sampling())
        runner.step(ForwardBatch([join], [StepRow(slot, 0, 9, [block], True)])).wait()

    def decode(guesses: int) -> None:
        made.clear()
        start = next(at)
        blocks = [start // BLOCK_SIZE] if start % BLOCK_SIZE == 0 else []
        batch = ForwardBatch([], [StepRow(0, start, 1, blocks, True)], guesses)
        assert (runner.step(batch).wait().guesses is None) == (guesses == 0)

    monkeypatch.setattr(Eagle3Heads, "from_target", counted)
    prompt(0, 0)
    counts = []
    for _ in range(layer_guesses.RESTED + 3):
        decode(0)
        counts.append(len(made))
    assert counts == [1] * layer_guesses.RESTED + [0] * 3
    decode(2)
    assert made
    for _ in range(layer_guesses.RESTED + 1):
        decode(0)
    assert not made
    prompt(1, 8)
    assert made == [9]
