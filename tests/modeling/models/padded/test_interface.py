"""OPT's and GPT-NeoX's padded interface against transformers: every output, on 1, 2 and 4 ranks."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from modeling.models.gpt_neox import GPTNeoXForCausalLM
from modeling.models.opt import OPTForCausalLM
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints_others import write_gpt_neox, write_opt
from tests.modeling.models.paged_checks import Checkpoint, opened
from tests.modeling.models.stepping import load
from tests.ranks import run_ranks

CASES = [
    ("opt", "plain"),
    ("opt", "post_norm"),
    ("opt", "projected"),
    ("opt", "no_last_norm"),
    ("gpt_neox", "parallel"),
    ("gpt_neox", "sequential"),
    ("gpt_neox", "linear_rope"),
    ("gpt_neox", "tied"),
]
WRITERS = {"opt": write_opt, "gpt_neox": write_gpt_neox}
PAD = 1


@dataclass(frozen=True)
class Case:
    """A checkpoint, and a left-padded batch for it."""

    family: str
    checkpoint: Checkpoint
    ids: Tensor
    mask: Tensor

    @property
    def labels(self) -> Tensor:
        """Labels that leave the padding out."""
        return self.ids.masked_fill(self.mask == 0, -100)

    @property
    def positions(self) -> dict[str, Tensor]:
        """What LoRAX passes beside the mask, for models that take it."""
        counted = (self.mask.cumsum(1) - 1).masked_fill(self.mask == 0, 1)
        return {"position_ids": counted} if self.family == "gpt_neox" else {}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, variant = request.param
    folder = WRITERS[family](tmp_path_factory.mktemp(family), variant)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 96, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in ((1, 4), (2, 1)):
        mask[row, :padding] = 0
        ids[row, :padding] = PAD
    return Case(family, opened(folder), ids, mask)


def padded(case: Case, group: TensorParallel | None = None) -> Any:
    model = load(case.checkpoint.folder, group or SingleRank())
    assert isinstance(model, OPTForCausalLM | GPTNeoXForCausalLM)
    return model


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def own_heads(whole: Tensor, group: TensorParallel) -> Tensor:
    """This rank's part of [batch, heads, ...]."""
    return whole.chunk(group.size, dim=1)[group.rank]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_output_equals_transformers(case: Case, ranks: int) -> None:
    asked: dict[str, Any] = {
        "attention_mask": case.mask,
        "labels": case.labels,
        "use_cache": True,
        "output_attentions": True,
        "output_hidden_states": True,
    }
    with torch.no_grad():
        want = case.checkpoint.oracle(case.ids, **asked)

    def on_rank(group: TensorParallel) -> None:
        got = padded(case, group)(case.ids, **asked)
        close(got.logits, want.logits)
        close(got.loss, want.loss)
        for ours, theirs in zip(got.hidden_states, want.hidden_states, strict=True):
            close(ours, theirs)
        for ours, theirs in zip(got.attentions, want.attentions, strict=True):
            close(ours, theirs)
        for (keys, values), layer in zip(
            got.past_key_values, want.past_key_values.layers, strict=True
        ):
            close(keys, own_heads(layer.keys, group))
            close(values, own_heads(layer.values, group))

    run_ranks(ranks, on_rank)


