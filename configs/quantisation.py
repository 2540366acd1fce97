"""How linear maps are quantised: their weights, and what is multiplied with them."""

from enum import StrEnum

from pydantic import PositiveFloat, PositiveInt

from configs.base import Config


class WeightFormat(StrEnum):
    """How the weights are stored.

    FP8: e4m3, with a scale for each output or for the matrix. FP8_BLOCKS: with one for each block.
    ROUNDED_INT8: 8 bits with the same scales, and activations of 8 bits. PACKED: integers of
    compressed-tensors, FP4: its numbers of 4 bits (nvfp4, mxfp4), and ModelOpt's. GPTQ, AWQ:
    integers of these. NF4: 4 bits of bitsandbytes, INT8: its 8 bits.
    MXFP4: matrices of experts alone, 4 bits with a power of two for 32 inputs.
    """

    FP8 = "fp8"
    FP8_BLOCKS = "fp8_blocks"
    ROUNDED_INT8 = "rounded_int8"
    PACKED = "packed"
    FP4 = "fp4"
    GPTQ = "gptq"
    AWQ = "awq"
    NF4 = "nf4"
    INT8 = "int8"
    MXFP4 = "mxfp4"


class Activations(StrEnum):
    """How a layer's inputs are quantised.

    NONE: not at all. TOKEN: with a scale for each token. GROUP: with one for some inputs of each
    token. STATIC: with the checkpoint's.
    """

    NONE = "none"
    TOKEN = "token"
    GROUP = "group"
    STATIC = "static"


class Quantisation(Config):
    """How linear maps are quantised.

    method: the name of it in config.json.
    bits: of an integer.
    group_size: inputs that share a scale; None: all of an output.
    block: outputs and inputs that share a scale of FP8_BLOCKS.
    offset_zeros: whether GPTQ's zero points are stored less 1.
    zero_points: whether PACKED integers have some of their own.
    threshold: INT8 leaves inputs from this size on unquantised.
    others: expressions of how a map's path begins, and how that map is quantised; the first one
    that fits counts.
    """

    method: str
    format: WeightFormat
    activations: Activations = Activations.NONE
    bits: PositiveInt = 8
    group_size: PositiveInt | None = None
    block: tuple[PositiveInt, PositiveInt] | None = None
    offset_zeros: bool = True
    zero_points: bool = False
    threshold: PositiveFloat | None = None
    others: tuple[tuple[str, "Quantisation"], ...] = ()
