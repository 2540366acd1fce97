"""What the padded runner promises beside the right numbers: any plan, lifetimes, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.architectures.base import ArchitectureError
from configs.engine import EngineConfig, LimitsConfig
from configs.model import ModelConfig, Quantize
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.models.padded.batch import ROOM
from modeling.runner import load_padded as load_padded_module
from modeling.runner import select
from modeling.runner.load_padded import load_padded
from modeling.runner.load_paged import load_paged
from modeling.runner.padded import PaddedRunner
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.modeling.models.tiny_causal import tiny_config
from tests.modeling.padded import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_PAGES,
    PaddedWorld,
    generate_padded,
    padded_config,
    padded_runner,
)
from tests.modeling.stepping import Asked
from tests.sharding.views import LoneRank

PROMPTS = [[5, 9, 33, 71, 8, 60, 12], [44, 3, 17], [80] * 19, [9, 8, 7, 6, 5]]
CPU = torch.device("cpu")
ADAPTERS = ("r8", "r16")


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


@pytest.fixture
def runner(padded: PaddedWorld) -> PaddedRunner:
    return padded_runner(padded.model("gptj"), [padded.adapter("gptj", name) for name in ADAPTERS])


def asked(index: int, **fields: int) -> Asked:
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1000 + index)
    options = {"slot": index % 3 - 1, "num_tokens": 12, **fields}
    return Asked(PROMPTS[index], sampling=sampling, **options)


def run(runner: PaddedRunner, requests: list[Asked]) -> list[list[int]]:
    return [answer.tokens for answer in generate_padded(runner, requests)]


def join(place: int, index: int, more: list[int] | None = None) -> RequestJoin:
    request, tokens = asked(index), [*PROMPTS[index], *(more or [])]
    return RequestJoin(place, tokens, len(PROMPTS[index]), request.slot, request.sampling)


def row(place: int, start: int, length: int = 1) -> StepRow:
    return StepRow(place, start, length, [], True)


def step(runner: PaddedRunner, joins: list[RequestJoin], rows: list[StepRow]) -> list[int]:
    found = runner.step(ForwardBatch(joins, rows)).wait().tokens
    runner.check()
    return found


def test_sampled_tokens_depend_on_their_request_alone(runner: PaddedRunner) -> None:
    alone = [run(runner, [asked(i)])[0] for i in range(4)]
    together = run(runner, [asked(i, chunk=2 + i, joins_at=3 - i) for i in range(4)])
    assert together == alone
    lengths = [4, 12, 7, 9]
    leaving = run(runner, [asked(i, num_tokens=lengths[i], joins_at=2 * i) for i in (2, 0, 3, 1)])
    assert leaving == [alone[i][: lengths[i]] for i in (2, 0, 3, 1)]


def test_rows_may_pause_and_come_back(runner: PaddedRunner) -> None:
    """A plan leaves out a row that lacked a block; nobody else notices, and it goes on."""
    first, second = (run(runner, [asked(i)])[0] for i in (0, 1))
    assert step(runner, [join(3, 0), join(5, 1)], [row(3, 0, 7), row(5, 0, 3)]) == [
        first[0],
        second[0],
    ]
    assert step(runner, [], [row(5, 3)]) == [second[1]]
    assert step(runner, [], [row(5, 4)]) == [second[2]]
    assert step(runner, [], [row(5, 5), row(3, 7)]) == [second[3], first[1]]
    for i in range(4):
        assert step(runner, [], [row(3, 8 + i), row(5, 6 + i)]) == [first[2 + i], second[4 + i]]
    assert step(runner, [], [row(3, 12)]) == [first[6]]
    assert step(runner, [], [row(5, 10), row(3, 13)]) == [second[8], first[7]]
    assert step(runner, [], [row(5, 11)]) == [second[9]]


def test_positions_may_be_computed_again(runner: PaddedRunner) -> None:
    """No scheduler of ours asks for it; an answer of the wrong length would be worse."""
    (whole,) = run(runner, [asked(1)])
    assert step(runner, [join(5, 1)], [row(5, 0, 3)]) == whole[:1]
    assert step(runner, [], [row(5, 3)]) == [whole[1]]
    assert step(runner, [], [row(5, 0, 4)]) == [whole[1]]
    assert step(runner, [], [row(5, 2, 3)]) == [whole[2]]
    assert step(runner, [], [row(5, 5)]) == [whole[3]]


def test_a_preempted_request_goes_on_as_if_nothing_was(runner: PaddedRunner) -> None:
    whole, other = (run(runner, [asked(i)])[0] for i in (1, 2))
    step(runner, [join(0, 2), join(1, 1)], [row(0, 0, 19), row(1, 0, 3)])
    # Back at another place with its first five tokens, beside one that decodes.
    assert step(runner, [join(6, 1, whole[:5])], [row(6, 0, 8), row(0, 19)]) == [
        whole[5],
        other[1],
    ]


def test_a_place_is_given_to_another_request(runner: PaddedRunner) -> None:
    """Even when the one before was just as long."""
    first, second = (run(runner, [asked(i)])[0] for i in (0, 3))
    assert step(runner, [join(2, 0)], [row(2, 0, 7)]) == first[:1]
    assert step(runner, [join(2, 3, second[:3])], [row(2, 7)]) == [second[3]]
    assert step(runner, [], [row(2, 8)]) == [second[4]]


def test_steps_in_flight_keep_their_own_tokens(runner: PaddedRunner) -> None:
    (whole,) = run(runner, [asked(0)])
    outputs = [runner.step(ForwardBatch([join(2, 0)], [row(2, 0, 7)]))]
    outputs += [runner.step(ForwardBatch([], [row(2, 7 + i)])) for i in range(4)]
    assert [output.wait().tokens for output in reversed(outputs)] == [[t] for t in whole[4::-1]]


def test_steps_that_sample_nothing(runner: PaddedRunner) -> None:
    assert step(runner, [], []) == []
    halfway = runner.step(ForwardBatch([join(0, 2)], [StepRow(0, 0, 8, [], False)])).wait()
    assert (halfway.tokens, halfway.logprobs) == ([], None)


def test_each_row_gets_the_logprobs_it_asked_for(runner: PaddedRunner) -> None:
    params = [Sampling(logprobs=3), Sampling(), Sampling(temperature=1.0, logprobs=0)]
    answers = generate_padded(runner, [Asked(PROMPTS[i], 2, sampling=params[i]) for i in range(3)])
    assert answers[1].logprobs == [None, None]
    for token, own in zip(answers[0].tokens, answers[0].logprobs, strict=True):
        assert own is not None
        assert own.top_ids[0] == token
        assert own.top_logprobs[0] == own.logprob < 0
        assert len(own.top_ids) == len(own.top_logprobs) == 3
    assert all(own is not None and own.top_ids == [] for own in answers[2].logprobs)


def test_penalties_count_each_requests_own_tokens(runner: PaddedRunner) -> None:
    """A greedy row that may not repeat itself, whoever is beside it and whatever was before."""
    once = Sampling(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
    bias = Sampling(logit_bias=((7, 100.0), (9, 90.0)), bad_words=((7, 7),))
    listed = Sampling(logit_bias=((7, 100.0), (9, 90.0)), allowed_ids=(9, 5))
    requests = [
        Asked(PROMPTS[0], 20, sampling=once),
        Asked(PROMPTS[1], 3, sampling=bias, joins_at=2),
        Asked(PROMPTS[0], 20, joins_at=4),
        Asked(PROMPTS[1], 3, sampling=listed, joins_at=2),
    ]
    penalised, biased, free, only = run(runner, requests)
    assert [penalised] == run(runner, requests[:1])
    assert len(set(penalised)) > len(set(free))
    assert biased == [7, 9, 7]
    assert only == [9, 9, 9]
    assert free == run(runner, requests[2:3])[0]


def test_a_slot_is_given_to_another_adapter(padded: PaddedWorld, runner: PaddedRunner) -> None:
    greedy = [Asked(PROMPTS[0], 8, slot=slot) for slot in (0, 1)]
    first, second = (run(runner, [request])[0] for request in greedy)
    assert first != second
    key = AdapterKey(9)
    folder = padded.adapter("gptj", "r16")
    shape = runner.stage(FetchedAdapter(key, "r16", str(folder), "r16"))
    runner.load_adapter(key, 0, [list(range(count)) for count in shape.num_pages])
    runner.drop(key)
    assert run(runner, greedy[:1]) == [second]


def test_long_answers_outgrow_the_masks_room(runner: PaddedRunner) -> None:
    answers = run(runner, [asked(i, num_tokens=2 * ROOM + 5 * i) for i in range(3)])
    assert answers[1][:12] == run(runner, [asked(1)])[0]


def test_adapters_that_cannot_be_served_are_refused(
    padded: PaddedWorld, runner: PaddedRunner, tmp_path: Path
) -> None:
    bloom = padded.adapter("bloom", "r4")
    with pytest.raises(AdapterError, match="no adaptable module of this model"):
        runner.stage(FetchedAdapter(AdapterKey(7), "r4", str(bloom), "r4"))
    own = padded.adapter("gptj", "r4")
    activated = shutil.copytree(own, tmp_path / "activated")
    fields = json.loads((own / "adapter_config.json").read_text())
    fields["alora_invocation_tokens"] = [1, 2]
    (activated / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(AdapterError, match="activated LoRA is not served over this model"):
        runner.stage(FetchedAdapter(AdapterKey(7), "activated", str(activated), "activated"))
    off = padded_runner(padded.model("gptj"), adapters=AdaptersConfig(enabled=False))
    with pytest.raises(AdapterError, match=r"adapters\.enabled"):
        off.stage(FetchedAdapter(AdapterKey(7), "r4", str(bloom), "r4"))


@pytest.mark.parametrize(
    "recipe",
    [
        AdapterRecipe(target_modules=["q_proj", "wte"], save_embeddings=False),
        AdapterRecipe(target_modules=["q_proj", "lm_head"], save_embeddings=False),
        AdapterRecipe(target_modules=["q_proj"], extra={"modules_to_save": ["lm_head"]}),
    ],
)
def test_no_setting_is_advised_that_would_be_refused(
    padded: PaddedWorld, runner: PaddedRunner, tmp_path: Path, recipe: AdapterRecipe
) -> None:
    """Embedding and head of such a model are not adapted, whatever adapters.vocabulary says."""
    folder = write_adapter(tmp_path / "ends", padded.model("gptj"), recipe)
    with pytest.raises(AdapterError, match=r"linear modules inside the layers") as told:
        runner.stage(FetchedAdapter(AdapterKey(7), "ends", str(folder), "ends"))
    assert "adapters.vocabulary" not in told.value.message


def test_the_report_counts_what_was_taken(padded: PaddedWorld) -> None:
    fields = padded_config(padded.model("gptj")).model_dump()
    limits = LimitsConfig(max_running=3, max_total_tokens=50)
    config = EngineConfig.model_validate({**fields, "cache": {}, "limits": limits})
    loaded = load_padded(config, SingleRank(), CPU)
    assert loaded.measure() == 3 * 4, "every batch slot at full length"
    report = loaded.allocate(9).report
    widths = [(32, 32)] * 4 + [(32, 48), (48, 32)]
    assert report.projections == (
        "k_proj",
        "v_proj",
        "q_proj",
        "out_proj",
        "fc_in",
        "fc_out",
        "score",
    )
    rows = 2 * sum(a + b for a, b in widths) + 32
    assert report.adapter_pool_bytes == NUM_PAGES * 8 * 4 * rows
    assert not report.paged
    assert report.kv_bytes == 9 * BLOCK_SIZE * 2 * 2 * 32 * 4
    assert (report.num_blocks, report.max_total_tokens) == (9, 50)
    assert (report.attention, report.adapter_kernel) == ("padded", "reference")
    assert "GPTJForCausalLM" in report.attention_reason


def test_lengths_are_the_models_own_or_what_alibi_is_asked_for(padded: PaddedWorld) -> None:
    longer: dict[str, Any] = {"limits": LimitsConfig(max_running=2, max_total_tokens=300)}
    with pytest.raises(ValueError, match=r"max_total_tokens \(300\).*\(256\)"):
        padded_runner(padded.model("gptj"), **longer)
    assert padded_runner(padded.model("bloom"), **longer)._size.max_total_tokens == 300
    assert padded_runner(padded.model("bloom"))._size.max_total_tokens == 2048


def test_more_ranks_than_one_are_refused(padded: PaddedWorld) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel \(2\) must be 1"):
        load_padded(padded_config(padded.model("bloom")), LoneRank(0, 2), CPU)


def test_the_vocabulary_cannot_be_opened(padded: PaddedWorld) -> None:
    with pytest.raises(ValueError, match=r"adapters\.vocabulary: .* set it to false"):
        padded_runner(padded.model("bloom"), adapters=AdaptersConfig(vocabulary=True))


@pytest.mark.parametrize(
    "setting", [{"whole_linears": {"dense": 1}}, {"vocabulary_copies": 1}, {"expert_pages": 1}]
)
def test_settings_without_an_effect_are_refused(
    padded: PaddedWorld, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=rf"adapters\.{name}: .* remove it"):
        padded_runner(padded.model("bloom"), adapters=AdaptersConfig(**setting))


def test_what_cannot_be_padded_says_why_it_is_not_paged(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}
    settings = {**tiny_config("lfm2").to_dict(), "architectures": None, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ArchitectureError, match=r"conv: .*; .* because rope_type longrope is not"):
        select.load_runner(padded_config(tmp_path), SingleRank(), CPU, spread=False)


def test_the_runner_depends_on_the_model(
    padded: PaddedWorld,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []
    monkeypatch.setattr(select, "load_paged", lambda *_: loaded.append("paged"))
    monkeypatch.setattr(load_padded_module, "load_padded", lambda *_: loaded.append("padded"))

    def selected(config: EngineConfig) -> str:
        select.load_runner(config, SingleRank(), CPU, spread=False)
        return loaded.pop()

    with caplog.at_level("INFO", "loray.modeling"):
        assert selected(padded_config(padded.model("bert"))) == "padded"
        assert "BertLMHeadModel runs in transformers' padded code" in caplog.text
        caplog.clear()
        llama = padded_config(write_llama(tmp_path))
        assert selected(llama) == "paged"
        assert not caplog.records
        nf4 = ModelConfig(id=llama.model.id, quantize=Quantize.BITSANDBYTES_NF4)
        assert selected(llama.model_copy(update={"model": nf4})) == "paged"


def test_a_known_family_runs_padded_too(tmp_path: Path) -> None:
    runner = padded_runner(write_llama(tmp_path))
    assert type(runner._model.model).__name__ == "LlamaForCausalLM"
    (padded,) = run(runner, [Asked(PROMPTS[0], 9)])
    paged = load_paged(padded_config(tmp_path), SingleRank(), CPU).allocate()
    batch = ForwardBatch(
        [RequestJoin(0, PROMPTS[0], 7, -1, Sampling())], [StepRow(0, 0, 7, [NUM_BLOCKS - 1], True)]
    )
    assert paged.step(batch).wait().tokens == padded[:1]
