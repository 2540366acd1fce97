"""How a checkpoint's linear maps are quantised: `quantization_config` of config.json."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from configs.architectures.base import ArchitectureError
from configs.quantisation import Activations, Quantisation, WeightFormat

SERVED = (
    "compressed-tensors (fp8 weights with fp8 or unquantised activations, integers of 8 bits with "
    "activations of 8 bits, packed integers of 4 or 8 bits, nvfp4 and mxfp4), fp8 in blocks, gptq "
    "of 4 or 8 bits, awq of 4 bits, bitsandbytes of 4 or 8 bits, mxfp4 of gpt-oss, modelopt's FP8, "
    "FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and W4A16_NVFP4"
)


def parse_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Read `quantization_config`; None for weights as they are.

    ArchitectureError names what is not served, and what is.
    """
    given = config.get("quantization_config")
    if not given or _scales_alone(given):
        return None
    # Files of old transformers name no method beside these.
    is_old = given.get("load_in_4bit") or given.get("load_in_8bit")
    method = given.get("quant_method") or ("bitsandbytes" if is_old else "unknown")
    if method not in _METHODS:
        raise _refused(method, "this method")
    try:
        return _METHODS[method](given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ArchitectureError):
            raise
        raise _refused(method, f"{type(error).__name__} {error}") from error


def _refused(method: str, what: str) -> ArchitectureError:
    return ArchitectureError(
        f"quantization_config ({method}): {what} is not supported; served are {SERVED}"
    )


