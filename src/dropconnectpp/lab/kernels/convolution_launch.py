"""How the convolution's CUDA kernels are launched: which layers they take, what they are compiled with, their grids.

Everything here is arithmetic on sizes, the same as in `convolution.cu`; `convolution` compiles and starts the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from dropconnectpp.lab.config.protocol import Architecture, pooled_side

GROUP, FIRST_GROUP = 10, 9
"""Images whose filter gradients one block adds up; the second is the first layer's. They set the order of the sums, so
they depend on nothing. With 50 replicas of 128 images each of 132 multiprocessors has the same number of blocks."""
TURNS = 5
"""Groups of images that one block of the first layer takes one after the other."""
SHARED_BYTES = 113_152
"""The most shared memory of a block: two blocks then share a multiprocessor of a large card. Small cards have less."""


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
    """Side of the output maps."""

    @property
    def first(self) -> bool:
        """Whether a row of a window, and a one for the bias, fit one step of the product."""
        return self.filter * self.inputs < 16

    @property
    def group(self) -> int:
        """Images whose filter gradients one block adds up."""
        return FIRST_GROUP if self.first else GROUP

    def turned(self) -> Layer:
        """The convolution that sends the gradient back: input and output maps change places."""
        return replace(self, inputs=self.outputs, outputs=self.inputs)


def layers_of(architecture: Architecture, channels: int, side: int) -> list[Layer] | None:
    """The convolutions of an architecture, or None where the kernels do not support it."""
    odd = architecture.filter_size % 2 == 1 and architecture.padding == architecture.filter_size // 2
    if not odd or architecture.filter_size > 7 or architecture.pool_size > 3 or architecture.pool_stride > 3:
        return None
    layers = []
    for number, (maps, pooled) in enumerate(zip(architecture.maps, architecture.pooled, strict=True)):
        last = number == len(architecture.maps) - 1
        after = pooled_side(side, architecture.pool_size, architecture.pool_stride, architecture.ceil_mode)
        pool = (architecture.pool_size, architecture.pool_stride, after) if pooled else (0, 1, side)
        layer = Layer(side, channels, maps, architecture.filter_size, *pool)
        fitting = layer.first if number == 0 else layer.inputs % 32 == 0
        if pooled == last or not fitting or maps % 32 or layer.pooled < 1:
            return None
        layers.append(layer)
        channels, side = maps, layer.pooled
    return layers


# -------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class CudaLaunch:
    """A kernel's name, what it is compiled with, and how it is started."""

    name: str
    settings: tuple[tuple[str, int], ...]
    threads: int
    shared: int = 0
    images: int = 1
    """Images of a block."""
    bands: int = 1
    """Blocks that share an image."""
    parts: int = 1
    """Blocks that share its output maps."""

    def blocks(self, batch: int) -> int:
        """Along the grid's first axis."""
        return -(-batch // self.images) * self.bands


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
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
        line = 16 if ceil_div(layer.side, 8) * 8 % 16 == 0 else 8
        strips = ceil_div(layer.side, line)
        return cls(line, 16 // line, strips, strips * line + layer.filter - 1)

    @property
    def across(self) -> int:
        return self.strips * self.line


def _staged(layer: Layer, tall: int, channels: int) -> int:
    """16-bit numbers of one image's gradient, as it comes, that a tile of so many lines needs."""
    if layer.pool:
        lines = min(layer.pooled, (tall - 1) // layer.stride + ceil_div(layer.pool, layer.stride) + 1)
        return lines * layer.pooled * channels // 2 * 3
    return channels * layer.side**2 * 2 if layer.side**2 % 8 == 0 and layer.side**2 <= 128 else 0


def _staged_image(layer: Layer) -> int:
    numbers = layer.side**2 * layer.inputs
    return numbers if numbers % 8 == 0 and numbers <= 4096 else 0


def _launch(name: str, layer: Layer, purpose: tuple[str, ...], **sizes: int) -> CudaLaunch:
    launching = {key: sizes.pop(key) for key in ("shared", "bands", "parts") if key in sizes}
    settings = {
        "SIDE": layer.side, "INPUTS": layer.inputs, "OUTPUTS": layer.outputs, "FILTER": layer.filter,
        "POOL": layer.pool, "STRIDE": layer.stride, "POOLED": layer.pooled,
        "BAND": 1, "IMAGES": 1, "WARPS": 8, "RESIDENT": 1, "HEIGHT": 1, "TURNS": 1, "GROUP": layer.group,
        **sizes, **dict.fromkeys(purpose, 1),
    }  # fmt: skip
    filters = name in ("filter_gradient", "first_gradient")
    images = layer.group if filters else settings["IMAGES"] * settings["TURNS"]
    return CudaLaunch(name, tuple(settings.items()), 32 * settings["WARPS"], images=images, **launching)


@cache
def forward_launch(layer: Layer, limit: int = SHARED_BYTES) -> CudaLaunch:
    """relu(pool(x * filters + bias)): `first_forward` for images, `forward` for maps."""
    return _product_launch("first_forward" if layer.first else "forward", layer, layer.pool, limit)


@cache
def input_launch(layer: Layer, limit: int = SHARED_BYTES) -> CudaLaunch:
    """The gradient by the input, from that by the output."""
    return _product_launch("input_gradient", layer.turned(), 0, limit)


def _product_launch(name: str, layer: Layer, pool: int, limit: int) -> CudaLaunch:
    tiles, height = _Tiles.of(layer), 4
    whole = layer.pooled if pool else layer.side
    for band in range(whole, 0, -1):
        rows = min((band - 1) * layer.stride + pool, layer.side) if pool else band
        groups = ceil_div(ceil_div(rows, tiles.lines), height)
        tall = groups * height * tiles.lines
        images = max(1, 4 // (tiles.strips * groups))
        while True:
            results = tall * tiles.across * 40
            if name == "first_forward":
                row = ceil_div(tiles.wide * layer.inputs + 16, 2) * 2
                copies = 2 * (ceil_div((tall + layer.filter - 1) * row + 16, 64) * 64 + 32)
                numbers = copies + results + _staged_image(layer)
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
        shared=shared, bands=ceil_div(whole, band), parts=layer.outputs // 32,
    )  # fmt: skip


@cache
def filter_launch(layer: Layer, limit: int = SHARED_BYTES) -> CudaLaunch:
    """Partial sums of the gradients by filters and bias."""
    return (_first_gradient_launch if layer.first else _filter_gradient_launch)(layer, limit)


def _first_gradient_launch(layer: Layer, limit: int) -> CudaLaunch:
    tiles = _Tiles.of(layer)
    for height in (8 // tiles.lines, 4 // tiles.lines, 2 // tiles.lines):
        band = min(2 * height * tiles.lines, ceil_div(layer.side, height * tiles.lines) * height * tiles.lines)
        plane = ceil_div((band + layer.filter - 1) * tiles.wide + 8, 64) * 64 + 10
        other = layer.inputs * plane + (32 - layer.inputs * plane % 64 + 64) % 64
        tile = ceil_div(2 * other, 8) * 8 + band * tiles.across * 40
        shared = 2 * (tile + _staged(layer, band, 32) + _staged_image(layer))
        if shared <= limit:
            break
    return _launch(
        "first_gradient", layer, ("FIRST_GRADIENT",), BAND=band, HEIGHT=height, RESIDENT=3,
        WARPS=min(4, tiles.strips * band // (height * tiles.lines)), shared=max(shared, 4 * layer.filter * 32 * 16),
        parts=layer.outputs // 32,
    )  # fmt: skip


def _filter_gradient_launch(layer: Layer, limit: int) -> CudaLaunch:
    tiles = _Tiles.of(layer)
    height, images = min(16, ceil_div(layer.side, 4) * 4) // tiles.lines, 0
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
def arrange_launch(layer: Layer, turned: bool) -> CudaLaunch:
    """Filters as fragments of a product's right matrix."""
    if turned:
        return _launch("arrange", layer.turned(), ("ARRANGE", "TURNED"))
    return _launch("arrange", layer, ("ARRANGE", "FIRST") if layer.first else ("ARRANGE",))


@cache
def reduce_launch(layer: Layer) -> CudaLaunch:
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


def layer_supported(layer: Layer, limit: int) -> bool:
    """Whether no kernel of a layer needs more than ``limit`` bytes of shared memory."""
    launches = [forward_launch(layer, limit), filter_launch(layer, limit)]
    return all(launch.shared <= limit for launch in launches + ([] if layer.first else [input_launch(layer, limit)]))
