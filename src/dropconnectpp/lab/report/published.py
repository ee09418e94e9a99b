"""What others published on sparse networks, with its source: tables and figures show it beside what was measured.

Errors are in percent on MNIST's test set. Compression is how many times fewer weights are kept; biases are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LENET_300_100, LENET_5 = "lenet-300-100", "lenet-5-caffe"
DATA = "mnist"
"""The data set of every value here."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published network."""

    network: str
    method: str
    error: float
    compression: float | None = None
    units: tuple[int, ...] = ()
    """Inputs and units left, layer by layer without the outputs, as the source counts them."""
    kind: str = ""
    """The laboratory's kind of method whose own figure this is; empty if the laboratory does not have the method."""
    remark: str = ""
    source: str


HAN = "Han et al., Learning both Weights and Connections for Efficient Neural Networks, NIPS 2015"
DNS = "Guo et al., Dynamic Network Surgery for Efficient DNNs, NIPS 2016"
SWS = "Ullrich et al., Soft Weight-Sharing for Neural Network Compression, ICLR 2017"
SPARSE_VD = "Molchanov et al., Variational Dropout Sparsifies Deep Neural Networks, ICML 2017, table of MNIST"
SBP = "Neklyudov et al., Structured Bayesian Pruning via Log-Normal Multiplicative Noise, NIPS 2017"
BAYESIAN_COMPRESSION = "Louizos et al., Bayesian Compression for Deep Learning, NIPS 2017"
L0 = "Louizos et al., Learning Sparse Neural Networks through L0 Regularization, ICLR 2018"
VIB = "Dai et al., Compressing Neural Networks using the Variational Information Bottleneck, ICML 2018"
RIGL = "Evci et al., Rigging the Lottery: Making All Tickets Winners, ICML 2020"


def _weights(network: str, *rows: tuple[str, float, float, str, str]) -> tuple[Published, ...]:
    return tuple(
        Published(network=network, method=method, error=error, compression=compression, kind=kind, source=source)
        for method, error, compression, kind, source in rows
    )


def _units(network: str, *rows: tuple[str, tuple[int, ...], float, str, str]) -> tuple[Published, ...]:
    return tuple(
        Published(network=network, method=method, error=error, units=units, kind=kind, source=source)
        for method, units, error, kind, source in rows
    )


WEIGHTS = (
    *_weights(
        LENET_300_100,
        ("Dense", 1.64, 1.0, "", SPARSE_VD),
        ("Pruning", 1.59, 12.0, "", HAN),
        ("DNS", 1.99, 56.0, "", DNS),
        ("SWS", 1.94, 23.0, "", SWS),
        ("Sparse VD", 1.92, 68.0, "sparse-vd", SPARSE_VD),
    ),
    *_weights(
        LENET_5,
        ("Dense", 0.80, 1.0, "", SPARSE_VD),
        ("Pruning", 0.77, 12.0, "", HAN),
        ("DNS", 0.91, 111.0, "", DNS),
        ("SWS", 0.97, 200.0, "", SWS),
        ("Sparse VD", 0.75, 280.0, "sparse-vd", SPARSE_VD),
    ),
)
"""Networks whose weights were removed one by one."""

UNITS = (
    *_units(
        LENET_300_100,
        ("SBP", (245, 160, 55), 1.6, "", SBP),
        ("L0", (266, 88, 33), 1.6, "l0", L0),
        ("VIB", (97, 71, 33), 1.6, "", VIB),
    ),
    Published(network=LENET_300_100, method="RigL", error=1.44, units=(408, 100, 69), remark="87% sparse", source=RIGL),
    *_units(
        LENET_5,
        ("SBP", (3, 18, 284, 283), 0.9, "", SBP),
        ("BC-GNJ", (8, 13, 88, 13), 1.0, "", BAYESIAN_COMPRESSION),
        ("BC-GHS", (5, 10, 76, 16), 1.0, "", BAYESIAN_COMPRESSION),
        ("L0", (20, 25, 45, 462), 0.9, "l0", L0),
        ("L0-sep", (9, 18, 65, 25), 1.0, "l0", L0),
    ),
)
"""Networks whose inputs, units and filters were removed whole."""


def of_network(data: str, network: str, table: Sequence[Published]) -> tuple[Published, ...]:
    """What was published for a network on a data set.

    >>> [one.method for one in of_network("mnist", "lenet-5-caffe", UNITS)]
    ['SBP', 'BC-GNJ', 'BC-GHS', 'L0', 'L0-sep']
    """
    return tuple(one for one in table if data == DATA and one.network == network)


def own_figure(data: str, network: str, kind: str) -> Published | None:
    """The published network of a method that the laboratory has too, with weights removed one by one.

    >>> own_figure("mnist", "lenet-300-100", "sparse-vd").error
    1.92
    """
    return next((one for one in of_network(data, network, WEIGHTS) if kind and one.kind == kind), None)


def reproduced(figure: Published, points: Sequence[tuple[float, float]]) -> bool:
    """Whether a method is here as good as where it was published, by its error at the published compression.

    Between two of the ``points``, each a compression and an error, the error is interpolated in the logarithm of the
    compression; beyond them it is that of the nearest. Sparser networks alone that are worse do not reproduce a figure.

    >>> sparse_vd = own_figure("mnist", "lenet-300-100", "sparse-vd")
    >>> reproduced(sparse_vd, [(50.0, 1.7), (100.0, 2.0)]), reproduced(sparse_vd, [(93.0, 2.0)])
    (True, False)
    """
    if figure.compression is None or not points:
        return False
    place, ordered = math.log(figure.compression), sorted(points)
    x, errors = [math.log(times) for times, _ in ordered], [error for _, error in ordered]
    if place <= x[0] or place >= x[-1]:
        return (errors[0] if place <= x[0] else errors[-1]) <= figure.error
    right = next(number for number, one in enumerate(x) if one > place)
    part = (place - x[right - 1]) / (x[right] - x[right - 1])
    return errors[right - 1] + part * (errors[right] - errors[right - 1]) <= figure.error
