"""Decoders of models that read images too, on a GPU, launched and captured, beside the oracle."""

import pytest

from configs.engine import CudaGraphs
from configs.model import DType
from tests.checkpoints_stacks import STACKS
from tests.modeling.parity.comparison import BASE, World
from tests.modeling.parity.test_generic import LLAMA4_FAILS, TOWERS
from tests.modeling.test_cuda_generic import agree, come_near, rounding, run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # PEFT's, of its patterns


@pytest.mark.parametrize("variant", list(STACKS))
def test_text_of_larger_models(world: World, variant: str) -> None:
    """Base and an adapter of the whole model."""
    if variant == "llama4" and LLAMA4_FAILS:
        pytest.skip(LLAMA4_FAILS)
    names = [BASE, "everywhere" if variant in TOWERS else "r8"]
    for graphs in (CudaGraphs.NONE, CudaGraphs.ALL):
        answers, told = run(world, variant, DType.FLOAT32, graphs, names, "stack")
        agree(answers, told.truths)
    answers, told = run(world, variant, DType.BFLOAT16, CudaGraphs.ALL, names, "stack")
    come_near(answers, told.truths, rounding(told))
