"""`modeling/sampling/exact.py` and the noise's hash in Triton: the same operations, the same bits.

Kernels that use them must be launched with `EXACT`.
"""

from typing import Any

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
"""Launch options. A fused multiply-add rounds once where two operations round twice."""


@triton.jit  # type: ignore[untyped-decorator]
def scaled_exp(exponents: "Any") -> "Any":
    """See exact.scaled_exp."""
    x = tl.maximum(exponents, -60.0)
    power = tl.floor(x * 1.44269504088896341 + 0.5)
    x = (x - power * 0.693359375) - power * -2.12194440e-4
    value = x * 1.9875691500e-4 + 1.3981999507e-3
    value = value * x + 8.3334519073e-3
    value = value * x + 4.1665795894e-2
    value = value * x + 1.6666665459e-1
    value = value * x + 5.0000001201e-1
    value = value * (x * x) + x + 1.0
    return value * ((power.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _log1p(f: "Any", power: "Any") -> "Any":
    square = f * f
    y = f * 7.0376836292e-2 + -1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f + -1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f + -1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f + -2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f * square + power * -2.12194440e-4
    return f + (y - square * 0.5) + power * 0.693359375


@triton.jit  # type: ignore[untyped-decorator]
def log(x: "Any") -> "Any":
    """See exact.log."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits >> 23) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < 0.70710678118654752
    power = tl.where(low, power - 1, power)
    return _log1p(tl.where(low, mantissa + mantissa, mantissa) - 1.0, power.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def minus_log1m(v: "Any") -> "Any":
    """See exact.minus_log1m."""
    near = _log1p(-v, v * 0.0)
    return -tl.where(v < 0.29289321881345248, near, log(1.0 - v))


@triton.jit  # type: ignore[untyped-decorator]
def vocabulary_hash(first_key: "Any", second_key: "Any", ids: "Any") -> "Any":
    """See noise.vocabulary_hash; all are int32."""
    h = (ids * -1640531535) ^ first_key
    h = (h ^ ((h >> 16) & 0xFFFF)) * 569420461
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -749064809
    h = (h ^ ((h >> 15) & 0x1FFFF)) + second_key
    h = (h ^ ((h >> 16) & 0xFFFF)) * 569420461
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -749064809
    return h ^ ((h >> 15) & 0x1FFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(first_key: "Any", second_key: "Any", ids: "Any") -> "Any":
    h = vocabulary_hash(first_key, second_key, ids).to(tl.float32)
    v = (tl.where(h < 0, h + 4294967296.0, h) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(v, 0.99999994039535522)


@triton.jit  # type: ignore[untyped-decorator]
def exponential_noise(first_key: "Any", second_key: "Any", ids: "Any") -> "Any":
    """See noise.exponential_noise."""
    return minus_log1m(_uniform(first_key, second_key, ids))
