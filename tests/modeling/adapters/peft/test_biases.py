"""Biases in an adapter's file: where they are served, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.wire.adapters import AdapterError
from configs.wire.merging import MergeRule
from modeling.adapters.merge import open_fetched
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import Projection, ProjectionKind
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora
from tests.modeling.merges import fetched

MODULE = "base_model.model.model.layers.0.up"
OF_B, OF_BASE = f"{MODULE}.lora_B.bias", f"{MODULE}.base_layer.bias"
BIASED = replace(UP, has_bias=True)
ADDED: dict[str, Any] = {"lora_bias": True}
TRAINED: dict[str, Any] = {"bias": "lora_only"}


def write(folder: Path, fields: dict[str, Any], **biases: torch.Tensor) -> Path:
    targets = {"target_modules": ["up"]}
    return write_lora(folder, factors(UP, [4]) | biases, **{**targets, **fields})


def test_biases_come_with_the_factors(tmp_path: Path) -> None:
    """B's are scaled as B is; the base model's are as the file has them."""
    biases = {OF_B: torch.arange(10.0), OF_BASE: torch.arange(10.0) + 1}
    [stack] = open_adapter(write(tmp_path, ADDED | TRAINED, **biases), (BIASED,), 8).stacks()
    assert stack.biases is not None
    assert stack.biases.tolist() == [(2 * torch.arange(10.0)).tolist()]
    assert {i: each.tolist() for i, each in stack.base_biases.items()} == {
        0: (torch.arange(10.0) + 1).tolist()
    }


def test_a_module_without_factors_has_no_bias_of_b(tmp_path: Path) -> None:
    other = "base_model.model.model.layers.1.up.base_layer.bias"
    biases = {OF_B: torch.ones(10), other: torch.arange(10.0)}
    folder = write(tmp_path, ADDED | {"bias": "all"}, **biases)
    of_both, bare = open_adapter(folder, (replace(BIASED, num_layers=2),), 8).stacks()
    assert of_both.biases is not None
    assert bare.base_biases[0].tolist() == torch.arange(10.0).tolist()


@pytest.mark.parametrize("fields", [ADDED, TRAINED, {"bias": "all"}])
@pytest.mark.parametrize("found", [torch.ones(9), torch.full((10,), torch.inf)])
def test_values_and_shapes_are_checked(
    tmp_path: Path, fields: dict[str, Any], found: torch.Tensor
) -> None:
    key = OF_B if "lora_bias" in fields else OF_BASE
    with pytest.raises(AdapterError, match=f"{key} (has shape|holds values that are not finite)"):
        list(open_adapter(write(tmp_path, fields, **{key: found}), (BIASED,), 8).stacks())


REFUSED: dict[str, tuple[dict[str, Any], list[str], Projection]] = {
    "the file holds no .*lora_B.bias": (ADDED, [], BIASED),
    "this model's up has no bias": (TRAINED, [OF_BASE], UP),
    "changes the model before the invocation": (
        {**TRAINED, "alora_invocation_tokens": [5]}, [OF_BASE], BIASED,
    ),
    "transformers' own code": (ADDED, [OF_B], replace(UP, can_adapt_ends=False)),
    "no adapted linear module": (ADDED, [OF_B], replace(UP, kind=ProjectionKind.HEAD)),
    "norm.bias is the bias of no adaptable linear": (
        {"bias": "all"}, ["base_model.model.model.norm.bias"], BIASED,
    ),
    "lora_B.bias belongs to no adaptable module": ({}, [OF_B], BIASED),
    "base_layer.bias belongs to no adaptable module": ({}, [OF_BASE], BIASED),
    "bias='some' must be none, lora_only or all": ({"bias": "some"}, [], BIASED),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(tmp_path: Path, words: str) -> None:
    fields, keys, projection = REFUSED[words]
    folder = write(tmp_path, fields, **{key: torch.ones(10) for key in keys})
    end = replace(projection, base=torch.ones(10, 6))
    with pytest.raises(AdapterError, match=words):
        open_adapter(folder, (end, DOWN), 8)


def test_two_faults_are_both_named(tmp_path: Path) -> None:
    folder = write(
        tmp_path, {**TRAINED, "alora_invocation_tokens": [5]}, **{OF_BASE: torch.ones(9)}
    )
    with pytest.raises(AdapterError) as refused:
        open_adapter(folder, (replace(BIASED, can_adapt_ends=False), DOWN), 8)
    found = "; ".join(refused.value.reasons)
    assert "biases are not served over this model" in found
    assert "activated LoRA is not served over this model" in found


def test_biases_are_not_merged(tmp_path: Path) -> None:
    plain = write_lora(tmp_path / "plain", factors(UP, [4]))
    biased = write(tmp_path / "biased", ADDED, **{OF_B: torch.ones(10)})
    rule = MergeRule((1.0, 1.0))
    with pytest.raises(AdapterError, match="adapter 'biased' of the merge: it holds biases"):
        open_fetched(fetched(1, [plain, biased], rule), (UP,), 8)
