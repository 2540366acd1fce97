"""Kinds of adapters beside plain LoRA: what each is, and what to do where it is not served."""

import re
from collections.abc import Mapping
from pathlib import Path

PEFT_KNOWN = (0, 21, 2)
"""The newest release of PEFT of which every field of LoraConfig is decided here."""

_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")

CONVERTIBLE = frozenset(
    {"C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA"}
    | {"TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT"}
)
"""Tuners with linear layers that PEFT converts to LoRA (peft/tuners/lora/conversion.py)."""

PROMPTS = frozenset(
    {"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING"}
    | {"PROMPT_TUNING", "P_TUNING"}
)
"""Tuners that bring tokens or cached keys instead of a change of weights."""

ROUTERS = frozenset({"POLY", "XLORA"})
"""Tuners that mix several adapters anew for each token or task."""

CONVERSION = (
    "PEFT converts it: load it over its base model and call peft.save_as_lora(folder, model, "
    "rank); factors of that rank come near the adapter's change, and what they do not hold is lost "
    "(rank=0.99 keeps 99 % of its square)"
)
CONVERSIONS = {
    "MISS": "PEFT converts it without a loss, but for its kind bat: load it over its base model "
    "and call peft.save_as_lora(folder, model, rank)",
}
MERGE = (
    "PEFT has no conversion of it to LoRA: merge it into the base model (merge_and_unload) and "
    "serve the result, or retrain it as LoRA"
)
NO_WEIGHTS = "it changes no weights, so nothing converts or merges it: retrain it as LoRA"
NO_MERGE = "it has no weights of its own to merge: serve its parts, one adapter for each request"

MEGATRON_ADVICE = (
    "export it with nemo.collections.llm.peft.export_lora, or Megatron-Bridge's "
    "AutoBridge.export_adapter_ckpt"
)
MOST_SHOWN = 200
"""Most characters of an adapter's kind."""

RESIDUALS: Mapping[str, str] = {
    "pissa": "a part of the base weights, by their singular values",
    "olora": "a part of the base weights, by their QR decomposition",
    "corda": "a part of the base weights, by the covariance of samples",
    "lora_ga": "a part of the base weights, by their gradients",
    "loftq": "what a quantisation took away from the base weights",
}
"""Kinds of init_lora_weights after which the base weights are others, and what A and B start as."""

BESIDE: Mapping[str, str] = {
    "target_parameters": "on bare parameters",
    "trainable_token_indices": "with trained tokens",
    "modules_to_save": "with whole modules",
    "bias": "with trained biases",
    "lora_bias": "with biases of B",
}
"""Fields that bring more than factors of modules, and what they bring, for people."""

CONVERTED_BY_PEFT = (
    "save it converted to plain LoRA (save_pretrained with "
    "path_initial_model_for_weight_conversion), or serve the changed base as the model and set "
    "init_lora_weights to true"
)
LOFTQ_ADVICE = "serve the quantised base as the model and set init_lora_weights to true"


def kind_name(fields: Mapping[str, object]) -> str:
    """Return what an adapter_config.json says that the adapter is, for people."""
    if fields.get("peft_type") != "LORA":
        return f"{fields.get('peft_type')}"[:MOST_SHOWN]
    name = "rsLoRA" if fields.get("use_rslora") is True else "LoRA"
    if fields.get("use_dora") is True:
        name = "DoRA" if name == "LoRA" else "DoRA, scaled as rsLoRA"
    tokens = fields.get("alora_invocation_tokens")
    if tokens:
        name = f"aLoRA, activated from the tokens {tokens} on"
    name += "".join(f", {words}" for field, words in BESIDE.items() if _is_set(fields.get(field)))
    init = fields.get("init_lora_weights")
    return f"{name}, begun as {init}"[:MOST_SHOWN] if isinstance(init, str) else name[:MOST_SHOWN]


def _is_set(value: object) -> bool:
    return bool(value) and value != "none"


def files_advice(folder: Path) -> str:
    """Return what a folder without an adapter_config.json is, and what to do."""
    if any(folder.glob("*.nemo")) or (folder / "weights").is_dir():
        return f"it is a checkpoint of NeMo's or Megatron's; {MEGATRON_ADVICE}"
    return "it was not saved by PEFT; save it with PEFT's save_pretrained"


def tuner_advice(peft_type: object) -> str:
    """Return what to do with an adapter of another tuner than LoRA."""
    if not isinstance(peft_type, str):
        return "save it with PEFT's save_pretrained, which writes the kind"
    if peft_type in PROMPTS:
        return NO_WEIGHTS
    if peft_type in ROUTERS:
        return NO_MERGE
    if peft_type in CONVERTIBLE:
        return CONVERSIONS.get(peft_type, CONVERSION)
    return MERGE


def init_advice(init: object) -> str:
    """Return why an adapter of this init_lora_weights is not served as it is, and what to do."""
    name = str(init).lower()
    kind = next((kind for kind in RESIDUALS if name.startswith(kind)), None)
    begin = f"A and B begin as {RESIDUALS[kind]}" if kind else "it is unknown here"
    advice = LOFTQ_ADVICE if kind == "loftq" else CONVERTED_BY_PEFT
    return f"{begin}: it changes the base weights, which A and B alone do not carry; {advice}"


def is_peft_newer(version: object) -> bool:
    """Return whether a file's peft_version is newer than what is known here.

    PEFT 0.18 was the first to write its version, so files without one are older or of another tool.
    """
    if version is None:
        return False
    found = _RELEASE.match(version) if isinstance(version, str) else None
    return found is None or tuple(int(part or 0) for part in found.groups()) > PEFT_KNOWN
