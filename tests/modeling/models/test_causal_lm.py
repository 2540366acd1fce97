"""The padded wrapper: the seed's doors, foreign code, and what its probe refuses."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.adapters.kernels.reference import ReferenceBatch
from modeling.adapters.product import AdapterData
from modeling.models.causal_lm import CausalLM, CausalLMBatch
from modeling.models.padded import sharing
from modeling.models.padded.adapters import shortest_names
from modeling.models.padded.sharing import Sharing
from modeling.runner.padded_loading import load_causal_lm
from tests.checkpoints import load_oracle, oracle_greedy, oracle_logits
from tests.checkpoints_padded import write_padded
from tests.modeling.models.foreign_models import (
    ColumnPositions,
    Counting,
    ForeignModel,
    Forgetful,
    Halves,
    Odd,
    Recurrent,
    foreign,
)
from tests.modeling.models.tiny_causal import write_tiny
from tests.modeling.padded import padded_config

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 33, 7, 8, 6, 12], [4, 3], [30] * 12]


def requests(prompts: list[list[int]], sampling: Sampling | None = None) -> list[RequestJoin]:
    sampling = sampling or Sampling()
    return [RequestJoin(i, tokens, len(tokens), -1, sampling) for i, tokens in enumerate(prompts)]


def load(folder: Path) -> CausalLM:
    return load_causal_lm(padded_config(folder).model, CPU, spread=False).model


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_padded(tmp_path_factory.mktemp("bloom"), "bloom")


def test_the_seeds_names_and_signatures() -> None:
    assert {"from_requests", "filter", "concatenate"} <= set(dir(CausalLMBatch))
    forward = list(inspect.signature(CausalLM.forward).parameters)
    assert forward[1:5] == ["input_ids", "attention_mask", "position_ids", "past_key_values"]
    assert list(inspect.signature(CausalLM.generate_token).parameters)[1] == "batch"


@torch.inference_mode()
def test_forward_is_the_models_own(bloom: Path) -> None:
    model = load(bloom)
    batch = model.batch(requests(PROMPTS))
    logits, past = model.forward(batch.input_ids, batch.seen, batch.position_ids)
    assert logits.shape == (3, 12, 96)
    oracle = load_oracle(bloom)
    for row, prompt in enumerate(PROMPTS):
        told = oracle_logits(oracle, prompt)
        torch.testing.assert_close(logits[row, -len(prompt) :], told, atol=1e-4, rtol=0)
    again, _ = model.forward(
        torch.full((3, 1), 7), torch.cat([batch.seen, torch.ones(3, 1).long()], 1),
        batch.position_ids[:, -1:] + 1, past,
    )  # fmt: skip
    told = oracle_logits(oracle, [*PROMPTS[1], 7])[-1]
    torch.testing.assert_close(again[1, 0], told, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_batches_generate_while_rows_join_and_leave(bloom: Path) -> None:
    model, oracle = load(bloom), load_oracle(bloom)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def run(batch: CausalLMBatch, steps: int) -> CausalLMBatch:
        for _ in range(steps):
            chosen, batch = model.generate_token(batch)
            for place, token in zip(batch.batch_slots, chosen.tokens.tolist(), strict=True):
                found[place].append(token)
            batch.check()
        return batch

    first, second, third = requests(PROMPTS)
    batch = run(model.batch([third, second]), 4)
    batch = CausalLMBatch.concatenate([batch, run(model.batch([first]), 1)])
    batch = run(batch, 5).filter([0, 1])
    run(batch, 6)
    for place, tokens in found.items():
        assert tokens == oracle_greedy(oracle, PROMPTS[place], len(tokens))
    assert [len(tokens) for tokens in found.values()] == [12, 15, 9]


@torch.inference_mode()
def test_a_token_comes_with_the_best_ones(bloom: Path) -> None:
    model = load(bloom)
    chosen, _ = model.generate_token(model.batch(requests([[5]], Sampling(logprobs=2))))
    assert chosen.logprobs is not None
    assert chosen.logprobs.top_ids.shape == (1, 2)


@torch.inference_mode()
def test_code_that_knows_only_tuples() -> None:
    """Keys as [rows * heads, head_dim, length], through joins and leaves."""
    module = ForeignModel()
    model = CausalLM(foreign(module), 0, CPU)
    assert not model.keys_head_dim_last
    assert model.bytes_per_token == 2 * 2 * 12 * 4
    a, b, c = requests([prompt[:] for prompt in PROMPTS])
    batch = model.batch([a, b])
    tokens = {0: list(PROMPTS[0]), 1: list(PROMPTS[1]), 2: list(PROMPTS[2])}

    def step(batch: CausalLMBatch) -> CausalLMBatch:
        chosen, batch = model.generate_token(batch)
        for place, token in zip(batch.batch_slots, chosen.tokens.tolist(), strict=True):
            tokens[place].append(token)
        return batch

    batch = CausalLMBatch.concatenate([step(step(batch)), step(model.batch([c]))])
    assert isinstance(batch.past_key_values, tuple)
    batch = step(step(step(batch).filter([2, 1])))
    for place, prompt in enumerate(PROMPTS):
        assert tokens[place] == [*prompt, *greedy(module, prompt, len(tokens[place]) - len(prompt))]


def greedy(module: ForeignModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor([tokens])
        logits: Tensor = module(ids, torch.ones_like(ids)).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_rows_of_code_from_elsewhere_share_a_forward_with_their_like_alone() -> None:
    """So that a model may number columns: where all rows are of one length they are positions."""
    model = CausalLM(foreign(ColumnPositions()), 0, CPU)
    assert model.sharing.group(7) != model.sharing.group(8)
    assert model.sharing == CausalLM(foreign(ForeignModel()), 0, CPU).sharing


def test_padding_that_shows_at_start_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the list of what looks at columns lacks."""
    monkeypatch.setattr(sharing, "_column_limits", lambda config: iter(()))
    model = load(write_tiny(tmp_path, "llama4_text"))
    assert model.sharing == Sharing(equal_from=0)
    assert load(write_tiny(tmp_path / "llama", "llama")).sharing == Sharing()


