"""Tiny networks with gates for groups of synapses: the oracle of the exact tests, group by group.

Which gate a synapse has is worked out here place by place, apart from the library's own blocks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, kl_divergence

import dropconnectpp as dcpp
from dropconnectpp.layers.base import masked_layers
from exact_cases import NETWORKS, Case, outcomes

Linear, Conv1d, Conv2d = dcpp.DropConnectPPLinear, dcpp.DropConnectPPConv1d, dcpp.DropConnectPPConv2d

GROUPED: dict[str, Any] = {
    "linear, no bias": (
        lambda **o: nn.Sequential(Linear(2, 2, bias=False, **o), nn.Tanh(), nn.Linear(2, 3)),
        lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 3)),
        (2, 2),
    ),
    "wide": (
        lambda **o: nn.Sequential(Linear(4, 2, bias=False, **o), nn.Tanh(), nn.Linear(2, 3)),
        lambda: nn.Sequential(nn.Linear(4, 2, bias=False), nn.Tanh(), nn.Linear(2, 3)),
        (2, 4),
    ),
    "two channels": (
        lambda **o: nn.Sequential(Conv1d(2, 2, 2, bias=False, **o), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Conv1d(2, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)),
        (2, 2, 3),
    ),
    "two groups": (
        lambda **o: nn.Sequential(Conv1d(4, 2, 2, groups=2, bias=False, **o), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Conv1d(4, 2, 2, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2)),
        (2, 4, 3),
    ),
}
NETWORKS |= GROUPED


def member(shape: torch.Size, granularity: Any, groups: int = 1) -> list[Any]:
    """For each weight, in order, a key that is the same for all that share its gate."""
    keys = []
    for place in itertools.product(*map(range, shape)):
        out, column, *kernel = place
        if granularity == "input":  # the channel itself: each group of outputs reads channels of its own
            keys.append(out // (shape[0] // groups) * shape[1] + column)
        elif granularity == "unit":
            keys.append(out)
        elif granularity == "kernel":
            keys.append((out, column))
        elif granularity == "synapse":
            keys.append(place)
        else:
            sizes = granularity if len(granularity) == len(shape) else (*granularity, *shape[2:])
            keys.append(tuple(at // size for at, size in zip((out, column, *kernel), sizes, strict=True)))
    return keys


def membership(layer: Any, name: str) -> Tensor:
    """(G, n): which of a parameter's synapses each gate has, in the order in which its gate parameter is laid out."""
    if name == "bias":
        return torch.eye(layer.bias.numel(), dtype=torch.float64)
    keys = member(layer.weight.shape, layer.granularity, getattr(layer, "groups", 1))
    order = list(dict.fromkeys(keys))
    order.sort()
    return F.one_hot(torch.tensor([order.index(key) for key in keys])).T.double()


