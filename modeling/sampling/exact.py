"""Exponentials and logarithms that have the same bits on every device.

Libraries' functions differ in the last bit from device to device. These are single operations of
IEEE 754 in a fixed order (the polynomials of Cephes' expf and logf), so a token does not depend
on the device that chose it.
"""

import torch
from torch import Tensor

WEIGHT_BITS = 40
"""Weights are integers in units of 2**-WEIGHT_BITS: their sums are exact in any order."""

LEAST_EXPONENT = -60.0
"""Smaller exponents are taken for it: their weight is 0 anyway."""

LOG2_E = 1.44269504088896341
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
"""ln 2 in two parts: products of the first with small integers are exact."""

SQRT_HALF = 0.70710678118654752

EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
       5.0000001201e-1)  # fmt: skip
LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
       -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
"""Coefficients, the highest power's first."""


def weights(exponents: Tensor) -> Tensor:
    """Return floor(e**x * 2**WEIGHT_BITS), int64, of float32 x <= 0."""
    return scaled_exp(exponents).to(torch.int64)


def scaled_exp(exponents: Tensor) -> Tensor:
    """Return e**x * 2**WEIGHT_BITS, float32, of float32 x <= 0."""
    x = exponents.clamp(min=LEAST_EXPONENT)
    power = (x * LOG2_E + 0.5).floor()
    x = (x - power * LN2_HIGH) - power * LN2_LOW
    value = _polynomial(x, EXP) * (x * x) + x + 1.0
    scale = ((power.to(torch.int32) + (WEIGHT_BITS + 127)) << 23).view(torch.float32)
    return value * scale


def log(x: Tensor) -> Tensor:
    """Return ln x, float32, of normal float32 x > 0."""
    bits = x.view(torch.int32)
    power = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    low = mantissa < SQRT_HALF
    power = torch.where(low, power - 1, power)
    return _log1p(torch.where(low, mantissa + mantissa, mantissa) - 1.0, power.to(torch.float32))


def minus_log1m(v: Tensor) -> Tensor:
    """Return -ln(1 - v), float32, of float32 v in (0, 1); small v lose no precision."""
    near = _log1p(-v, torch.zeros_like(v))
    return -torch.where(v < 1.0 - SQRT_HALF, near, log(1.0 - v))


def _log1p(f: Tensor, power: Tensor) -> Tensor:
    """ln((1 + f) * 2**power), 1 + f within a factor of sqrt(2) of 1."""
    square = f * f
    y = _polynomial(f, LOG) * f * square + power * LN2_LOW
    return f + (y - square * 0.5) + power * LN2_HIGH


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    first, *others = coefficients
    result = torch.full_like(x, first)
    for coefficient in others:
        result = result * x + coefficient
    return result
