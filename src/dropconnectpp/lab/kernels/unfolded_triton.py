"""The Triton kernels behind `unfolded`: imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def unfold_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    total,
    height,
    width,
    rows,
    columns,
    MAPS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    FILLED: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`unfolded.unfold`: some windows, each in a row of lanes."""
    window = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    column = window % columns
    row = (window // columns) % rows
    example = (window // (columns * rows)).to(tl.int64)
    place = lane // MAPS
    h = row * STRIDE - PADDING + place // SIZE
    w = column * STRIDE - PADDING + place % SIZE
    stored = (window < total) & (lane < FILLED)
    inside = stored & (lane < SIZE * SIZE * MAPS) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    source = ((example * height + h) * width + w) * MAPS + lane % MAPS
    value = tl.load(x_ptr + source, mask=inside, other=0.0)
    tl.store(y_ptr + window.to(tl.int64) * FILLED + lane, value, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def fold_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    x_ptr,
    height,
    width,
    rows,
    columns,
    MAPS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    FILLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`unfolded.fold`: for some values of an example's maps, the sum over the windows that have them."""
    example = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = element % MAPS
    w = (element // MAPS) % width + PADDING
    h = element // (MAPS * width) + PADDING
    inside = element < height * width * MAPS
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            row, column = (h - i) // STRIDE, (w - j) // STRIDE
            there = inside & (h >= i) & (w >= j) & (row < rows) & (column < columns)
            if STRIDE > 1:
                there = there & ((h - i) % STRIDE == 0) & ((w - j) % STRIDE == 0)
            source = ((example * rows + row) * columns + column) * FILLED + (i * SIZE + j) * MAPS + lane
            total += tl.load(y_ptr + source, mask=there, other=0.0).to(tl.float32)
    tl.store(x_ptr + example * height * width * MAPS + element, total.to(x_ptr.dtype.element_ty), mask=inside)
