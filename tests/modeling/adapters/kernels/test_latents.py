"""The Triton kernel of latents' adapters: on a GPU, and on a CPU by Triton's interpreter.

The latter needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os

import pytest
import torch

from tests.modeling.adapters.kernels.latents import check, latent_map
from tests.modeling.adapters.loaded_bank import NUM_LAYERS, fill_bank
from tests.modeling.attention.triton.test_interpreted import Interpreted

RANKS = [8, 16, 1, 24, 5, 3, 16, 64]
ROWS = {
    "decode": [(slot, 1) for slot in range(-1, 8)] * 3,
    "prompts": [(3, 40), (-1, 4), (7, 21), (1, 17), (5, 1)],
    "base": [(-1, 5)],
}


def compare(
    sizes: tuple[int, int, int, int],
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from modeling.adapters.kernels.plan import TritonPlan

    torch.manual_seed(5)
    heads, keys, values, latent = sizes
    ranks = torch.tensor(RANKS)[:, None, None].repeat(1, 1, NUM_LAYERS)
    ranks[0, :, 1] = 0
    bank = fill_bank([(latent, heads * (keys + values))], ranks, dtype, device, max_rank=64)
    slots, lengths = [list(column) for column in zip(*rows, strict=True)]
    of = [slot for slot, length in rows for _ in range(length)]
    plan = TritonPlan(bank, len(of))
    tiles = plan.update(slots, lengths)
    for layer in range(NUM_LAYERS):
        # The step's own tiles, and the grid that a captured step has.
        for known in (tiles, None):
            data = plan.batch(len(of), known)
            check(bank, data, latent_map(sizes, layer, dtype, device), of)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(16, 128, 128, 512), (20, 192, 256, 512), (3, 24, 40, 72)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_map_with_adapters(
    sizes: tuple[int, int, int, int], rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    compare(sizes, rows, dtype, torch.device("cuda"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_interpreted(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    compare((3, 24, 40, 72), rows, dtype, torch.device("cpu"))