@dataclass
class GroupCase(Case):
    """A `Case` whose masks are enumerated gate by gate."""

    def _gates(self) -> list[tuple[str, Any, str]]:
        """Each gated parameter once: its layer's name, the layer, and its name there."""
        found: dict[Any, tuple[str, Any, str]] = {}
        for owner, layer in masked_layers(self.model).items():
            units = layer.granularity == "unit"
            for name in ("weight",) if units or layer.bias is None else ("weight", "bias"):
                found.setdefault(id(self._parameter(layer, name)), (owner, layer, name))
        return list(found.values())

    @staticmethod
    def _parameter(layer: Any, name: str) -> nn.Parameter:
        return getattr(layer, f"{name}_{layer.parameterisation}")

    def _pi(self, layer: Any, name: str) -> Tensor:
        value = self._parameter(layer, name).flatten()
        return value if layer.parameterisation == "probability" else torch.sigmoid(value)

    def _kept(self, layer: Any, name: str) -> Tensor:
        """Which gates have any synapse left."""
        kept = getattr(layer, f"{name}_kept")
        found = (
            torch.ones(len(membership(layer, name)))
            if kept is None
            else membership(layer, name) @ kept.flatten().double()
        )
        return (found > 0).double()

    def _masks(self, bits: list[Tensor]) -> dict[str, Tensor]:
        """What every parameter's mask is, for gates (*, G) in the order of `_gates`, by its name in the model."""
        masks: dict[str, Tensor] = {}
        for (_, first, own), z in zip(self._gates(), bits, strict=True):
            for owner, layer in masked_layers(self.model).items():
                for name in layer.synapse_names:
                    gated_by = "weight" if layer.granularity == "unit" else name
                    if gated_by != own or self._parameter(layer, gated_by) is not self._parameter(first, own):
                        continue
                    value = getattr(layer, name)
                    spread = z if name == "bias" else z.double() @ membership(layer, name)
                    masks[f"{owner}.{name}"] = spread.reshape(*z.shape[:-1], *value.shape).to(z.dtype)
        return masks

    def gated_log_likelihood(self, masks: dict[str, Tensor]) -> Tensor:
        weights = {name: p for name, p in self.parameters.items() if name in self.plain.state_dict()}
        for key, mask in masks.items():
            owner, _, name = key.rpartition(".")
            layer = self.model.get_submodule(owner)
            kept = getattr(layer, f"{name}_kept")
            weights[key] = getattr(layer, name) * mask * (1.0 if kept is None else kept)
        output = torch.func.functional_call(self.plain, weights, self.x, tie_weights=False)
        likelihood = self.likelihood
        if likelihood is dcpp.categorical:
            return F.log_softmax(output, 1).gather(1, self.y[:, None])[:, 0].mean()
        return likelihood(output, self.y).mean()

    def expected_log_likelihood(self) -> Tensor:
        pis = [self._pi(layer, name) for _, layer, name in self._gates()]
        total = torch.zeros((), dtype=torch.float64)
        for flat in itertools.product((0.0, 1.0), repeat=sum(pi.numel() for pi in pis)):
            bits = torch.tensor(flat, dtype=torch.float64).split([pi.numel() for pi in pis])
            q = torch.stack([(z * pi + (1 - z) * (1 - pi)).prod() for z, pi in zip(bits, pis, strict=True)]).prod()
            total = total + q * self.gated_log_likelihood(self._masks(list(bits)))
        return total

    def kl(self, weighted: bool = False) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for _, layer, name in self._gates():
            total = total + (layer.kl_weight if weighted else 1.0) * self._divergence(layer, name)
        return total

    def _divergence(self, layer: Any, name: str) -> Tensor:
        """KL of the gates by torch.distributions, each once."""
        pi, kept = self._pi(layer, name), self._kept(layer, name)
        prior = Beta(*torch.tensor([layer.alpha, layer.beta], dtype=torch.float64))
        if layer.hyper == "marginal":
            return (kept * kl_divergence(Bernoulli(pi), Bernoulli(prior.mean))).sum()
        shared = layer.sharing == "layer"
        together = torch.ones(1, len(pi), dtype=torch.float64) if shared else torch.eye(len(pi), dtype=torch.float64)
        together = together * kept
        if layer.hyper == "learned":
            a, b = (F.softplus(getattr(layer, f"{name}_{s}")).flatten() for s in ("alpha", "beta"))
        else:
            a, b = layer.alpha + together @ pi, layer.beta + together @ (1 - pi)
        some = together.sum(1).clamp(max=1)
        log_pi, log_rest = (together.T @ (torch.digamma(v) - torch.digamma(a + b)) for v in (a, b))
        gates = kept * (Bernoulli(pi).entropy() + pi * log_pi + (1 - pi) * log_rest)
        return (some * kl_divergence(Beta(a, b), prior)).sum() - gates.sum()

    def draws(self) -> list[tuple[float, list[dict[str, Tensor]]]]:
        gates, sizes = [], []
        for _, layer, name in self._gates():
            pi = self._pi(layer, name).detach()
            rows = len(self.x) if layer.mask == "example" else 1
            sizes.append((layer.mask == "example", rows, len(pi)))
            gates += [outcomes(p, self.arms, layer.antithetic) for p in pi.tolist() * rows]
        found = []
        for combination in itertools.product(*gates):
            passes = []
            for arm in range(self.arms):
                flat = torch.tensor([z[arm] for _, z in combination]).split([rows * n for _, rows, n in sizes])
                bits = [z.view(rows, n) if each else z for z, (each, rows, n) in zip(flat, sizes, strict=True)]
                passes.append(self._masks(bits))
            found.append((math.prod(p for p, _ in combination), passes))
        return found
