"""Quantised models beside transformers + PEFT over the same weights and activations.

The oracle is transformers' own model of the checkpoint, with the format's own package. Where inputs
are cut over ranks each rank rounds its own; the oracle is then told to round them in so many parts,
by the package's function too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from configs.model import DType, ModelConfig, Quantize
from modeling.models.generic import experts
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from tests.checkpoints import load_oracle, oracle_answer
from tests.modeling.parity.comparison import answers_by_hand, engine_config
from tests.modeling.stepping import Asked
from tests.ranks import run_in_memory

NUM_TOKENS = 8
MIN_MARGIN = 0.005
"""By which each token leads: a number that rounds the other way moves logits by less."""

ROW_PARALLEL = ("o_proj", "down_proj")

Rounding = Callable[[nn.Module, Tensor], Tensor]
"""From a module and some of its inputs to these as they count in its product."""

RoundingOfExperts = Callable[[str, int, Tensor], Sequence[Tensor]]
"""See `RoundedProducts`."""


def as_stored(module: Any, x: Tensor) -> Tensor:
    """Round as the package does for the module."""
    rounded: Tensor = forward_quantize(
        module, x, "input", module.quantization_scheme.input_activations
    )
    return rounded


def as_the_package(preset: str, whole: Tensor | None, x: Tensor) -> Tensor:
    """Round activations as compressed-tensors does in a scheme; whole: nvfp4's global scale."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    return in_the_scheme(scheme, x, input_global_scale=whole)


def in_the_scheme(scheme: QuantizationScheme, x: Tensor, **scales: Tensor | None) -> Tensor:
    """The same; scales: what the package's module has of its inputs."""
    args = scheme.input_activations
    module: Any = SimpleNamespace(quantization_status=QuantizationStatus.INITIALIZED, **scales)
    assert args is not None
    found: Tensor = forward_quantize(module, x, "input", args)
    return found


class RoundedProducts(TorchFunctionMode):
    """Rounds what enters the products of experts, but not what enters an adapter's.

    bases: the matrices without an adapter, [experts, out, in], by name. rounding: from a name, an
    expert and x to x as it counts with each of the maps below each other.
    """

    def __init__(self, bases: Mapping[str, Tensor], rounding: RoundingOfExperts) -> None:
        super().__init__()
        self._bases = {base.shape[1:]: (name, base) for name, base in bases.items()}
        self._rounding = rounding

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        # PEFT adds an adapter to the matrix: the nearest base is the one that it was added to.
        x, matrix = args
        name, bases = self._bases[matrix.shape]
        expert = int((bases - matrix).flatten(1).norm(dim=1).argmin())
        inputs, base = self._rounding(name, expert, x), bases[expert]
        pairs = zip(inputs, base.chunk(len(inputs)), strict=True)
        made = torch.cat([part @ own.t() for part, own in pairs], dim=-1)
        return made + x @ (matrix - base).t()


def round_experts(module: Any, rounding: RoundingOfExperts) -> None:
    """Let transformers' experts round their inputs."""
    names = ("gate_up_proj", "down_proj")
    bases = {name: getattr(module, name).detach().clone() for name in names}
    forward = module.forward

    def rounded(*args: Any, **options: Any) -> Any:
        with RoundedProducts(bases, rounding):
            return forward(*args, **options)

    module.forward = rounded


def decompressed(folder: Path) -> Any:
    """transformers' model of a checkpoint of compressed-tensors; its first step unpacks it."""
    model = load_oracle(folder)
    model(torch.tensor([[1]]))
    return model


def round_in_parts(model: nn.Module, ranks: int, rounding: Rounding = as_stored) -> None:
    """Let modules whose inputs are cut round each rank's part of them by itself."""
    for name, module in model.named_modules():
        made: Any = module
        scheme = getattr(module, "quantization_scheme", None)
        rounds = rounding is not as_stored or (scheme and scheme.input_activations)
        if name.rsplit(".", 1)[-1] in ROW_PARALLEL and rounds:
            made.quantization_enabled = False
            rounds_in_parts(module, ranks, rounding)


def rounds_in_parts(module: nn.Module, ranks: int, rounding: Rounding) -> None:
    """Let a module round each rank's part of its inputs by itself."""
    module.register_forward_pre_hook(partial(_in_parts, ranks, rounding))