def _only(given: Mapping[str, Any], method: str, wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse keys with other values than those wanted; a key that is absent passes."""
    for key, values in wanted.items():
        if key in given and given[key] not in values:
            raise _refused(method, f"{key} {given[key]!r}")


def _scales_alone(quantization: Mapping[str, Any]) -> bool:
    """Whether it has nothing but scales of an fp8 cache, one for keys and one for values.

    compressed-tensors writes it so. The weights are as they were; the scales are read where such
    a cache is configured.
    """
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and not quantization.get("config_groups")
        and not quantization.get("sparsity_config")
        and not quantization.get("transform_config")
        and _is_scale_of_cache(quantization.get("kv_cache_scheme") or {})
    )


def _is_scale_of_cache(scheme: Mapping[str, Any]) -> bool:
    cache = {"symmetric": True, "dynamic": False, **scheme}
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return (
        cache["symmetric"] is True
        and cache["dynamic"] is False
        and all(cache.get(key) == value for key, value in wanted.items())
    )


_COMPRESSED = "compressed-tensors"


def _compressed(given: Mapping[str, Any]) -> Quantisation:
    """Read what the package compressed-tensors writes."""
    _only(given, _COMPRESSED, {"quantization_status": ("compressed", None)})
    sparsity = given.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(_COMPRESSED, f"sparsity_config {sparsity['format']}")
    if given.get("transform_config"):
        raise _refused(_COMPRESSED, "transform_config")
    cache = given.get("kv_cache_scheme")
    if cache and not _is_scale_of_cache(cache):
        raise _refused(_COMPRESSED, "kv_cache_scheme of another kind than a scale for each layer")
    groups = given["config_groups"].values()
    schemes = [_scheme(group) for group in groups]
    if not schemes:
        raise _refused(_COMPRESSED, "config_groups without a scheme")
    if all(scheme == schemes[0] for scheme in schemes):
        return schemes[0]
    pairs = zip(groups, schemes, strict=True)
    targets = {target: scheme for group, scheme in pairs for target in group["targets"]}
    whole = targets.pop("Linear", schemes[0])
    # Names before expressions, and each kind in order, as the package's match_targets has it.
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    return _with_others(whole, [(_expression(each), targets[each]) for each in ordered])


def _expression(target: str) -> str:
    """Return a target as an expression of how paths begin."""
    is_expression = target.startswith("re:")
    return target.removeprefix("re:") if is_expression else f"{re.escape(target)}$"


def _with_others(whole: Quantisation, others: list[tuple[str, Quantisation]]) -> Quantisation:
    """Add maps that are quantised otherwise; ArchitectureError for what is no expression."""
    for expression, _ in others:
        try:
            re.compile(expression)
        except re.error as error:
            raise _refused(whole.method, f"the expression {expression!r} ({error})") from error
    return whole.model_copy(update={"others": tuple(others)})


def _scheme(group: Mapping[str, Any]) -> Quantisation:
    """Read one of config_groups."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not weights or group.get("output_activations"):
        raise _refused(_COMPRESSED, "a scheme without weights, or with output_activations,")
    _only(weights, _COMPRESSED, {"dynamic": (False, None)})
    kind, bits, strategy = weights["type"], weights["num_bits"], weights["strategy"]
    if kind == "float" and bits == 8 and weights.get("symmetric", True):
        if strategy == "block":
            rows, columns = _block(weights["block_structure"])
            return Quantisation(
                method=_COMPRESSED,
                format=WeightFormat.FP8_BLOCKS,
                block=(rows, columns),
                activations=_activations(inputs, columns),
            )
        if strategy in ("tensor", "channel"):
            return Quantisation(
                method=_COMPRESSED, format=WeightFormat.FP8, activations=_activations(inputs, None)
            )
    if (kind, bits) == ("int", 8) and inputs and strategy in ("tensor", "channel"):
        if weights.get("symmetric", True):
            return Quantisation(
                method=_COMPRESSED,
                format=WeightFormat.ROUNDED_INT8,
                activations=_activations(inputs, None, "int"),
            )
        raise _refused(_COMPRESSED, "weights with zero points and activations of 8 bits")
    if kind == "int" and bits in (4, 8) and strategy in ("group", "channel") and not inputs:
        return Quantisation(
            method=_COMPRESSED,
            format=WeightFormat.PACKED,
            bits=bits,
            group_size=weights.get("group_size") if strategy == "group" else None,
            zero_points=not weights.get("symmetric", True),
        )
    size = weights.get("group_size")
    if (kind, bits, strategy, size) in _FP4 and weights.get("symmetric", True):
        return Quantisation(
            method=_COMPRESSED,
            format=WeightFormat.FP4,
            bits=bits,
            group_size=size,
            activations=_fp4_activations(inputs, strategy, size),
        )
    raise _refused(
        _COMPRESSED,
        f"weights of {kind} with {bits} bits by {strategy}"
        + (f" and activations of {inputs['num_bits']} bits" if inputs else ""),
    )


_FP4 = {("float", 4, "tensor_group", 16): "local", ("float", 4, "group", 32): True}
"""nvfp4 and mxfp4: what shares scales, and whether scales of activations are made in a step."""


def _fp4_activations(inputs: Mapping[str, Any] | None, strategy: str, size: int) -> Activations:
    """Read input_activations beside weights of 4 bits: as they are, or rounded as these."""
    if not inputs:
        return Activations.NONE
    keys = ("type", "num_bits", "strategy", "group_size")
    found = tuple(inputs.get(key) for key in keys)
    wanted, dynamic = ("float", 4, strategy, size), inputs.get("dynamic")
    if found == wanted and dynamic == _FP4[wanted] and inputs.get("symmetric", True):
        return Activations.GROUP
    given = {**dict(zip(keys, found, strict=True)), "dynamic": dynamic}
    raise _refused(_COMPRESSED, f"input_activations {given}")


def _block(given: Any) -> list[int]:
    """Read block_structure: two numbers, or as older files have them, "128x128"."""
    return [int(size) for size in (given.split("x") if isinstance(given, str) else given)]


def _activations(
    inputs: Mapping[str, Any] | None, group: int | None, kind: str = "float"
) -> Activations:
    """Read input_activations; group: inputs that share a scale, where weights have blocks."""
    if not inputs:
        return Activations.NONE
    found = {key: inputs.get(key) for key in ("type", "num_bits", "strategy", "dynamic")}
    symmetric = inputs.get("symmetric", True)
    if symmetric and found["type"] == kind and found["num_bits"] == 8:
        how = found["strategy"], bool(found["dynamic"])
        if how == ("token", True) and group is None:
            return Activations.TOKEN
        if how == ("tensor", False):
            return Activations.STATIC
        if how == ("group", True) and inputs.get("group_size") == group:
            return Activations.GROUP
    # One scale for a whole batch would let a request change its neighbours.
    asymmetric = "" if symmetric else " with zero points"
    raise _refused(_COMPRESSED, f"input_activations {found}{asymmetric}")


def _fp8(given: Mapping[str, Any]) -> Quantisation:
    """Read what DeepSeek and Qwen publish, and transformers writes."""
    formats = ("e4m3", "float8_e4m3fn", None)
    _only(given, "fp8", {"fmt": formats, "scale_fmt": ("float", "ue8m0", None)})
    block = given.get("weight_block_size")
    scheme = given.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static") or (block is None and scheme == "dynamic"):
        raise _refused("fp8", f"activation_scheme {scheme} with weight_block_size {block}")
    activations = Activations.STATIC if scheme == "static" else Activations.GROUP
    if block is None:
        return Quantisation(method="fp8", format=WeightFormat.FP8, activations=activations)
    rows, columns = block
    return Quantisation(
        method="fp8",
        format=WeightFormat.FP8_BLOCKS,
        block=(rows, columns),
        activations=activations,
    )


def _group_size(given: Mapping[str, Any]) -> int | None:
    size = given.get("group_size", given.get("q_group_size", 128))
    return None if size is None or size <= 0 else int(size)


def _gptq(given: Mapping[str, Any]) -> Quantisation:
    formats = ("gptq", "gptq_v2", None)
    _only(given, "gptq", {"bits": (4, 8), "checkpoint_format": formats, "format": formats})
    _only(given, "gptq", {"is_marlin_format": (False, None), "lm_head": (False, None)})
    own = Quantisation(
        method="gptq",
        format=WeightFormat.GPTQ,
        bits=given["bits"],
        group_size=_group_size(given),
        offset_zeros=(given.get("checkpoint_format") or given.get("format")) != "gptq_v2",
    )
    # Patterns after "-:" leave modules as they were, which their tensors show.
    others = [
        (pattern.removeprefix("+:"), _changed(own, pattern, changes))
        for pattern, changes in (given.get("dynamic") or {}).items()
        if not pattern.startswith("-:")
    ]
    return _with_others(own, others)


_LOOK_ELSEWHERE = frozenset(
    {
        "act_group_aware", "damp_auto_increment", "damp_percent", "desc_act", "mse",
        "static_groups", "sym", "true_sequential",
    }
)  # fmt: skip
"""Settings of gptqmodel for single modules that say how codes were found, or that tensors show."""


def _changed(own: Quantisation, pattern: str, changes: Mapping[str, Any]) -> Quantisation:
    """Read what `dynamic` changes for the modules of a pattern."""
    unknown = changes.keys() - _LOOK_ELSEWHERE - {"bits", "group_size"}
    if unknown:
        raise _refused("gptq", f"dynamic {pattern!r} with {', '.join(sorted(unknown))}")
    _only(changes, "gptq", {"bits": (4, 8)})
    size = _group_size(changes) if "group_size" in changes else own.group_size
    return own.model_copy(update={"bits": changes.get("bits", own.bits), "group_size": size})


def _awq(given: Mapping[str, Any]) -> Quantisation:
    formats = ("gemm", "GEMM", "gemm_v2", None)
    wanted = {"bits": (4,), "w_bit": (4,), "version": formats, "format": formats}
    _only(given, "awq", {**wanted, "zero_point": (True, None)})
    return Quantisation(
        method="awq",
        format=WeightFormat.AWQ,
        bits=given.get("bits", given.get("w_bit")),
        group_size=_group_size(given),
    )


def _bitsandbytes(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "bitsandbytes", {"llm_int8_has_fp16_weight": (False, None)})
    if given.get("load_in_4bit"):
        return Quantisation(method="bitsandbytes", format=WeightFormat.NF4, bits=4)
    return Quantisation(
        method="bitsandbytes",
        format=WeightFormat.INT8,
        activations=Activations.TOKEN,
        threshold=given.get("llm_int8_threshold", 6.0) or None,
    )


def _mxfp4(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "mxfp4", {"dequantize": (False, None)})
    return Quantisation(method="mxfp4", format=WeightFormat.MXFP4, bits=4, group_size=32)


def _modelopt(given: Mapping[str, Any]) -> Quantisation:
    """Read what NVIDIA's ModelOpt exports."""
    algorithm = given.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise _refused("modelopt", f"quant_algo {algorithm}")
    form, activations = _ALGORITHMS[algorithm]
    if form is WeightFormat.FP8:
        return Quantisation(method="modelopt", format=form, activations=activations)
    groups = [given, *(group["weights"] for group in (given.get("config_groups") or {}).values())]
    for group in groups:
        _only(group, "modelopt", {"group_size": (16, None)})
    return Quantisation(
        method="modelopt", format=form, bits=4, group_size=16, activations=activations
    )


_ALGORITHMS = {
    "FP8": (WeightFormat.FP8, Activations.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightFormat.FP8, Activations.TOKEN),
    "NVFP4": (WeightFormat.FP4, Activations.GROUP),
    "W4A16_NVFP4": (WeightFormat.FP4, Activations.NONE),
}
"""Of ModelOpt, by `quant_algo`."""

_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    _COMPRESSED: _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
