"""Which of transformers' experts and routers our kernels replace; torch stands for the kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from modeling.layers.scored_routing import ScoredRouting
from modeling.models.generic import fused_experts
from modeling.models.generic.fused_experts import ExpertKernels

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 2},
    **{"intermediate_size": 16, "moe_intermediate_size": 16, "num_key_value_heads": 2},
    **{"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 3},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 16},
}
MOST_TOKENS = 4


def experts(
    x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, _: Tensor, deltas: Any = None
) -> Tensor:
    if deltas is not None:
        up, down = up * deltas[1][1], down * deltas[2]
    gate, upper = torch.einsum("th,teih->tei", x, up[ids]).chunk(2, -1)
    out = torch.einsum("tei,tehi->teh", F.silu(gate) * upper, down[ids])
    return (out * shares[..., None]).sum(1)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, summed: bool, _: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, weight, bias)
    best, ids = logits.float().softmax(-1).topk(active)
    best = best / best.sum(-1, keepdim=True) if summed else best
    return logits, best.to(x.dtype), ids


def route_scored(
    x: Tensor, weight: Tensor, correction: Tensor, form: ScoredRouting, _: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, weight)
    return logits, *form.weights(logits, correction)


def block(model_type: str, **sizes: Any) -> Any:
    """The experts and router of a type's only layer."""
    torch.manual_seed(0)
    kind: Any = CONFIG_MAPPING[model_type]
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(kind(**{**SIZES, **sizes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval().requires_grad_(False).model.layers[0].mlp


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ExpertKernels:
    routing = SimpleNamespace(route=route, MOST_ROUTED=2)
    fakes = SimpleNamespace(
        experts=experts,
        fits=lambda up, down: True,
        takes=lambda x, active, count: len(x) <= MOST_TOKENS,
        LayerDeltas=lambda *parts: parts,
    )
    scored = SimpleNamespace(route=route_scored)
    monkeypatch.setattr(fused_experts, "_kernels", lambda device: (fakes, routing, scored))
    monkeypatch.setattr(fused_experts, "HALF", (torch.float32,))
    return ExpertKernels(torch.device("cpu"))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "olmoe"])
def test_softmax_and_silu_are_replaced(kernels: ExpertKernels, model_type: str) -> None:
    both = block(model_type)
    router, own = kernels.router(both.gate), kernels.experts(both.experts)
    assert router is not None
    assert own is not None
    for tokens in (1, MOST_TOKENS, MOST_TOKENS + 1):
        x = torch.randn(tokens, 32)
        wanted = both.gate(x)
        for found, expected in zip(router(x[None]), wanted, strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(own(x, wanted[2], wanted[1]), both.experts(x, *wanted[:0:-1]))


@pytest.mark.parametrize("groups", [(1, 1), (3, 2)])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_routers_by_scores_are_replaced(
    kernels: ExpertKernels, model_type: str, summed: bool, groups: tuple[int, int]
) -> None:
    sizes = {"n_group": groups[0], "topk_group": groups[1], "norm_topk_prob": summed}
    own = block(model_type, mlp_layer_types=["sparse"], routed_scaling_factor=1.5, **sizes).gate
    own.e_score_correction_bias = torch.rand(6)
    router, x = kernels.router(own), torch.randn(50, 32)
    assert router is not None
    found, wanted = router(x[None]), own(x)
    torch.testing.assert_close(found[0], wanted[0])
    dense = [torch.zeros(50, 6).scatter(1, each[2], each[1]) for each in (found, wanted)]
    torch.testing.assert_close(*dense)
    plain: Any = type(own)

    def doubled(self: Any, hidden_states: Tensor) -> Any:
        logits, weights, ids = plain.forward(self, hidden_states)
        return logits, 2 * weights, ids

    own.__class__ = type("Doubled", (plain,), {"forward": doubled})
    assert kernels.router(own) is None, "what no comparison confirms"


def test_a_router_with_a_bias_is_replaced(kernels: ExpertKernels) -> None:
    """gpt-oss takes the best first and the softmax of these."""
    own = block("gpt_oss").router
    router, x = kernels.router(own), torch.randn(5, 32)
    assert router is not None
    for found, expected in zip(router(x[None]), own(x), strict=True):
        torch.testing.assert_close(found, expected)
    own.register_parameter("scale", torch.nn.Parameter(torch.ones(6)))
    assert kernels.router(own) is None


def test_adapters_reach_the_kernels(kernels: ExpertKernels) -> None:
    """Here the factors are the numbers of the projections."""
    both = block("qwen3_moe")
    own, shares = kernels.experts(both.experts), torch.rand(MOST_TOKENS + 1, 3)
    assert own is not None
    x, ids = torch.randn(MOST_TOKENS + 1, 32), torch.arange(3).repeat(MOST_TOKENS + 1, 1)
    deltas: Any = None
    targets = {"up": [2, 3], "down": [5]}
    assert own.adapted(x, ids, shares, deltas, targets, 0) is None
    few = (x[1:], ids[1:], shares[1:])
    found = own.adapted(*few, deltas, targets, 0)
    both.experts.gate_up_proj *= 3
    both.experts.down_proj *= 5
    assert found is not None
    torch.testing.assert_close(found, both.experts(*few), rtol=1e-4, atol=1e-3)


def test_what_computes_something_else_stays(kernels: ExpertKernels) -> None:
    assert kernels.experts(block("gpt_oss").experts) is None
    both = block("deepseek_v2", mlp_layer_types=["sparse"], topk_method="group_limited_greedy")
    assert kernels.experts(both.experts) is not None
    both.gate.routed_scaling_factor = 3.0
    assert kernels.router(both.gate) is None


def test_without_a_gpu_nothing_is_replaced() -> None:
    both, none = block("qwen3_moe"), ExpertKernels(torch.device("cpu"))
    assert none.experts(both.experts) is None
    assert none.router(both.gate) is None
