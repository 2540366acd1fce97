"""Whole quantised models on a GPU, with an adapter: as near to float32 as the reference is.

The truth is the reference of float32 on a CPU, whose tokens are those of transformers + PEFT
(test_parity.py, test_packed.py). Every prefix of a text is asked for, by prefills and by captured
decode steps. Each test prints its figures.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, ModelConfig, Quantize
from configs.quantisation import Activations
from modeling.quantisation.activations import BLOCK
from modeling.quantisation.bits_and_bytes import round_int8
from modeling.quantisation.fp4 import MXFP4, NVFP4, Fp4Weight, round_fp4, unpack_scales
from modeling.quantisation.fp8 import round_blocks
from modeling.quantisation.integers import round_groups, unpack
from modeling.quantisation.scaled import round_rows
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import LINEARS, AdapterRecipe, write_adapter, write_llama
from tests.modeling.parity.comparison import NUM_BLOCKS, engine_config, place_all
from tests.modeling.teacher import TOGETHER, Errors, errors, forced_logprobs

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 96
GROUP = 128
SCALE = 0.25
BLOCK_SIZE = 16

Tensors = dict[str, Tensor]


def as_blocks(name: str, matrix: Tensor) -> Tensors:
    """fp8 with a scale for each block, as DeepSeek's checkpoints have it."""
    made = round_blocks(matrix, (BLOCK, BLOCK), Activations.GROUP)
    return {f"{name}.weight": made.codes.data, f"{name}.weight_scale_inv": made.scales[::BLOCK]}


def as_channels(name: str, matrix: Tensor) -> Tensors:
    """fp8 with a scale for each output, as compressed-tensors has it."""
    made = round_rows(matrix, matrix.abs().amax(1).float(), torch.bfloat16)
    return {f"{name}.weight": made.codes.data, f"{name}.weight_scale": made.scales.data}


def as_static(name: str, matrix: Tensor) -> Tensors:
    """The same with a scale of a map's inputs, of each expert another one."""
    expert = re.search(r"experts\.(\d+)", name)
    step = 1 + int(expert[1]) % 3 if expert else 1
    return {**as_channels(name, matrix), f"{name}.input_scale": torch.tensor([0.006 * step])}


def as_gptq(name: str, matrix: Tensor, act_order: bool = False) -> Tensors:
    """4 bits as GPTQ packs them, with zero points; act-order: groups lie in no order."""
    inputs = matrix.shape[1]
    order = torch.randperm(inputs) if act_order else torch.arange(inputs)
    rounded = round_groups(matrix[:, order].float(), 4, GROUP)
    codes = rounded.unpacked(slice(None))[:, torch.argsort(order)]
    zeros = torch.randint(6, 10, rounded.scales.shape)
    shifted = codes.t().int() - 8 + zeros[torch.argsort(order) // GROUP]
    return {
        f"{name}.qweight": _words(shifted.clamp(0, 15).t()).t().contiguous(),
        f"{name}.qzeros": _words(zeros - 1),
        f"{name}.scales": rounded.scales.contiguous().half(),
        f"{name}.g_idx": (torch.argsort(order) // GROUP).int(),
    }


NF4 = (
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1"
)
"""The package's numbers: it may not be installed beside a GPU."""


def as_nf4(name: str, matrix: Tensor) -> Tensors:
    """4 bits as bitsandbytes packs them."""
    table, parts = torch.tensor([float(n) for n in NF4.split()]), matrix.float().view(-1, 64)
    largest = parts.abs().amax(1)
    codes = ((parts / largest[:, None])[..., None] - table).abs().argmin(-1).flatten()
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(matrix.shape),
    }
    text = json.dumps(state).encode()
    return {
        f"{name}.weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"{name}.weight.absmax": largest,
        f"{name}.weight.quant_map": table,
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text)).to(torch.uint8),
    }


def as_int8(name: str, matrix: Tensor) -> Tensors:
    """8 bits as bitsandbytes has them."""
    made = round_int8(matrix, matrix.abs().amax(1).float(), torch.bfloat16)
    return {f"{name}.weight": made.codes.data, f"{name}.SCB": made.scales.data}


