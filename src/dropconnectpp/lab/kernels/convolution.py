"""Convolution, bias, ReLU and pool of a stack of replicas in one kernel a layer, and both gradients in one each.

The kernels are CUDA C++ (`convolution.cu`), compiled while running by the compiler that torch brings along: no other
compiler is needed. Only pooled maps go to memory. What they compute is defined by `lab.convolutions`, which also
covers all that they do not: other architectures, other cards, machines without CUDA.

Shapes: R replicas, B batch; maps are (R, B, side, side, maps) in bf16. The last layer's are planar, (maps, side, side),
in the order of the dense layer's weights.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Architecture, pooled_side

GROUP, FIRST_GROUP = 10, 9
"""Pictures whose filter gradients one block adds up, the second in the first layer. It sets the order of the sums, so
it depends on nothing; with 50 replicas of 128 pictures the blocks come out even on 132 multiprocessors."""
TURNS = 5
"""Groups of pictures that one block of the first layer takes one after the other."""
SHARED_BYTES = 113_152
"""Shared memory of a block at most: two blocks then share a multiprocessor of a large card. Small cards have less."""


@dataclass(frozen=True)
class Layer:
    """One convolution with its pool, if it has one (``pool`` is 0 if not)."""

    side: int
    inputs: int
    outputs: int
    filter: int
    pool: int
    stride: int
    pooled: int
    """Side of the maps that come out."""

    @property
    def first(self) -> bool:
        """Whether a row of a window, and a one for the bias, fit one step of the product."""
        return self.filter * self.inputs < 16

    @property
    def group(self) -> int:
        """Pictures whose filter gradients one block adds up."""
        return FIRST_GROUP if self.first else GROUP

    def turned(self) -> Layer:
        """The convolution that sends the gradient back: maps in and out change places."""
        return replace(self, inputs=self.outputs, outputs=self.inputs)


def layers_of(architecture: Architecture, channels: int, side: int) -> list[Layer] | None:
    """The convolutions of an architecture, or None where the kernels do not cover it."""
    odd = architecture.filter_size % 2 == 1 and architecture.padding == architecture.filter_size // 2
    if not odd or architecture.filter_size > 7 or architecture.pool_size > 3 or architecture.pool_stride > 3:
        return None
    layers = []
    for number, (maps, pooled) in enumerate(zip(architecture.maps, architecture.pooled, strict=True)):
        last = number == len(architecture.maps) - 1
        after = pooled_side(side, architecture.pool_size, architecture.pool_stride, architecture.ceil_mode)
        pool = (architecture.pool_size, architecture.pool_stride, after) if pooled else (0, 1, side)
        layer = Layer(side, channels, maps, architecture.filter_size, *pool)
        fits = layer.first if number == 0 else layer.inputs % 32 == 0
        if pooled == last or not fits or maps % 32 or layer.pooled < 1:
            return None
        layers.append(layer)
        channels, side = maps, layer.pooled
    return layers


# --------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launch:
    """A kernel's name, what it is compiled with, and how it is started."""

    name: str
    settings: tuple[tuple[str, int], ...]
    threads: int
    shared: int = 0
    images: int = 1
    """Pictures of a block."""
    bands: int = 1
    """Blocks that share a picture."""
    parts: int = 1
    """Blocks that share its maps."""

    def blocks(self, batch: int) -> int:
        """Along the grid's first axis."""
        return -(-batch // self.images) * self.bands


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to ``most``, or 1."""
    return max(n for n in range(1, max(most, 1) + 1) if number % n == 0)


@dataclass(frozen=True)
class _Tiles:
    """How pixels are laid out in tiles of 16; the same words as in the kernels."""

    line: int
    lines: int
    strips: int
    wide: int

    @classmethod
    def of(cls, layer: Layer) -> _Tiles:
        line = 16 if _ceil(layer.side, 8) * 8 % 16 == 0 else 8
        strips = _ceil(layer.side, line)
        return cls(line, 16 // line, strips, strips * line + layer.filter - 1)

    @property
    def across(self) -> int:
        return self.strips * self.line


def _staged(layer: Layer, tall: int, channels: int) -> int:
    """16-bit numbers of one picture's gradient that a tile of so many lines needs, as it comes."""
    if layer.pool:
        lines = min(layer.pooled, (tall - 1) // layer.stride + _ceil(layer.pool, layer.stride) + 1)
        return lines * layer.pooled * channels // 2 * 3
    return channels * layer.side**2 * 2 if layer.side**2 % 8 == 0 and layer.side**2 <= 128 else 0


def _staged_picture(layer: Layer) -> int:
    picture = layer.side**2 * layer.inputs
    return picture if picture % 8 == 0 and picture <= 4096 else 0


def _launch(name: str, layer: Layer, purpose: tuple[str, ...], **sizes: int) -> Launch:
    launching = {key: sizes.pop(key) for key in ("shared", "bands", "parts") if key in sizes}
    settings = {
        "SIDE": layer.side, "INPUTS": layer.inputs, "OUTPUTS": layer.outputs, "FILTER": layer.filter,
        "POOL": layer.pool, "STRIDE": layer.stride, "POOLED": layer.pooled,
        "BAND": 1, "IMAGES": 1, "WARPS": 8, "RESIDENT": 1, "HEIGHT": 1, "TURNS": 1, "GROUP": layer.group,
        **sizes, **dict.fromkeys(purpose, 1),
    }  # fmt: skip
    filters = name in ("filter_gradient", "first_gradient")
    images = layer.group if filters else settings["IMAGES"] * settings["TURNS"]
    return Launch(name, tuple(settings.items()), 32 * settings["WARPS"], images=images, **launching)


@cache
def forward_launch(layer: Layer, limit: int = SHARED_BYTES) -> Launch:
    """relu(pool(x * filters + bias)): `first_forward` for pictures, `forward` for maps."""
    return _product_launch("first_forward" if layer.first else "forward", layer, layer.pool, limit)


@cache
def input_launch(layer: Layer, limit: int = SHARED_BYTES) -> Launch:
    """The gradient of what came in, from that of what came out."""
    return _product_launch("input_gradient", layer.turned(), 0, limit)


def _product_launch(name: str, layer: Layer, pool: int, limit: int) -> Launch:
    tiles, height = _Tiles.of(layer), 4
    whole = layer.pooled if pool else layer.side
    for band in range(whole, 0, -1):
        rows = min((band - 1) * layer.stride + pool, layer.side) if pool else band
        groups = _ceil(_ceil(rows, tiles.lines), height)
        tall = groups * height * tiles.lines
        images = max(1, 4 // (tiles.strips * groups))
        while True:
            results = tall * tiles.across * 40
            if name == "first_forward":
                row = _ceil(tiles.wide * layer.inputs + 16, 2) * 2
                copies = 2 * (_ceil((tall + layer.filter - 1) * row + 16, 64) * 64 + 32)
                numbers = copies + results + _staged_picture(layer)
            else:
                lines = tall + layer.filter - 1
                staged = _staged(layer, lines, layer.inputs) if name == "input_gradient" else 0
                numbers = lines * tiles.wide * (layer.inputs + 8) + max(results, staged)
            shared = 2 * images * numbers
            if shared <= limit or images == 1:
                break
            images //= 2
        if shared <= limit:
            break
    jobs = images * tiles.strips * groups
    warps = min(jobs, 8)
    return _launch(
        name, layer, (name.upper(),), BAND=band, IMAGES=images, WARPS=warps, HEIGHT=height,
        TURNS=TURNS if name == "first_forward" else 1, RESIDENT=2 if warps > 4 or shared > 75_000 else 3,
        shared=shared, bands=_ceil(whole, band), parts=layer.outputs // 32,
    )  # fmt: skip


@cache
def filter_launch(layer: Layer, limit: int = SHARED_BYTES) -> Launch:
    """Partial sums of the gradients of filters and bias."""
    return (_first_gradient_launch if layer.first else _filter_gradient_launch)(layer, limit)


def _first_gradient_launch(layer: Layer, limit: int) -> Launch:
    tiles = _Tiles.of(layer)
    for height in (8 // tiles.lines, 4 // tiles.lines, 2 // tiles.lines):
        band = min(2 * height * tiles.lines, _ceil(layer.side, height * tiles.lines) * height * tiles.lines)
        plane = _ceil((band + layer.filter - 1) * tiles.wide + 8, 64) * 64 + 10
        other = layer.inputs * plane + (32 - layer.inputs * plane % 64 + 64) % 64
        tile = _ceil(2 * other, 8) * 8 + band * tiles.across * 40
        shared = 2 * (tile + _staged(layer, band, 32) + _staged_picture(layer))
        if shared <= limit:
            break
    return _launch(
        "first_gradient", layer, ("FIRST_GRADIENT",), BAND=band, HEIGHT=height, RESIDENT=3,
        WARPS=min(4, tiles.strips * band // (height * tiles.lines)), shared=max(shared, 4 * layer.filter * 32 * 16),
        parts=layer.outputs // 32,
    )  # fmt: skip


def _filter_gradient_launch(layer: Layer, limit: int) -> Launch:
    tiles = _Tiles.of(layer)
    height, images = min(16, _ceil(layer.side, 4) * 4) // tiles.lines, 0
    while True:
        band = height * tiles.lines
        images = images or _divisor(GROUP, 256 // (band * tiles.across))
        maps = 2 * (band + layer.filter - 1) * tiles.wide * 24
        shared = 2 * images * (maps + band * tiles.across * 40 + _staged(layer, band, 32))
        if shared <= limit or height == 1:
            break
        images, height = (_divisor(GROUP, images - 1), height) if images > 1 else (images, height // 2)
    return _launch(
        "filter_gradient", layer, ("FILTER_GRADIENT",), BAND=band, IMAGES=images, HEIGHT=height, WARPS=layer.filter,
        RESIDENT=2, shared=shared, parts=layer.inputs // 16 * (layer.outputs // 32),
    )  # fmt: skip


@cache
def arrange_launch(layer: Layer, turned: bool) -> Launch:
    """Filters as fragments of a product's right matrix."""
    if turned:
        return _launch("arrange", layer.turned(), ("ARRANGE", "TURNED"))
    return _launch("arrange", layer, ("ARRANGE", "FIRST") if layer.first else ("ARRANGE",))


@cache
def reduce_launch(layer: Layer) -> Launch:
    """Partial sums added up."""
    return _launch("reduce", layer, ("REDUCE", "FIRST") if layer.first else ("REDUCE",))


def fragment_words(layer: Layer) -> int:
    """32-bit words of one replica's arranged filters."""
    steps = layer.filter if layer.first else layer.filter * layer.filter * (layer.inputs // 16)
    return layer.outputs // 32 * steps * 256


def partial_numbers(layer: Layer) -> int:
    """Numbers of one block group's partial sums."""
    if layer.first:
        return layer.outputs * layer.filter * 16
    return layer.outputs * layer.inputs * layer.filter * layer.filter


# --------------------------------------------------------------------------------------------- compiling


@cache
def source() -> str:
    """The CUDA source."""
    return Path(__file__).with_name("convolution.cu").read_text()


_entered = threading.local()


def _enter(device: int) -> None:
    """Give a thread the card's context: torch compiles and starts our kernels by the driver, which gives none.

    autograd goes backward in a thread of its own, and a kernel of ours may be the first thing it does there.
    """
    if device not in (seen := _entered.__dict__.setdefault("devices", set())):
        torch.cuda.mem_get_info(device)  # any call of CUDA's runtime does it
        seen.add(device)


@cache
def _kernel(launch: Launch, device: int) -> Any:
    options = [f"-D{key}={value}" for key, value in launch.settings]
    with torch.cuda.device(device), _without_toolkit():
        kernel = torch.cuda._compile_kernel(source(), launch.name, nvcc_options=options)
        kernel.set_shared_memory_config(launch.shared)
    return kernel


@contextmanager
def _without_toolkit() -> Iterator[None]:
    """torch looks for a CUDA toolkit's headers and fails without one. Our source includes none, so any folder does."""
    from torch.utils import cpp_extension  # needs setuptools, which a machine may lack

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or str(Path(__file__).parent)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


@cache
def _limit(device: int) -> int:
    """Shared memory that a block may have on a card."""
    properties = torch.cuda.get_device_properties(device)
    return min(SHARED_BYTES, getattr(properties, "shared_memory_per_block_optin", 49_152))


@cache
def _compiles(device: int) -> bool:
    """Whether the kernels can be had on a card: bf16 products, and torch's compiler at hand."""
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    probe = Layer(8, 32, 32, 5, 3, 2, 4)
    try:
        _kernel(arrange_launch(probe, False), device)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:  # another torch, no NVRTC
        warnings.warn(f"Convolutions go through plain PyTorch: compiling their kernels failed ({error}).", stacklevel=2)
        return False
    return True


def usable(images: Tensor, architecture: Architecture) -> bool:
    """Whether pictures (R, B, C, H, W) can go through the kernels."""
    if not images.is_cuda or images.dtype != torch.bfloat16 or images.shape[3] != images.shape[4]:
        return False
    layers = layers_of(architecture, images.shape[2], images.shape[3])
    device = images.device.index
    return layers is not None and _compiles(device) and all(fits(layer, _limit(device)) for layer in layers)


def fits(layer: Layer, limit: int) -> bool:
    """Whether every kernel of a layer gets by with so many bytes of shared memory."""
    launches = [forward_launch(layer, limit), filter_launch(layer, limit)]
    return all(launch.shared <= limit for launch in launches + ([] if layer.first else [input_launch(layer, limit)]))


def _start(launch: Launch, grid: tuple[int, int, int], arguments: list[Any]) -> None:
    device = arguments[0].device.index
    _enter(device)
    kernel = _kernel(launch, device)
    kernel(grid=grid, block=(launch.threads, 1, 1), args=arguments, shared_mem=launch.shared)


# --------------------------------------------------------------------------------------- there and back


def _arranged(layer: Layer, filters: Tensor, turned: bool = False) -> Tensor:
    count = fragment_words(layer.turned() if turned else layer)
    fragments = torch.empty((len(filters), count), dtype=torch.int32, device=filters.device)
    launch = arrange_launch(layer, turned)
    _start(launch, (_ceil(count, launch.threads), len(filters), 1), [filters, fragments, count])
    return fragments


@dataclass(frozen=True)
class Passed:
    """What the way back needs of a layer: what came in, what came out, and places in the pool's windows."""

    x: Tensor
    y: Tensor
    places: Tensor


def forward(layer: Layer, x: Tensor, filters: Tensor, bias: Tensor) -> Passed:
    """x (R, B, side, side, maps) through a convolution, bias, ReLU and pool."""
    replicas, batch = x.shape[:2]
    shape = (layer.pooled, layer.pooled, layer.outputs) if layer.pool else (layer.outputs, layer.side, layer.side)
    y = torch.empty((replicas, batch, *shape), dtype=torch.bfloat16, device=x.device)
    places = torch.empty(y.shape if layer.pool else (0,), dtype=torch.uint8, device=x.device)
    launch = forward_launch(layer, _limit(x.device.index))
    rest = [_arranged(layer, filters), bias, y, places, batch]
    _start(launch, (launch.blocks(batch), replicas, launch.parts), [x, *rest] if layer.first else [x, x, *rest])
    return Passed(x, y, places)


def backward(layer: Layer, passed: Passed, gradient: Tensor, filters: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of what came in (none for pictures), of the filters and of the bias, both in float32."""
    replicas, batch = passed.x.shape[:2]
    side_input = passed.places if layer.pool else passed.y
    groups = _ceil(batch, layer.group)
    count = partial_numbers(layer)
    device = gradient.device
    partial = torch.empty((replicas, groups, count), device=device)
    by_filters, by_bias = torch.empty_like(filters), torch.empty((replicas, layer.outputs), device=device)
    limit = _limit(device.index)
    launch = filter_launch(layer, limit)
    grid = (groups, replicas, launch.parts)
    if layer.first:
        _start(launch, grid, [passed.x, gradient, side_input, partial, batch])
    else:
        bias_partial = torch.empty((replicas, groups, layer.outputs), device=device)
        _start(launch, grid, [passed.x, gradient, side_input, partial, bias_partial, batch])
        by_bias = bias_partial.sum(1)
    adding = reduce_launch(layer)
    where = (_ceil(count, adding.threads), replicas, 1)
    _start(adding, where, [partial, by_filters, by_bias, groups, count])
    if layer.first:
        return None, by_filters, by_bias
    by_x = torch.empty_like(passed.x)
    launch = input_launch(layer, limit)
    turned = _arranged(layer, filters, turned=True)
    _start(
        launch,
        (launch.blocks(batch), replicas, launch.parts),
        [gradient, side_input, turned, by_bias, by_x, passed.places, batch],
    )
    return by_x, by_filters, by_bias


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Sequence[Layer], x: Tensor, *parameters: Tensor) -> Tensor:
        filters, biases = parameters[::2], parameters[1::2]
        passed = []
        for layer, weight, bias in zip(layers, filters, biases, strict=True):
            passed.append(forward(layer, x, weight, bias))
            x = passed[-1].y
        ctx.layers = layers
        ctx.save_for_backward(*filters, *(t for p in passed for t in (p.x, p.y, p.places)))
        return x.flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.layers)
        filters, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        found: list[Tensor | None] = []
        back: Tensor | None = gradient.contiguous()
        for number in reversed(range(count)):
            assert back is not None
            passed = Passed(*saved[3 * number : 3 * number + 3])
            back, by_filters, by_bias = backward(ctx.layers[number], passed, back, filters[number])
            found = [by_filters, by_bias, *found]
        return None, None, *found


def features(images: Tensor, parameters: dict[str, Tensor], architecture: Architecture) -> Tensor:
    """`convolutions.features` of pictures that are `usable`: (R, B, C, H, W) in bf16 to (R, B, maps * side * side)."""
    layers = layers_of(architecture, images.shape[2], images.shape[3])
    assert layers is not None
    values = [parameters[f"conv{n}.{kind}"] for n in range(len(layers)) for kind in ("weight", "bias")]
    x = images.permute(0, 1, 3, 4, 2).contiguous()
    result: Tensor = _Features.apply(layers, x, *values)  # type: ignore[no-untyped-call]
    return result
