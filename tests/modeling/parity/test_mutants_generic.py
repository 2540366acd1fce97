"""Faults on purpose in models made of transformers' modules: the comparison must notice each."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from modeling.adapters.product import AdapterData
from modeling.layers.angles import Angles
from modeling.layers.rotary import rotate
from modeling.models.base import AttentionLayer
from modeling.models.generic import (
    fusions,
    layer_sums,
    linears,
    model,
    reading,
    stacked_experts,
    step,
)
from modeling.models.generic.cuts import CutPlan, LinearCut, Style
from modeling.models.generic.layer_calls import Call, LayerCall, LayerForms, PagedLayers
from modeling.models.generic.model import GenericForCausalLM
from modeling.models.generic.modules import GenericHead, GenericLinear, MergedColumns
from modeling.models.generic.norms import FusedRMSNorm, NormedSum
from modeling.models.generic.outer_rows import OuterRows
from modeling.models.generic.rotations import RotationForm
from modeling.models.generic.step import CurrentStep, Heads, PositionsAsLength
from modeling.runner.block_tables import BlockTables, GroupLayout, Ints, StepRows
from modeling.runner.input_batch import InputBatch
from sharding.embedding import ParallelHead
from sharding.group import TensorParallel
from sharding.slicing import Segments
from tests.modeling.parity.comparison import BASE, Setting, World, compare, expect_mismatch

GEMMA2 = Setting("generic", "gemma2", 1, [BASE, "r8"])
GEMMA2_CUT = Setting("generic", "gemma2", 2, [BASE, "r8"])
MINISTRAL = Setting("generic", "ministral", 1, [BASE, "r8"])
PHI = Setting("generic", "phi", 1, [BASE])
COHERE = Setting("generic", "cohere", 1, [BASE])
GPT_OSS = Setting("mixture", "gpt_oss", 1, [BASE])
MIXTRAL = Setting("mixture", "mixtral", 1, [BASE])
MIXTRAL_CUT = Setting("mixture", "mixtral", 2, [BASE])
GLM4_CUT = Setting("generic", "glm4", 2, [BASE])
ZAYA = Setting("generic", "zaya", 1, [BASE])

GEMMA4 = Setting("generic", "gemma4_text", 1, [BASE, "r8"])
GEMMA4_CUT = Setting("generic", "gemma4_equal", 2, [BASE, "r8"])
GRANITE = Setting("generic", "granite_dense", 1, [BASE, "r8"])
LLAMA4 = Setting("generic", "llama4_text", 1, [BASE])
LLAMA4_CUT = Setting("generic", "llama4_text", 2, [BASE])
GEMMA3N = Setting("outer", "gemma3n", 1, [BASE])

SOUND = [ZAYA, GEMMA3N, GEMMA4, GEMMA4_CUT, GRANITE, LLAMA4, LLAMA4_CUT]
SOUND += [GEMMA2, GEMMA2_CUT, MINISTRAL, PHI, COHERE, GPT_OSS, MIXTRAL, MIXTRAL_CUT, GLM4_CUT]


@pytest.mark.sweep
@pytest.mark.parametrize("setting", SOUND, ids=lambda s: f"{s.variant}-{s.ranks}")
def test_without_a_fault_nothing_differs(world: World, setting: Setting) -> None:
    compare(world, setting)


def _attend_as(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Change what layers say of their attention; a function gets what is right."""

    def form(**fields: Any) -> AttentionLayer:
        for name, value in changed.items():
            fields[name] = value(fields) if callable(value) else value
        return AttentionLayer(**fields)

    monkeypatch.setattr(step, "AttentionLayer", form)