def as_rounded_int8(name: str, matrix: Tensor) -> Tensors:
    """8 bits as compressed-tensors has them."""
    made = round_rows(matrix, matrix.abs().amax(1), torch.bfloat16, torch.int8)
    return {f"{name}.weight": made.codes.data, f"{name}.weight_scale": made.scales.data}


def stored(made: Fp4Weight) -> tuple[Tensor, Tensor]:
    """Codes, two of a byte, and scales, as compressed-tensors has them."""
    codes = unpack(made.codes.data.view(torch.uint8))[:, : made.shape[1]]
    scales = unpack_scales(made.scales.data, made.shape[1] // made.size)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def as_nvfp4(name: str, matrix: Tensor) -> Tensors:
    """nvfp4 as compressed-tensors has it; numbers of inputs are of numbers up to 7, or 4.

    Experts have different ones.
    """
    expert = re.search(r"experts\.(\d+)", name)
    made = round_fp4(matrix, NVFP4, rounds=True)
    assert made.input_global_scale is not None
    packed, scales = stored(made)
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": made.input_global_scale.data,
        f"{name}.input_global_scale": torch.tensor([400.0 + 40 * int(expert[1] if expert else 0)]),
    }


def as_mxfp4(name: str, matrix: Tensor) -> Tensors:
    """mxfp4 as compressed-tensors has it."""
    packed, scales = stored(round_fp4(matrix, MXFP4, rounds=True))
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scales}


def compressed_to_fp4(rounds: bool, strategy: str, size: int, dynamic: Any) -> dict[str, Any]:
    """What config.json says of maps in 4 bits; dynamic: of scales of inputs."""
    kind = {"type": "float", "num_bits": 4, "strategy": strategy, "group_size": size}
    inputs = {"input_activations": {**kind, "dynamic": dynamic}} if rounds else {}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": kind, **inputs}},
    }


def compressed_to_8_bits(kind: str, strategy: str | None) -> dict[str, Any]:
    """What config.json says of maps in 8 bits; strategy: of what shares a scale of inputs."""
    scheme: dict[str, Any] = {"weights": {"type": kind, "num_bits": 8, "strategy": "channel"}}
    if strategy is not None:
        inputs = {"type": kind, "num_bits": 8, "strategy": strategy}
        scheme["input_activations"] = {**inputs, "dynamic": strategy == "token"}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
    }


def _words(codes: Tensor) -> Tensor:
    """Put eight codes of a row into an int32, the first one low."""
    parts = codes.long().view(len(codes), -1, 8) << torch.arange(0, 32, 4)
    # As a signed number of 32 bits.
    words: Tensor = (parts.sum(-1) + 2**31).remainder(2**32).sub(2**31).int()
    return words.contiguous()


