"""EAGLE-3 heads on a GPU: in float32 they change no token, whether steps are captured or launched,
and guess what heads in plain torch do."""

from pathlib import Path

import pytest
import torch

from configs.engine import CudaGraphs
from modeling.runner import loading
from scheduler import speculation
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.modeling.parity import engine_config
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.test_medusa_cuda import answers
from tests.modeling.test_parity_eagle3 import MOST, NUM_DRAFTS, Trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_heads_guess_as_in_plain_torch_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, over adapters and without, in chunks."""
    monkeypatch.setattr(loading, "EAGLE3_ON", ("cpu", "cuda"))
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    model = write_llama(tmp_path / "model", "gqa", **{**WIDE, "num_hidden_layers": 6})
    recipes = [AdapterRecipe(r=8, seed=2), AdapterRecipe(r=3, target_modules=("q_proj",))]
    adapters = [write_adapter(tmp_path / f"a{i}", model, r) for i, r in enumerate(recipes)]
    plain, _ = answers(engine_config(model), CudaGraphs.DECODE, adapters, 0)
    trained = Trained(tmp_path, model, adapters, plain, MOST, False, (1, 2, 2))
    for graphs in (CudaGraphs.NONE, CudaGraphs.DECODE):
        made, run = answers(trained.config, graphs, adapters, NUM_DRAFTS)
        assert (run.runner.num_captured > 5) == (graphs is CudaGraphs.DECODE)
        trained.check(made, run)