@pytest.mark.parametrize("kind", [None, DynamicCache])
@pytest.mark.parametrize("ranks", [1, 2])
def test_token_by_token(case: Case, ranks: int, kind: Any) -> None:
    """A prefill and three tokens, each over the cache that the last forward gave back."""
    cuts = [(0, 6), (6, 7), (7, 8), (8, 9)]

    def steps(model: Any, past: Any) -> list[Tensor]:
        out = []
        for start, stop in cuts:
            more = {name: given[:, start:stop] for name, given in case.positions.items()}
            answer = model(
                input_ids=case.ids[:, start:stop],
                attention_mask=case.mask[:, :stop],
                past_key_values=past,
                use_cache=True,
                **more,
            )
            assert past is None or type(answer.past_key_values) is type(past)
            past = answer.past_key_values
            out.append(answer.logits)
        return out

    with torch.no_grad():
        want = steps(case.checkpoint.oracle, DynamicCache())

    def on_rank(group: TensorParallel) -> list[Tensor]:
        return steps(padded(case, group), kind() if kind else None)

    for got in run_ranks(ranks, on_rank):
        for ours, theirs in zip(got, want, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_head_mask(case: Case, ranks: int) -> None:
    """Masking a head is scaling what the output projection reads of it."""
    factors = torch.tensor([[1.0, 0.0, 1.0, 0.5], [0.25, 1.0, 0.0, 1.0]])
    state = {name: value.clone() for name, value in case.checkpoint.oracle.state_dict().items()}
    name = {
        "opt": "model.decoder.layers.{}.self_attn.out_proj.weight",
        "gpt_neox": "gpt_neox.layers.{}.attention.dense.weight",
    }[case.family]
    weights = [case.checkpoint.oracle.get_parameter(name.format(i)) for i in range(2)]
    with torch.no_grad():
        for weight, row in zip(weights, factors, strict=True):
            weight.mul_(row.repeat_interleave(weight.shape[1] // 4))
        want = case.checkpoint.oracle(case.ids, attention_mask=case.mask).logits
    case.checkpoint.oracle.load_state_dict(state)

    def on_rank(group: TensorParallel) -> Tensor:
        out = padded(case, group)(case.ids, attention_mask=case.mask, head_mask=factors)
        logits: Tensor = out.logits
        return logits

    for logits in run_ranks(ranks, on_rank):
        close(logits, want)


def test_given_positions_are_used(case: Case) -> None:
    model = padded(case)
    if not case.positions:  # OPT counts them by the mask
        assert "position_ids" not in inspect.signature(model.forward).parameters
        return
    with torch.no_grad():
        want = case.checkpoint.oracle(case.ids, attention_mask=case.mask, **case.positions)
    got = model(case.ids, attention_mask=case.mask, **case.positions)
    close(got.logits, want.logits)
    shared = torch.arange(9)[None] + 5
    far = model(case.ids, attention_mask=case.mask, position_ids=shared)
    assert far.logits.shape == got.logits.shape


def test_embeddings_in_place_of_tokens(case: Case) -> None:
    embeds = case.checkpoint.oracle.get_input_embeddings()(case.ids)
    with torch.no_grad():
        want = case.checkpoint.oracle(inputs_embeds=embeds, attention_mask=case.mask).logits
    close(padded(case)(inputs_embeds=embeds.detach(), attention_mask=case.mask).logits, want)


def test_what_a_call_need_not_say(case: Case) -> None:
    model = padded(case)
    with torch.no_grad():
        want = case.checkpoint.oracle(case.ids)
    got = model(case.ids)
    close(got.logits, want.logits)
    assert len(got.past_key_values) == 2  # the config's use_cache
    assert (got.loss, got.hidden_states, got.attentions) == (None, None, None)
    assert model(case.ids, use_cache=False).past_key_values is None
    values = model(case.ids, labels=case.ids, use_cache=False, return_dict=False)
    assert isinstance(values, tuple)
    assert len(values) == 2
    close(values[1], want.logits)


def test_arguments_that_do_not_fit(case: Case) -> None:
    model = padded(case)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(case.ids, inputs_embeds=torch.zeros(3, 9, 32))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 8\), it must be \(3, 9\)"):
        model(case.ids, attention_mask=case.mask[:, 1:])
    with pytest.raises(ValueError, match="head_mask"):
        model(case.ids, head_mask=torch.ones(5))


@pytest.mark.parametrize("variant", ["longrope", "dynamic"])
@pytest.mark.parametrize("lengths", [(9,), (32,), (33,), (30, 1, 1, 1, 1), (40, 3)])
def test_ropes_of_the_batchs_length(tmp_path: Path, variant: str, lengths: tuple[int, ...]) -> None:
    """As transformers' forward has it: the farthest position decides, cached keys stay."""
    folder = write_gpt_neox(tmp_path, variant)
    ids = torch.randint(3, 96, (2, sum(lengths)), generator=torch.Generator().manual_seed(2))

    def steps(model: Any) -> list[Tensor]:
        out, past = [], None
        for part in torch.split(ids, list(lengths), dim=1):
            said = model(part, past_key_values=past, use_cache=True)
            out.append(said.logits)
            past = said.past_key_values
        return out

    with torch.no_grad():
        want = steps(opened(folder).oracle)
        for ours, theirs in zip(steps(load(folder, SingleRank())), want, strict=True):
            close(ours, theirs)


def test_dynamic_rope_is_refused_where_it_changes(tmp_path: Path) -> None:
    model: Any = load(write_gpt_neox(tmp_path, "dynamic"), SingleRank())
    with pytest.raises(ValueError, match="position_ids must be below 64"):
        model(torch.ones(1, 65, dtype=torch.int64))