def test_a_model_that_does_not_go_on_from_its_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goes on from its cache.*not served"):
        CausalLM(foreign(Counting()), 0, CPU)
    # Where quantisation makes rows depend on each other anyway, nobody can tell.
    CausalLM(foreign(Counting()), 0, CPU, exact=False)


@torch.inference_mode()
def test_a_module_that_sees_other_tokens_than_at_the_trial_takes_no_deltas() -> None:
    """The row's neighbours would be changed, in silence."""
    model = CausalLM(foreign(Halves()), 0, CPU)
    assert "piece" in [projection.name for projection in model.projections]
    lengths: list[int] = []

    def adapters(length: int) -> AdapterData:
        lengths.append(length)
        return ReferenceBatch([])

    batch = model.batch(requests(PROMPTS[:1] * 2))
    model.next_logits(batch, adapters)
    assert lengths == [7], "made once for all modules"
    batch = model.batch(requests([PROMPTS[2]] * 2))
    model.next_logits(batch)
    with pytest.raises(RuntimeError, match=r"0\.piece was called with 12 tokens and not"):
        model.next_logits(model.batch(requests([PROMPTS[2]] * 2)), adapters)


def test_modules_are_watched_at_decode_too(tmp_path: Path) -> None:
    """What expands a cache of compressed keys sees all of it then, as Doge's dt_proj does."""
    for kind, name in (("deepseek_v3", "kv_b_proj"), ("doge", "dt_proj")):
        linears = load(write_tiny(tmp_path / kind, kind)).linears
        reads = {linear.path.rsplit(".", 1)[-1]: linear.reads_cache for linear in linears}
        assert {path for path, reads_cache in reads.items() if reads_cache} == {name}


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps no cache"):
        CausalLM(foreign(Forgetful()), 0, CPU)


def test_a_model_with_one_state_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="not one key and value for each position"):
        CausalLM(foreign(Recurrent()), 0, CPU)


def test_modules_that_a_hook_cannot_serve_take_no_adapters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "loray.modeling.causal_lm"):
        model = CausalLM(foreign(Odd()), 0, CPU)
    assert [(p.name, p.module, p.num_layers) for p in model.projections] == [
        ("query_key_value", "layers.{layer}.query_key_value", 3),
        ("dense", "layers.{layer}.dense", 3),
        ("flat", "layers.{layer}.flat", 2),
    ]
    for name in ("router", "gate", "twice", "some", "turned", "named", "never"):
        assert f"layers.{{layer}}.{name}" in caplog.text


def test_projections_have_the_shortest_names_that_tell_them_apart() -> None:
    paths = ["h.{layer}.attn.c_proj", "h.{layer}.mlp.c_proj", "h.{layer}.mlp.c_fc", "x.0.c", "c"]
    assert list(shortest_names(paths).values()) == [
        "attn.c_proj", "mlp.c_proj", "c_fc", "0.c", "c",
    ]  # fmt: skip


def test_code_that_fails_beside_other_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("sizes differ")

    monkeypatch.setattr(CausalLM, "next_logits", fail)
    with pytest.raises(ValueError, match=r"own code fails on two rows .*sizes differ"):
        load(write_tiny(tmp_path, "llama"))
