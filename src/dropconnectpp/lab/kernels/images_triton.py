"""The Triton kernel behind `images`: imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def image_kernel(  # type: ignore[no-untyped-def]
    image_ptr,
    chosen_ptr,
    y_ptr,
    means,
    deviations,
    OWN: tl.constexpr,
    C: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chosen image with zero mean and unit spread: its own (OWN), or each channel's from means and deviations.

    It is read as C planes of PIXELS bytes and written with channels last.
    """
    place = tl.program_id(0).to(tl.int64)
    COUNT: tl.constexpr = C * PIXELS
    image = image_ptr + tl.load(chosen_ptr + place) * COUNT
    mean, deviation = 0.0, 1.0
    if OWN:
        totals = tl.zeros((BLOCK,), tl.int32)
        squares = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, COUNT, BLOCK):
            lanes = first + tl.arange(0, BLOCK)
            value = tl.load(image + lanes, mask=lanes < COUNT, other=0).to(tl.int32)
            totals += value
            squares += value * value
        total = tl.sum(totals.to(tl.int64), axis=0)
        # Whole numbers: n sum x^2 - (sum x)^2 is exact, and zero for a constant image.
        spread = tl.sum(squares.to(tl.int64), axis=0) * COUNT - total * total
        mean = tl.div_rn(total.to(tl.float32), COUNT * 1.0)
        deviation = tl.div_rn(tl.sqrt_rn(spread.to(tl.float32)), COUNT * 1.0)
        deviation = tl.where(deviation > 1e-3, deviation, float("inf"))  # as `normalisation.standardise` has it
    for first in range(0, COUNT, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        inside = lanes < COUNT
        channel = lanes % C
        value = tl.load(image + channel * PIXELS + lanes // C, mask=inside, other=0).to(tl.float32)
        centre = tl.zeros((BLOCK,), tl.float32) + mean
        divisor = tl.zeros((BLOCK,), tl.float32) + deviation
        if not OWN:
            for c in tl.static_range(C):
                centre = tl.where(channel == c, means[c], centre)
                divisor = tl.where(channel == c, deviations[c], divisor)
        result = tl.div_rn(value - centre, divisor)
        tl.store(y_ptr + place * COUNT + lanes, result.to(y_ptr.dtype.element_ty), mask=inside)
