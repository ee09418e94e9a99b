"""The Triton kernels behind `maps`: imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def pool_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    bias_ptr,
    y_ptr,
    place_ptr,
    height,
    width,
    rows,
    columns,
    channels,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """relu(max over a window + bias) of one place and a block of channels, and where in the window the maximum was.

    Maps are (B, H, W, channels). A place of 255 says that ReLU let nothing through. NaN wins, as in torch.
    """
    place = tl.program_id(0)
    column = place % columns
    row = (place // columns) % rows
    example = (place // (columns * rows)).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < channels
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            h, w = row * STRIDE + i, column * STRIDE + j
            offset = ((example * height + h) * width + w) * channels
            # As vectors: the interpreter makes numbers of scalar conditions.
            within = inside & (h + 0 * lanes < height) & (w + 0 * lanes < width)
            value = tl.load(x_ptr + offset + lanes, mask=within, other=float("-inf")).to(tl.float32)
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            where = tl.where(better, i * SIZE + j, where)
    best += tl.load(bias_ptr + lanes, mask=inside, other=0.0)
    off = best <= 0.0
    target = place.to(tl.int64) * channels + lanes
    tl.store(y_ptr + target, tl.where(off, 0.0, best).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(place_ptr + target, tl.where(off, 255, where).to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pool_backward_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr,
    place_ptr,
    result_ptr,
    height,
    width,
    rows,
    columns,
    channels,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each pixel gathers the gradients of the windows whose maximum it was: no two programs write the same place."""
    pixel = tl.program_id(0)
    w = pixel % width
    h = (pixel // width) % height
    example = (pixel // (width * height)).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < channels
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            down, right = h - i + 0 * lanes, w - j + 0 * lanes
            row, column = down // STRIDE, right // STRIDE
            here = inside & (down >= 0) & (right >= 0) & (down % STRIDE == 0) & (right % STRIDE == 0)
            here = here & (row < rows) & (column < columns)
            offset = ((example * rows + row) * columns + column) * channels + lanes
            chosen = tl.load(place_ptr + offset, mask=here, other=255).to(tl.int32) == i * SIZE + j
            total += tl.load(gradient_ptr + offset, mask=here & chosen, other=0.0).to(tl.float32)
    target = pixel.to(tl.int64) * channels + lanes
    tl.store(result_ptr + target, total.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def window_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    places,
    height,
    width,
    rows,
    columns,
    replicas,
    padding,
    C: tl.constexpr,
    SIDE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Windows of one replica around a block of places: (R, B*H*W, K*K*C), zeros after the last of them."""
    replica = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = place % columns
    row = (place // columns) % rows
    example = (place // (columns * rows)).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    channel = lane % C
    j = (lane // C) % SIDE
    i = lane // (C * SIDE)
    h = row[:, None] + i[None, :] - padding
    w = column[:, None] + j[None, :] - padding
    within = (h >= 0) & (h < height) & (w >= 0) & (w < width) & (i < SIDE)[None, :] & (place < places)[:, None]
    offset = ((example[:, None] * height + h) * width + w) * (replicas * C) + replica * C + channel[None, :]
    value = tl.load(x_ptr + offset, mask=within, other=0.0)
    target = (replica.to(tl.int64) * places + place[:, None]) * PADDED + lane[None, :]
    tl.store(y_ptr + target, value, mask=(place < places)[:, None] & (lane < PADDED)[None, :])