@pytest.mark.parametrize("by", [-1, 1])
def test_window_off_by_one(world: World, monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    # It would see that a window is longer than what the cache of transformers keeps.
    monkeypatch.setattr(model, "check_windows", lambda *_: None)
    _attend_as(monkeypatch, window=lambda form: form["window"] and form["window"] + by)
    expect_mismatch(world, GEMMA2)


def test_softcap_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _attend_as(monkeypatch, softcap=None)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_scale_of_scores_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _attend_as(monkeypatch, scale=lambda form: form["head_dim"] ** -0.5)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_sinks_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def heads(q: Tensor, k: Tensor, v: Tensor, *_: Any, **others: Any) -> Heads:
        return Heads(q, k, v, None, **others)

    monkeypatch.setattr(step, "Heads", heads)
    _attend_as(monkeypatch, sinks=False)
    expect_mismatch(world, GPT_OSS)


@pytest.mark.sweep
def test_queries_and_keys_rotated_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedLayers._store

    def store(self: PagedLayers, layer: int, heads: Heads) -> Tensor:
        angles = heads.angles[0]
        assert angles is not None, "nothing is left to rotate: choose another family"
        q, k = (rotate(each, *angles) for each in (heads.q, heads.k))
        return real(self, layer, replace(heads, q=q, k=k))

    monkeypatch.setattr(PagedLayers, "_store", store)
    expect_mismatch(world, MINISTRAL)


def test_queries_and_keys_not_rotated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PagedLayers._store

    def store(self: PagedLayers, layer: int, heads: Heads) -> Tensor:
        return real(self, layer, replace(heads, angles=(None, None)))

    monkeypatch.setattr(PagedLayers, "_store", store)
    expect_mismatch(world, MINISTRAL)


@pytest.mark.sweep
def test_norm_by_w_instead_of_one_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fusions._norm

    def norm(module: nn.Module) -> FusedRMSNorm | None:
        found = real(module)
        if found is not None:
            found.weight.data = found.weight.data - 1.0
        return found

    monkeypatch.setattr(fusions, "_norm", norm)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_sum_without_the_norm_before_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _sum_without(monkeypatch, inner=None)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_sum_without_the_factor_before_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _sum_without(monkeypatch, factor=1.0)
    expect_mismatch(world, GRANITE)


@pytest.mark.sweep
def test_sum_without_its_factor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _sum_without(monkeypatch, total_factor=1.0)
    expect_mismatch(world, GEMMA4)


def _sum_without(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    real = NormedSum.compute

    def compute(self: NormedSum, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        return real(replace(self, **changed), x, residual)

    monkeypatch.setattr(NormedSum, "compute", compute)


@pytest.mark.sweep
def test_gate_without_its_activation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(_act: nn.Module, gate: Tensor, other: Tensor, is_gelu: bool) -> Tensor:
        assert is_gelu
        return gate * other

    monkeypatch.setattr(layer_sums, "_gated", gated)
    expect_mismatch(world, GEMMA4)


@pytest.mark.sweep
def test_norm_of_another_layer_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[Tensor] = []

    def keep_ahead(self: FusedRMSNorm, x: Tensor, normed: Tensor) -> None:
        before = last[-1] if last and last[-1].shape == normed.shape else normed
        last.append(normed)
        self._ahead = (x, before)

    monkeypatch.setattr(FusedRMSNorm, "keep_ahead", keep_ahead)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_gate_and_up_swapped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: fusions.FusedGatedMLP, x: Tensor) -> Tensor:
        up, gate = self.gate_up(x.flatten(0, -2), self._step.adapter_data).chunk(2, dim=-1)
        out: Tensor = self.down(self._act(gate) * up)
        return out.view(x.shape)

    monkeypatch.setattr(fusions.FusedGatedMLP, "forward", forward)
    expect_mismatch(world, MINISTRAL)


@pytest.mark.sweep
def test_keys_and_values_merged_in_the_wrong_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MergedColumns.part

    def part(self: MergedColumns, x: Tensor, start: int, stop: int) -> Tensor:
        if len(self.linear.base.offsets) == 3 and start:
            by = stop - start if start == self.linear.base.offsets[1] else start - stop
            start, stop = start + by, stop + by
        return real(self, x, start, stop)

    monkeypatch.setattr(MergedColumns, "part", part)
    expect_mismatch(world, MINISTRAL)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_columns_cut_at_the_wrong_rows(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = CutPlan._columns

    def columns(self: CutPlan, pattern: str, size: int) -> Segments:
        own = real(self, pattern, size)
        return _of_the_other(own, size) if pattern.endswith(name) else own

    monkeypatch.setattr(CutPlan, "_columns", columns)
    expect_mismatch(world, GEMMA2_CUT)


def _of_the_other(own: Segments, size: int) -> Segments:
    """The other one's of two ranks."""
    return tuple(((start + size // 2) % size, (stop - 1 + size // 2) % size + 1)
                 for start, stop in own)  # fmt: skip


@pytest.mark.sweep
def test_fused_gate_and_up_cut_as_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CutPlan.of

    def of(self: CutPlan, path: str, module: nn.Linear) -> LinearCut:
        found = real(self, path, module)
        if found.style is not Style.PAIR:
            return found
        ((start, _), (_, stop)) = found.outputs
        own = (start, stop - module.out_features // 2)
        return replace(found, outputs=((2 * own[0], 2 * own[1]),))

    monkeypatch.setattr(CutPlan, "of", of)
    expect_mismatch(world, GLM4_CUT)


@pytest.mark.sweep
def test_experts_summed_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reading._summed

    def summed(group: TensorParallel, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return real(group, module, inputs, real(group, module, inputs, output))

    monkeypatch.setattr(reading, "_summed", summed)
    expect_mismatch(world, MIXTRAL_CUT)


def test_a_buffer_that_is_left_as_it_was_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SET_AGAIN", {})
    expect_mismatch(world, ZAYA)


def test_experts_not_summed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_summed", lambda group, module, inputs, output: output)
    expect_mismatch(world, MIXTRAL_CUT)


@pytest.mark.sweep
def test_experts_gate_and_up_stacked_in_the_wrong_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_experts, "sorted", lambda x: sorted(x, reverse=True), raising=False)
    expect_mismatch(world, MIXTRAL)


def test_delta_on_the_wrong_projection(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = linears._positions

    def positions(found: Any) -> linears.Positions:
        made = real(found)
        keys = [path for path in made.of if path.endswith(".k_proj")]
        for key in keys:
            value = key.replace(".k_proj", ".v_proj")
            made.of[key], made.of[value] = made.of[value], made.of[key]
        return made

    monkeypatch.setattr(linears, "_positions", positions)
    expect_mismatch(world, Setting("generic", "ministral", 1, ["r8"]))


@pytest.mark.sweep
def test_delta_skipped_in_single_layers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: GenericLinear, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(0, -2), None)
        return y.view(*x.shape[:-1], y.shape[-1])

    monkeypatch.setattr(GenericLinear, "forward", forward)
    expect_mismatch(world, Setting("generic", "ministral", 1, ["rows"]))


@pytest.mark.sweep
def test_scale_of_the_embedding_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "embedding_scale", lambda *_: None)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_what_follows_the_head_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def head(self: GenericForCausalLM, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        with self._step.using(None, adapter_data):
            logits: Tensor = self._head(hidden[None])[0]
        return logits

    monkeypatch.setattr(GenericForCausalLM, "head", head)
    expect_mismatch(world, COHERE)


@pytest.mark.sweep
def test_bias_of_the_head_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(base: ParallelHead, step: CurrentStep, bias: nn.Parameter | None) -> GenericHead:
        return GenericHead(base, step, None)

    monkeypatch.setattr(model, "GenericHead", without)
    expect_mismatch(world, PHI)


def test_positions_start_anew_in_each_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GenericForCausalLM._decode

    def decode(self: GenericForCausalLM, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return real(self, input_ids, position_ids % 5)

    monkeypatch.setattr(GenericForCausalLM, "_decode", decode)
    expect_mismatch(world, MINISTRAL)


@pytest.mark.sweep
def test_all_tokens_rotated_as_the_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CurrentStep._layer_angles

    def first(self: CurrentStep, cos: Tensor, sin: Tensor, form: RotationForm) -> Angles:
        found = real(self, cos, sin, form)
        cos, sin = (each[:1].expand_as(each) for each in found[:2])
        return found._replace(cos=cos, sin=sin)

    monkeypatch.setattr(CurrentStep, "_layer_angles", first)
    expect_mismatch(world, MINISTRAL)


@pytest.mark.sweep
@pytest.mark.parametrize("by", [-1, 1])
def test_a_group_that_begins_a_block_off(
    world: World, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    """Rows of a sliding group begin a block too late, or lengths count one that is not there."""
    real = BlockTables._from

    def begins(self: BlockTables, slots: Ints, bounds: Ints, rows: StepRows) -> GroupLayout:
        found = real(self, slots, bounds, rows)
        can = found.key_lengths > self.group.block_size
        tables = np.where(can[:, None], np.roll(found.tables, by, axis=1), found.tables)
        return replace(found, tables=tables)

    monkeypatch.setattr(BlockTables, "_from", begins)
    expect_mismatch(world, GEMMA2)


def test_a_table_of_the_wrong_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InputBatch.layout

    def layout(self: InputBatch, rows: Any) -> Any:
        found = real(self, rows)
        first, second = found.groups
        width = second.tables.shape[1]
        tables = np.resize(first.tables, (len(first.tables), width))
        return replace(found, groups=(first, replace(second, tables=tables)))

    monkeypatch.setattr(InputBatch, "layout", layout)
    expect_mismatch(world, GEMMA2)


@pytest.mark.sweep
def test_chunks_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "check_windows", lambda *_: None)
    monkeypatch.setattr(model, "chunks", lambda config: {})
    expect_mismatch(world, LLAMA4)


@pytest.mark.sweep
def test_positions_counted_from_the_steps_first_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lengths(self: PositionsAsLength, _layer: int = 0) -> int:
        return 0

    monkeypatch.setattr(PositionsAsLength, "get_seq_length", lengths)
    expect_mismatch(world, LLAMA4)


@pytest.mark.sweep
def test_transposed_experts_cut_like_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CutPlan._pair

    def as_one(self: CutPlan, size: int, pattern: str) -> Segments:
        halves = real(self, size, pattern)
        if "experts" not in pattern:
            return halves
        first, last = halves[0]
        return ((2 * first, 2 * last),)

    monkeypatch.setattr(CutPlan, "_pair", as_one)
    expect_mismatch(world, LLAMA4_CUT)


@pytest.mark.sweep
def test_keys_that_layers_share_read_from_the_wrong_layer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LayerForms.layers

    def layers(self: LayerForms, num_layers: int, all_attend: bool) -> dict[Call, LayerCall]:
        found = real(self, num_layers, all_attend)
        # The third layer stores keys of its own, which the model has not computed for it.
        third = found[2, 0]
        return found | {(2, 0): third._replace(form=replace(third.form, source=None))}

    monkeypatch.setattr(LayerForms, "layers", layers)
    monkeypatch.setattr(PagedLayers, "_store", lambda self, layer, heads: heads.q.contiguous())
    expect_mismatch(world, GEMMA4)


@pytest.mark.parametrize("scale", [0.0, pytest.param(32**0.5, marks=pytest.mark.sweep)])
def test_tokens_of_images_embedded_as_texts_are(
    world: World, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """scale: by which their own vectors are multiplied too; 0: the text's table has them."""
    real = OuterRows.forward

    def forward(self: OuterRows, embedded: Tensor, input_ids: Tensor) -> Tensor:
        return real(self, embedded / scale, input_ids) * scale if scale else embedded

    monkeypatch.setattr(OuterRows, "forward", forward)
    expect_mismatch(world, GEMMA3N)
