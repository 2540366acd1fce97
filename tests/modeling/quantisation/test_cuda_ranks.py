"""Quantised models over two GPUs: as near to float32 as the reference is, as on one GPU."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.modeling.quantisation import test_models_cuda as models
from tests.modeling.quantisation import test_stored_experts_cuda as mixtures
from tests.modeling.quantisation.whole_models import Task, compare
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def model_task(folder: Path, form: str) -> Task:
    model, adapter = models.write(folder, form)
    configs = [models.config_of(model, form, *kind) for kind in mixtures.COMPARED]
    return Task.of(form, models.VOCAB_SIZE, configs, [adapter])


def test_models(tmp_path: Path) -> None:
    forms = [form for form in models.FORMS if form != "nf4 at load"]
    tasks = [model_task(tmp_path / str(i), form) for i, form in enumerate(forms)]
    run_cuda_ranks(2, partial(compare, tasks))


@pytest.mark.parametrize("adapts_experts", [False, True])
def test_mixtures(tmp_path: Path, adapts_experts: bool) -> None:
    tasks = [
        mixtures.task(tmp_path / str(i), kind, adapts_experts)
        for i, kind in enumerate(mixtures.KINDS)
    ]
    run_cuda_ranks(2, partial(compare, tasks))