def _in_parts(ranks: int, rounding: Rounding, module: nn.Module, given: tuple[Tensor]) -> Tensor:
    return torch.cat([rounding(module, part) for part in given[0].chunk(ranks, -1)], dim=-1)


def answers(
    folder: Path,
    adapters: Sequence[Path],
    ranks: int,
    prompts: Sequence[Sequence[int]],
    **model: Any,
) -> list[list[int]]:
    """Serve the prompts in one batch: the base model's, then each adapter's; on all ranks alike.

    model: settings of the model, and expert_parallel.
    """
    requests = [
        Asked(prompt, NUM_TOKENS, slot=slot - 1, chunk=5, joins_at=slot)
        for slot, prompt in enumerate(prompts)
    ]
    engine = {"expert_parallel": model.pop("expert_parallel", False)}
    config = engine_config(folder, model=ModelConfig(id=str(folder), **model), **engine)
    found = run_in_memory(ranks, partial(answers_by_hand, config, list(adapters), requests))
    assert all(rank == found[0] for rank in found)
    return [answer.tokens for answer in found[0]]


def truths(
    model: Any, adapters: Sequence[Path], margin: float = MIN_MARGIN
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what follows them, of the base model and of each adapter."""
    told = [clear_answer(model, 7, margin)]
    for index, adapter in enumerate(adapters):
        adapted: Any = PeftModel.from_pretrained(model, str(adapter)).eval()
        told.append(clear_answer(adapted, 9 + 2 * index, margin))
        model = adapted.unload()
    prompts, tokens = zip(*told, strict=True)
    return list(prompts), list(tokens)


def clear_answer(model: Any, length: int, margin: float) -> tuple[list[int], list[int]]:
    """A prompt and its continuation, of which every token leads by the margin."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        prompt: list[int] = torch.randint(3, 64, (length,), generator=generator).tolist()
        tokens, logits = oracle_answer(model, prompt, NUM_TOKENS)
        best = logits.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) >= margin and len(set(tokens)) > 2:
            return prompt, tokens
    raise AssertionError("no prompt leads to clear tokens: choose another seed")


def compare(
    folder: Path,
    adapters: Sequence[Path],
    oracle: Any,
    ranks: int,
    margin: float = MIN_MARGIN,
    **model: Any,
) -> None:
    """Assert that the model serves the oracle's tokens, with and without adapters.

    margin: by which each of these leads. model: as of `answers`.
    """
    prompts, tokens = truths(oracle, adapters, margin)
    found = answers(folder, adapters, ranks, prompts, **model)
    assert found == tokens
    base = answers(folder, [], ranks, prompts[1:2], **model)
    assert base[0] != tokens[1], "the adapter changes nothing"


FP8 = Quantize.FP8


def experts_of(model: Any) -> list[tuple[str, Any]]:
    """Return the modules of experts, and their names."""
    return [(n, module) for n, module in model.named_modules() if n.endswith(".experts")]


def check_whole_experts(stored: Path, numbers: Path) -> None:
    """Look at a rank with whole experts: it keeps its own; numbers: a checkpoint of them."""
    config = engine_config(stored, expert_parallel=True)
    model: Any = load_model(config, LoneRank(1, 2), torch.device("cpu")).model
    for name, whole in experts_of(load_oracle(numbers)):
        own, half = model.causal.get_submodule(name), whole.num_experts // 2
        assert torch.equal(own.down_proj, whole.down_proj[half:])
        assert torch.equal(own.gate_up_proj, whole.gate_up_proj[half:])


def check_steps_on_gpus(stored: Path, form: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what a GPU would do: capture steps, and adapt experts where that was compared.

    form: of the matrices, which then are compared of no type.
    """

    def loaded(dtype: DType) -> Any:
        config = engine_config(stored, model=ModelConfig(id=str(stored), dtype=dtype))
        return load_model(config, SingleRank(), torch.device("cpu")).model

    model = loaded(DType.BFLOAT16)
    assert model.capturable
    assert model.adapts_experts_on_gpus
    assert model.has_expert_kernels
    assert not loaded(DType.FLOAT32).adapts_experts_on_gpus
    monkeypatch.setattr(experts, "DELTAS_OF_STORED", {form: frozenset()})
    model = loaded(DType.BFLOAT16)
    assert not model.adapts_experts_on_gpus
    assert not model.has_expert_kernels
