"""The layers of one step whose kernels work out KL and score beside the masks, and the bound that is made of them.

Such a layer costs a launch forward and one backward, as a plain layer costs the casts of its parameters; the bound of
all of them costs one more. Every other layer's KL and score are worked out by `posterior` and `score_gradient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.estimators import BBVI, Estimator, StraightThrough
from dropconnectpp.inference.score_gradient import prefix_of
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.passes import BinaryGates, DrawnGates
from dropconnectpp.layers.sampling import Sample
from dropconnectpp.ops import gpu, gpu_gates
from dropconnectpp.ops.drawn import transformed
from dropconnectpp.ops.gpu_gates import Table, Tally

_MOST_TABLES = 8
"""Tables of one bound that are kept: a model in training needs one."""


@dataclass(frozen=True)
class Settled:
    """What the layers of a ledger say of the bound; no gradient but the loss's."""

    loss: Tensor
    elbo: Tensor
    log_likelihood: Tensor
    kl: Tensor


@dataclass(eq=False)
class Ledger:
    """One step's tallies, by the layers' names."""

    tallies: dict[str, Tally]
    layers: dict[str, DropConnectPPLayer]
    partial: Tensor
    coefficients: Tensor
    scale: float
    """What multiplies every layer's KL, before the layer's own weight."""
    fresh: dict[str, Tensor] = field(default_factory=dict)
    """What the running moments become, where `settle` did not move them."""

    def counted(self) -> list[str]:
        """The layers that a pass has used."""
        return [name for name, tally in self.tallies.items() if tally.used]

    def settle(
        self,
        rewards: Tensor,
        moments: Mapping[str, Tensor | None],
        num_data: int,
        in_place: bool,
        tables: dict[Any, Table],
    ) -> Settled:
        """The bound of the layers that were used, from the log-likelihoods (L, A, B) of the examples."""
        names = self.counted()
        table = self._table(names, moments, tables)
        anchors = [self._taken(name) for name in names]
        work = _Work(self, table, num_data, in_place)
        loss, elbo, log_likelihood, kl = _Settle.apply(rewards, work, *anchors)  # type: ignore[no-untyped-call]
        if not in_place:
            rows = work.moments.unbind()
            moved = [
                (prefix_of(n) + "layer", row) for n, row in zip(names, rows, strict=True) if self.tallies[n].scored
            ]
            self.fresh = dict(moved)
        return Settled(loss, elbo, log_likelihood, kl)

    def _taken(self, name: str) -> Tensor | None:
        """A layer's anchor, which its tally lets go: the launch holds the tally, and a ring would keep the graph."""
        tally = self.tallies[name]
        anchor, tally.anchor = tally.anchor, None
        return anchor

    def _table(self, names: list[str], moments: Mapping[str, Tensor | None], tables: dict[Any, Table]) -> Table:
        rows: list[tuple[int, int, int, int]] = []
        shares: list[tuple[float, float]] = []
        for name in names:
            layer, tally = self.layers[name], self.tallies[name]
            address, decay = 0, 0.0
            if tally.scored:
                known, estimator = moments[prefix_of(name) + "layer"], layer.estimator
                assert known is not None
                assert isinstance(estimator, BBVI)
                address, decay = known.data_ptr(), estimator.decay
            rows.append((tally.place, tally.programs, address, tally.index))
            shares.append((layer.kl_weight, decay))
        key = (self.partial.device, tuple(rows), tuple(shares))
        table = tables.get(key)
        if table is None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return _filled(rows, shares, self.partial.device)
        if table is None:
            device = self.partial.device
            table = Table(torch.tensor(rows, device=device), torch.tensor(shares, device=device))
            while len(tables) >= _MOST_TABLES:
                tables.pop(next(iter(tables)))
            tables[key] = table
        return table


def _filled(rows: list[tuple[int, int, int, int]], shares: list[tuple[float, float]], device: torch.device) -> Table:
    """A table that is written on the device: a CUDA graph that is being captured takes no copies from the host."""
    table = Table(
        torch.empty((len(rows), 4), dtype=torch.int64, device=device), torch.empty((len(rows), 2), device=device)
    )
    for tensor, values in ((table.rows, rows), (table.shares, shares)):
        for place, value in zip(tensor.view(-1).unbind(), (v for row in values for v in row), strict=True):
            place.fill_(value)
    return table


