"""Networks as lists of layers: what each layer is, the networks known by name, and the sizes of maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dropconnectpp.lab.config.settings import check_fields, require

LayerKind = Literal["convolution", "pool", "dense", "activation"]
Activation = Literal["relu", "tanh"]
NetworkName = Literal[
    "paper", "lenet-300-100", "lenet-5-caffe", "paper-dense", "paper-dense-512", "paper-gated", "layers"
]

USED: dict[str, set[str]] = {
    "convolution": {"units", "size", "stride", "padding", "gated"},
    "pool": {"size", "stride", "ceil_mode"},
    "dense": {"units", "gated"},
    "activation": {"function"},
}
"""The settings of each kind of layer."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a network."""

    kind: LayerKind
    units: int | None = None
    """Maps of a convolution, units of a dense layer. None, for the last layer: as many as there are classes."""
    size: int | None = None
    """Side of a filter, or of a pool's window."""
    stride: int | None = None
    """None: 1 for a convolution, a pool's own size."""
    padding: int = 0
    ceil_mode: bool = False
    """Whether a pool's window may stick out at the edge."""
    function: Activation = "relu"
    gated: bool = False
    """Whether its weights can be switched off: what a method does, it does to these. Biases are never gated."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("units", "size", "stride"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}.")
        require(self.padding >= 0, f"padding must not be negative, got {self.padding}.")
        if self.kind in ("convolution", "pool"):
            require(self.size is not None, f"a {self.kind} needs a size.")
        if self.kind == "convolution":
            require(self.units is not None, "a convolution needs units, its number of maps.")
        for name, default in (("units", None), ("size", None), ("stride", None), ("padding", 0), ("ceil_mode", False),
                              ("function", "relu"), ("gated", False)):  # fmt: skip
            if name not in USED[self.kind] and getattr(self, name) != default:
                require(False, f"{name} = {getattr(self, name)!r} does nothing for a layer of kind {self.kind!r}.")

    @property
    def step(self) -> int:
        """Places from one window to the next."""
        return self.stride or (self.size or 1 if self.kind == "pool" else 1)


def _dense(units: int | None = None) -> Layer:
    return Layer(kind="dense", units=units, gated=True)


def _convolution(units: int) -> Layer:
    return Layer(kind="convolution", units=units, size=5, gated=True)


_RELU, _POOL = Layer(kind="activation"), Layer(kind="pool", size=2)


def _paper(hidden: int, *, gated: bool) -> tuple[Layer, ...]:
    """The paper's network, with gates on its dense layer alone or on all layers."""
    maps = [Layer(kind="convolution", units=count, size=5, padding=2, gated=gated) for count in (32, 32, 64)]
    pool = Layer(kind="pool", size=3, stride=2, ceil_mode=True)
    last = Layer(kind="dense", gated=gated)
    return (maps[0], pool, _RELU, maps[1], pool, _RELU, maps[2], _RELU, _dense(hidden), _RELU, last)


NETWORKS: dict[str, tuple[Layer, ...]] = {
    "lenet-300-100": (_dense(300), _RELU, _dense(100), _RELU, _dense()),
    "lenet-5-caffe": (_convolution(20), _POOL, _RELU, _convolution(50), _POOL, _RELU, _dense(500), _RELU, _dense()),
    "paper-dense": _paper(64, gated=False),
    "paper-dense-512": _paper(512, gated=False),
    "paper-gated": _paper(64, gated=True),
}
"""The field's usual networks for comparing sparse training, gates on every layer, and the paper's with gates on its
dense layer of 64 or 512 units or on every layer. ReLU after the pool, where it is the same and there is less of it;
Caffe's own LeNet-5 has none after its convolutions, Sparse VD's has."""


@dataclass(frozen=True)
class WeightLayer:
    """A layer with weights, its sizes known: maps or features in and out, and the square maps' sides."""

    name: str
    layer: Layer
    inputs: int
    """Maps in, or features."""
    units: int
    side_in: int
    side_out: int
    """1 for a dense layer."""

    @property
    def convolution(self) -> bool:
        return self.layer.kind == "convolution"

    @property
    def fan_in(self) -> int:
        """Weights of one unit."""
        return self.inputs * (self.layer.size or 1) ** 2

    @property
    def fan_out(self) -> int:
        """Weights that an input reaches, as Glorot counts."""
        return self.units * (self.layer.size or 1) ** 2

    @property
    def weights(self) -> int:
        return self.fan_in * self.units


@dataclass(frozen=True)
class LayeredShape:
    """A list of layers for images of a size and a number of classes; raises where they do not fit each other."""

    layers: tuple[Layer, ...]
    channels: int
    side: int
    classes: int

    def __post_init__(self) -> None:
        self.weight_layers()

    def weight_layers(self) -> tuple[WeightLayer, ...]:
        """The layers with weights, in order.

        >>> lenet = LayeredShape(NETWORKS["lenet-5-caffe"], 1, 28, 10)
        >>> [(one.name, one.fan_in, one.units) for one in lenet.weight_layers()]
        [('conv0', 25, 20), ('conv1', 500, 50), ('dense2', 800, 500), ('dense3', 500, 10)]
        """
        found: list[WeightLayer] = []
        channels, side, flat = self.channels, self.side, False
        for number, layer in enumerate(self.layers):
            if layer.kind == "activation":
                continue
            if layer.kind == "dense":
                inputs = channels * side**2
                last = number == len(self.layers) - 1
                require(layer.units is not None or last, "only the last layer may leave out its units.")
                channels, before, side, flat = layer.units or self.classes, side, 1, True
                found.append(WeightLayer(f"dense{len(found)}", layer, inputs, channels, before, 1))
                continue
            require(not flat, f"a {layer.kind} cannot follow a dense layer.")
            after = side_after(layer, side)
            require(after >= 1, f"the images are too small for this network: a map would have side {after}.")
            if layer.kind == "convolution":
                assert layer.units is not None
                found.append(WeightLayer(f"conv{len(found)}", layer, channels, layer.units, side, after))
                channels = layer.units
            side = after
        require(
            bool(found) and self.layers[-1].kind == "dense" and channels == self.classes,
            f"the last layer must be dense with {self.classes} units, one for each class, or leave units out.",
        )
        return tuple(found)

    @property
    def weights(self) -> int:
        """All weights, gated or not."""
        return sum(one.weights for one in self.weight_layers())

    @property
    def biases(self) -> int:
        return sum(one.units for one in self.weight_layers())


def side_after(layer: Layer, side: int) -> int:
    """The side of a square map after a convolution or a pool."""
    size = layer.size or 1
    if layer.kind == "convolution":
        return (side + 2 * layer.padding - size) // layer.step + 1
    if side < size:
        return 0
    steps, rest = divmod(side - size, layer.step)
    return steps + 1 + int(rest > 0 and layer.ceil_mode and (steps + 1) * layer.step < side)
