"""Convert adapters that mlx_lm trained to PEFT's two files.

mlx_lm computes y = W x + scale * (x lora_a) lora_b, lora_a: [in, r], lora_b: [r, out], and writes
both to adapters.safetensors, with its arguments in adapter_config.json. PEFT's factors are these,
transposed, and alpha / r is the scale. A DoRA of mlx_lm has PEFT's formula, m is the magnitude.
(mlx_lm/tuner/lora.py, dora.py, utils.py)
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from safetensors.torch import save
from torch import Tensor

from configs.reading import DamagedFile, read_small, read_text
from configs.wire.adapters import AdapterRefusal
from sharding.tensor_file import FLOAT_TYPES, TensorFile
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES, MLX_NAME, refuse
from sources.files import fingerprint

SAFE_NAME = "adapter_model.safetensors"
MAX_BYTES = 512 << 20
"""Of a file that is converted, which is in memory twice meanwhile. A rank of 32 over every linear
module of an 8B model has 336 MiB in float32."""

_PREFIX = "base_model.model."
_SUFFIXES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "m": "lora_magnitude_vector",
}
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embed_in", "tok_embeddings", "embeddings"})


def convert(folder: Path, into: Path, name: str, root: Path | None = None) -> None:
    """Write the adapter in `folder` to `into` as PEFT saves it.

    root: the folder that links must not lead out of. If `folder` and `into` are the same, MLX's
    files are replaced. Raises AdapterError for what PEFT's files cannot say; OSError when the
    files cannot be read.
    """
    fields = _fields(folder, name, root)
    tensors = _tensors(folder / MLX_NAME, name, root)
    config = _config(fields, tensors, name)
    for other, size, _ in fingerprint(folder) if folder != into else ():
        if other not in (CONFIG_NAME, MLX_NAME):
            (into / other).parent.mkdir(exist_ok=True)
            (into / other).write_bytes(read_small(folder / other, size, root))
    (into / SAFE_NAME).write_bytes(save(tensors))
    (into / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    if folder == into:
        (folder / MLX_NAME).unlink()


def _fields(folder: Path, name: str, root: Path | None) -> dict[str, object]:
    try:
        fields = json.loads(read_text(folder / CONFIG_NAME, MAX_CONFIG_BYTES, root))
    except (ValueError, RecursionError) as error:
        _refuse(name, f"{CONFIG_NAME} is not valid JSON: {error}")
    if not isinstance(fields, dict):
        _refuse(name, f"{CONFIG_NAME} must hold an object, found {type(fields).__name__}")
    kind = fields.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        _refuse(
            name,
            f"fine_tune_type {str(kind)[:80]!r} of MLX is no adapter: serve the model that "
            "mlx_lm.fuse makes of it",
        )
    return fields


def _tensors(path: Path, name: str, root: Path | None) -> dict[str, Tensor]:
    """Read the factors under PEFT's names, transposed."""
    try:
        file = TensorFile(path, root)
    except DamagedFile as error:
        _refuse(name, str(error))
    found: dict[str, Tensor] = {}
    with file:
        if file.num_bytes > MAX_BYTES:
            _refuse(
                name,
                f"{path.name} has {file.num_bytes} bytes, over the {MAX_BYTES} that are "
                "converted: train it with a smaller rank",
            )
        for key in file.keys():  # noqa: SIM118
            module, _, side = key.rpartition(".")
            _check(name, key, side, module, file)
            tensor = file.get_tensor(key)
            whole = tensor.t().contiguous() if tensor.ndim > 1 else tensor.clone()
            found[f"{_PREFIX}{module}.{_SUFFIXES[side]}"] = whole
    return found


def _check(name: str, key: str, side: str, module: str, file: TensorFile) -> None:
    """Refuse a tensor with a meaning that PEFT's files cannot have."""
    if side not in _SUFFIXES or not module:
        _refuse(name, f"{key} is no factor that mlx_lm.lora writes")
    if file.dtype(key) not in FLOAT_TYPES:
        _refuse(name, f"{key} has type {file.dtype(key)}: train in float32, float16 or bfloat16")
    if len(file.shape(key)) != (1 if side == "m" else 2):
        _refuse(
            name,
            f"{key} has shape {list(file.shape(key))}: factors of experts in one tensor are not "
            "served; train keys outside of them",
        )
    if module.rpartition(".")[2] in _EMBEDDINGS:
        # mlx_lm uses such factors for a tied head too, and its files do not say whether it was.
        _refuse(name, f"{key} adapts the embedding: train with keys inside the layers")


def _config(
    fields: Mapping[str, object], tensors: Mapping[str, Tensor], name: str
) -> dict[str, object]:
    given = fields.get("lora_parameters")
    known = given if isinstance(given, dict) else {}
    rank, scale, alpha = known.get("rank"), known.get("scale"), known.get("alpha")
    if type(rank) is not int or rank < 1:
        _refuse(name, f"lora_parameters of {CONFIG_NAME} must name the rank")
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(float(str(scale))):
        _refuse(name, f"lora_parameters of {CONFIG_NAME} must name the scale")
    if alpha is not None and alpha != rank:
        # Old releases multiplied the scale by alpha / rank, newer ones read no alpha.
        _refuse(
            name,
            f"lora_parameters has both scale {scale} and alpha {str(alpha)[:80]}, which releases "
            "of mlx_lm read differently: set the scale that it was trained with, without alpha",
        )
    modules = {key.removeprefix(_PREFIX).partition(".lora_")[0] for key in tensors}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": float(str(scale)) * rank,
        "target_modules": sorted(modules),
        "use_dora": fields.get("fine_tune_type") == "dora",
        "base_model_name_or_path": fields.get("model"),
    }


def _refuse(name: str, message: str) -> NoReturn:
    refuse(AdapterRefusal.UNSUPPORTED, f"adapter {name!r}, of MLX: {message}")