def open_ledger(
    layers: Mapping[str, DropConnectPPLayer], samples: list[Sample], moments: Mapping[str, Tensor | None], scale: float
) -> Ledger | None:
    """Give every layer whose kernels can do it a tally in this step; None where there is no such layer."""
    if len(samples) > 1 or len(samples[0].arms) > 1 or not torch.is_grad_enabled() or transformed():
        return None
    gates = samples[0].arms[0]
    found: dict[str, tuple[DropConnectPPLayer, BinaryGates, int]] = {}
    drawn = [given for given in gates.values() if isinstance(given, DrawnGates)]
    shared = Counter(stream for given in drawn for stream in given.streams.values())
    device: torch.device | None = None
    for name, layer in layers.items():
        given = gates.get(layer)
        if type(given) is not BinaryGates or given.each_example or given.draw.seed is None:
            continue
        if any(shared[stream] > 1 for stream in given.streams.values()) or not _has_moments(layer, name, moments):
            continue
        programs = _programs(layer)
        if programs and device in (None, layer.weight.device):
            device = layer.weight.device
            found[name] = layer, given, programs
    if device is None:
        return None
    partial = torch.empty(2 * sum(programs for *_, programs in found.values()), device=device)
    coefficients = torch.empty(len(found), device=device)
    tallies: dict[str, Tally] = {}
    place = 0
    for index, (name, (layer, given, programs)) in enumerate(found.items()):
        own = scale * layer.kl_weight
        tally = Tally(layer.prior, layer.estimator.scores, own, partial, place, programs, coefficients, index)
        tallies[name] = tally
        place += 2 * programs
        gates[layer] = BinaryGates(given.draw, given.streams, tally=tally)
    return Ledger(tallies, {name: layer for name, (layer, *_) in found.items()}, partial, coefficients, scale)


def _programs(layer: DropConnectPPLayer) -> int:
    """How many programs the launch of a layer has that can work out its KL and score; 0 for any other layer.

    It has one gate a synapse, a known q(pi), and lies on a GPU.
    """
    if layer.tiling is not None or layer.parameterisation != "logit" or not takes_one_number(layer.estimator):
        return 0
    names = layer.synapse_names
    weight = layer.parameter("weight")
    if not gpu.supported(weight) or gpu.kl_numbers(layer.prior) is None:
        return 0
    parameters = [layer.parameter(name) for name in names]
    logits = [layer.gate_parameter(name) for name in names]
    ordinary = all(type(tensor) in (torch.nn.Parameter, Tensor) for tensor in (*parameters, *logits))
    if not ordinary or not gpu.supported(*parameters, *logits):
        return 0
    if any(logit.dtype != torch.float32 for logit in logits) or any(p.dtype != weight.dtype for p in parameters):
        return 0
    return gpu_gates.programs([parameter.numel() for parameter in parameters])


def takes_one_number(estimator: Estimator) -> bool:
    """Whether all that a layer's score needs of the rewards is their mean, or nothing."""
    if type(estimator) is BBVI:
        return estimator.baseline == "running" and not estimator.per_synapse
    return type(estimator) is StraightThrough


def _has_moments(layer: DropConnectPPLayer, name: str, moments: Mapping[str, Tensor | None]) -> bool:
    if not layer.estimator.scores:
        return True
    known = moments.get(prefix_of(name) + "layer")
    return known is not None and gpu.supported(known, layer.weight) and known.dtype == torch.float32


class _Work:
    """What `_Settle` needs beside tensors, and the moments that it leaves."""

    def __init__(self, ledger: Ledger, table: Table, num_data: int, in_place: bool) -> None:
        self.ledger, self.table, self.num_data, self.in_place = ledger, table, num_data, in_place
        self.moments = ledger.partial


class _Settle(torch.autograd.Function):
    """The bound of rewards and tallies; the anchors take the loss's gradient to the layers' launches."""

    @staticmethod
    def forward(ctx: Any, rewards: Tensor, work: _Work, *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.shape, ctx.device, ctx.count = rewards.shape, rewards.device, len(anchors)
        ledger = work.ledger
        reward = rewards.mean(dtype=torch.float32).to(ledger.partial.device)
        found, work.moments = gpu_gates.settle(
            work.table,
            ledger.partial,
            reward,
            ledger.coefficients,
            scale=ledger.scale,
            num_data=work.num_data,
            in_place=work.in_place,
        )
        ctx.mark_non_differentiable(*found[1:])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_reward = (upstream * (-1.0 / ctx.shape.numel())).to(ctx.device).expand(ctx.shape)
        return by_reward, None, *[upstream] * ctx.count