FORMS: dict[str, tuple[Callable[[str, Tensor], Tensors] | None, dict[str, Any]]] = {
    "fp8": (None, {}),
    "fp8 in blocks": (
        as_blocks,
        {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
    ),
    "activations as they are": (as_channels, compressed_to_8_bits("float", None)),
    "stored fp8": (as_channels, compressed_to_8_bits("float", "token")),
    "static fp8": (as_static, compressed_to_8_bits("float", "tensor")),
    "4 bits": (
        as_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    ),
    "act-order": (
        lambda name, matrix: as_gptq(name, matrix, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    ),
    "nf4": (
        as_nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "8 bits and activations": (as_rounded_int8, compressed_to_8_bits("int", "token")),
    "nvfp4": (as_nvfp4, compressed_to_fp4(True, "tensor_group", NVFP4, "local")),
    "mxfp4": (as_mxfp4, compressed_to_fp4(True, "group", MXFP4, True)),
    "weights in mxfp4": (as_mxfp4, compressed_to_fp4(False, "group", MXFP4, True)),
    "8 bits": (as_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4 at load": (None, {}),
    "8 bits at load": (None, {}),
}
"""How a matrix is stored, and what config.json says; None: it is rounded at load."""

AT_LOAD = {
    "fp8": Quantize.FP8,
    "nf4 at load": Quantize.BITSANDBYTES_NF4,
    "8 bits at load": Quantize.BITSANDBYTES,
}


def write(folder: Path, form: str) -> tuple[Path, Path]:
    """Write a Llama in a form, and an adapter of all its linear maps."""
    sizes: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
    dense = write_llama(folder / "dense", dtype="bfloat16", **sizes)
    # With the usual, larger weights of tiny models one rounding moves logits by whole units.
    file = dense / "model.safetensors"
    small = {n: t * SCALE if t.dim() == 2 else t for n, t in load_file(file).items()}
    save_file(small, file, {"format": "pt"})
    adapter = write_adapter(folder / "adapter", dense, AdapterRecipe(r=8, alpha=16.0, std=0.02))
    made, how = FORMS[form]
    if made is None:
        return dense, adapter
    tensors: Tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = module.rsplit(".", 1)[-1] in LINEARS
        tensors |= made(module, tensor) if is_linear else {name: tensor}
    stored = folder / "stored"
    stored.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, stored / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return stored, adapter


def config_of(
    model: Path, form: str, device: Device, dtype: DType, dequantised: float = 0.0
) -> EngineConfig:
    kind = AttentionKind.TRITON if device is Device.CUDA else AttentionKind.AUTO
    return engine_config(
        model,
        model=ModelConfig(
            id=str(model),
            dtype=dtype,
            quantize=AT_LOAD.get(form, Quantize.NONE),
            dequantised_fraction=dequantised,
        ),
        device=device,
        attention=kind,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        limits=LimitsConfig(max_running=TOGETHER, max_step_tokens=512),
        adapters=AdaptersConfig(device_pages=4, max_device_adapters=2),
    )


def make_runner(config: EngineConfig) -> ModelRunner:
    return load_paged(config, SingleRank(), pick_device(config.device)).allocate()


def bounded(ours: Errors, reference: Errors) -> bool:
    """The kernels round where the reference does; a number near a tie may round the other way."""
    return (
        ours.kl <= 2 * reference.kl + 1e-3
        and ours.largest <= 2 * reference.largest + 0.1
        and ours.flips <= 1.5 * reference.flips + 0.15
    )


@pytest.mark.parametrize("form", FORMS)
def test_models(form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if form == "nf4 at load":
        pytest.importorskip("bitsandbytes")
    model, adapter = write(tmp_path, form)
    found: dict[str, Tensor] = {}
    lines, far = [], []
    for name, device, dtype, dequantised in (
        ("truth", Device.CPU, DType.FLOAT32, 0.0),
        ("reference", Device.CPU, DType.BFLOAT16, 0.0),
        ("ours", Device.CUDA, DType.BFLOAT16, 0.0),
        ("numbers", Device.CUDA, DType.BFLOAT16, 0.1),
    ):
        runner = make_runner(config_of(model, form, device, dtype, dequantised))
        kept = [each for each in runner.report.weight_forms if "dequantised" in each]
        if name == "numbers" and not kept:
            continue
        assert bool(kept) == (dequantised > 0)
        place_all(runner, [adapter])
        is_ours = device is Device.CUDA
        for slot in (-1, 0):
            for decode in (False, True) if is_ours else (False,):
                said = forced_logprobs(runner, VOCAB_SIZE, slot, decode, BLOCK_SIZE).cpu()
                if not is_ours:
                    found[f"{name}{slot}"] = said
                    continue
                truth, reference = found[f"truth{slot}"], found[f"reference{slot}"]
                theirs, own = errors(reference, truth), errors(said, truth)
                way = f"{'base' if slot < 0 else 'adapter':8}{'decode' if decode else 'prefill':8}"
                lines.append(f"{form:24}{name:8}{way}{own}  (reference: {theirs})")
                if not bounded(own, theirs):
                    far.append(lines[-1])
        assert not is_ours or runner.num_captured, "no step was captured"
    with capfd.disabled():
        print("", *lines, sep="\n")
    assert not far, "\n".join(far)
