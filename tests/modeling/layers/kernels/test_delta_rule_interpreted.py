"""One token of the gated delta rule against transformers' function, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import inspect
import os
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("modeling.layers.kernels.delta_rule")
    monkeypatch.setattr(module, "_launch", Interpreted(module._delta_rule))
    return module


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("key_heads", "heads", "size", "width"), [(2, 2, 16, 32), (1, 3, 12, 20), (2, 4, 8, 70)]
)
def test_states_change_where_they_are(
    module: Any, key_heads: int, heads: int, size: int, width: int, norm: bool
) -> None:
    noise = torch.Generator().manual_seed(heads)
    slots, rows = torch.tensor([4, 0, 3]), 3
    q, k = torch.randn(2, rows, 1, key_heads, size, generator=noise)
    v = torch.randn(rows, 1, heads, width, generator=noise)
    g = -torch.rand(rows, 1, heads, generator=noise)
    beta = torch.rand(rows, 1, heads, generator=noise)
    states = torch.randn(6, heads, size, width, generator=noise)
    before = states.clone()
    rule = inspect.unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    each = heads // key_heads
    expected, changed = rule(
        q.repeat_interleave(each, 2),
        k.repeat_interleave(each, 2),
        v,
        g=g,
        beta=beta,
        initial_state=states[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=norm,
    )
    found = module.delta_rule_step(q, k, v, g, beta, states, slots, norm)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[slots], changed, rtol=1e-5, atol=1e-5)
    others = [1, 2, 5]
    assert torch.equal(states[others], before[others])
