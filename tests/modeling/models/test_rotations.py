"""Which of our rotations a function of transformers' computes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.models.generic.rotations import Layout, RotationForm, rotation_form

TOKENS, HEADS, KV_HEADS, WIDTH = 7, 4, 2, 16


def apply_of(kind: str) -> Callable[..., Any]:
    found: Callable[..., Any] = import_module(
        f"transformers.models.{kind}.modeling_{kind}"
    ).apply_rotary_pos_emb
    return found


def given(layout: Layout, width: int, heads_at: int = 1) -> tuple[Tensor, ...]:
    """q, k and the cosines and sines of a model whose heads are rotated by `width` numbers."""
    angles = torch.arange(TOKENS)[:, None] * 100.0 ** -(torch.arange(width // 2) / width)
    if layout is Layout.HALVES:
        angles = torch.cat((angles, angles), -1)
    if layout is Layout.NEIGHBOURS:
        angles = angles.repeat_interleave(2, -1)
    q, k = torch.randn(1, HEADS, TOKENS, WIDTH), torch.randn(1, KV_HEADS, TOKENS, WIDTH)
    if heads_at == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q, k, angles.cos()[None], angles.sin()[None]


@pytest.mark.parametrize(
    ("kind", "layout", "width", "neighbours", "backwards"),
    [
        ("mistral", Layout.HALVES, WIDTH, False, False),
        ("glm4_moe", Layout.HALVES, WIDTH // 2, False, False),
        ("glm4", Layout.HALVES, WIDTH // 2, True, False),
        ("ernie4_5", Layout.HALVES, WIDTH, True, False),
        ("cohere", Layout.NEIGHBOURS, WIDTH, True, False),
        ("gpt_oss", Layout.ONCE, WIDTH, False, False),
        ("nanochat", Layout.HALVES, WIDTH, False, True),
    ],
)
@torch.inference_mode()
def test_forms_of_families(
    kind: str, layout: Layout, width: int, neighbours: bool, backwards: bool
) -> None:
    q, k, cos, sin = given(layout, width)
    apply = apply_of(kind)
    form = rotation_form(apply, q, k, cos, sin)
    assert form == RotationForm(layout, neighbours, backwards, heads_at=1)
    angles = form.angles(cos, sin)
    assert angles.cos.shape == (TOKENS, 1, width)
    for found, wanted in zip((q, k), apply(q, k, cos, sin), strict=True):
        torch.testing.assert_close(form.rotated(found, angles), wanted)


@torch.inference_mode()
def test_one_tensor_with_tokens_before_heads() -> None:
    q, _, cos, sin = given(Layout.HALVES, WIDTH, heads_at=2)
    apply = apply_of("gemma4")
    form = rotation_form(apply, q, cos, sin, unsqueeze_dim=2)
    assert form == RotationForm(Layout.HALVES, neighbours=False, backwards=False, heads_at=2)
    wanted = apply(q, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(form.rotated(q, form.angles(cos, sin)), wanted)


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = apply_of("mistral")(q, k, cos, sin)
    return q, 2 * k


def with_values(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (*apply_of("mistral")(q, k, cos, sin), q)


def tripled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_of("mistral")(q, k, 3 * cos, sin)  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [scaled, with_values, tripled])
@torch.inference_mode()
def test_what_does_more_has_no_form(function: Callable[..., Any]) -> None:
    assert rotation_form(function, *given(Layout.HALVES, WIDTH)) is None


@torch.inference_mode()
def test_angles_of_another_shape_have_no_form() -> None:
    q, k, cos, sin = given(Layout.HALVES, WIDTH)
    apply = apply_of("mistral")
    assert rotation_form(apply, q, k, cos[0], sin[0]) is None
    assert rotation_form(apply, q, k, cos[:, :1], sin[:, :1]) is None
    assert rotation_form(apply, q, k, cos[..., :5], sin[..., :5]) is None
