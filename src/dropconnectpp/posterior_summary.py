"""What was learned: keep probabilities read out layer by layer, shown as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.inference.divergence import named_kl
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer


@dataclass(frozen=True)
class ParameterPosterior:
    """The posterior of one parameter's synapses, detached; every tensor has the parameter's shape."""

    keep_probability: Tensor  # pi~ of Eq. (13), 0 where pruned
    alpha: Tensor  # alpha~ of Eq. (14)
    beta: Tensor  # beta~ of Eq. (14)
    entropy: Tensor  # of q(z) in nats, 0 where pruned
    kept: Tensor  # bool, False where pruned


@dataclass(frozen=True)
class LayerPosterior:
    """The posterior of one layer."""

    weight: ParameterPosterior
    bias: ParameterPosterior | None
    kl: float  # nats

    @property
    def parts(self) -> list[ParameterPosterior]:
        """Weight and, where there is one, bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def flat(self, field: str) -> Tensor:
        """One field of all the layer's synapses, weights first, as a vector."""
        return torch.cat([getattr(part, field).flatten() for part in self.parts])


class Posterior:
    """The learned connectivity of a model: a mapping from layer names to `LayerPosterior`."""

    def __init__(self, layers: dict[str, LayerPosterior]) -> None:
        self.layers = layers

    def __getitem__(self, name: str) -> LayerPosterior:
        if name not in self.layers:
            raise KeyError(f"no DropConnect++ layer {name!r}; there are: {', '.join(self.layers)}")
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def num_synapses(self) -> int:
        """Weights and biases together, pruned ones included."""
        return sum(layer.flat("kept").numel() for layer in self.layers.values())

    def keep_probability(self) -> Tensor:
        """pi~ of every synapse of every layer, as one vector on the CPU."""
        return torch.cat([layer.flat("keep_probability").cpu() for layer in self.layers.values()])

    def histogram(self, bins: int = 20) -> tuple[Tensor, Tensor]:
        """Counts (bins,) of pi~ over the whole model and the bins' edges (bins + 1,) from 0 to 1."""
        check_count("bins", bins)
        values = self.keep_probability().double()
        counts = torch.histc(values, bins=bins, min=0.0, max=1.0)
        return counts.long(), torch.linspace(0, 1, bins + 1, dtype=torch.float64)

    def summary(self) -> str:
        """A table a person reads: one row a layer, and the shares that the paper's Figure 1(b) counts."""
        header = ["layer", "synapses", "kept", "mean", "std", "<0.35", "0.4-0.6", ">0.6", "entropy", "KL/nats"]
        rows = [self._row(name or "(model)", [layer], layer.kl) for name, layer in self.layers.items()]
        if len(rows) > 1:
            total = sum(layer.kl for layer in self.layers.values())
            rows.append(self._row("all", list(self.layers.values()), total))
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [header, *rows]
        ]
        bar = self._bar()
        return "\n".join([*lines, "", f"keep probability  0 {bar} 1"])

    def _row(self, name: str, layers: list[LayerPosterior], kl: float) -> list[str]:
        kept = torch.cat([layer.flat("kept").cpu() for layer in layers])
        pi = torch.cat([layer.flat("keep_probability").cpu() for layer in layers]).double()[kept]
        entropy = torch.cat([layer.flat("entropy").cpu() for layer in layers]).double()[kept]
        if pi.numel() == 0:
            return [name, f"{kept.numel():,}", "0.0%", *["-"] * 7]
        shares = [(pi < 0.35), (pi >= 0.4) & (pi <= 0.6), (pi > 0.6)]
        return [
            name,
            f"{kept.numel():,}",
            f"{kept.double().mean():.1%}",
            f"{pi.mean():.3f}",
            f"{pi.std(unbiased=False):.3f}",
            *(f"{share.double().mean():.1%}" for share in shares),
            f"{entropy.mean():.3f}",
            f"{kl:,.1f}",
        ]

    def _bar(self) -> str:
        counts, _ = self.histogram(40)
        blocks = " ▁▂▃▄▅▆▇█"
        top = max(int(counts.max()), 1)
        return "".join(blocks[-(-int(c) * (len(blocks) - 1) // top)] for c in counts)

    def __repr__(self) -> str:
        return f"Posterior({self.num_synapses:,} synapses in {len(self.layers)} layers; print(.summary()) for more)"


@torch.no_grad()
def posterior(model: nn.Module) -> Posterior:
    """Read out the posterior of every DropConnect++ layer of a model.

    >>> learned = posterior(torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 2)))
    >>> learned["0"].weight.keep_probability.shape, learned.num_synapses
    (torch.Size([2, 4]), 10)
    """
    layers = {n: layer for n, layer in masked_layers(model).items() if isinstance(layer, DropConnectPPLayer)}
    if not layers:
        raise ArgumentError("posterior: the model has no DropConnect++ layer. Use dropconnectpp.convert(model) first.")
    divergences = named_kl(model)
    found: dict[str, LayerPosterior] = {}
    for name, layer in layers.items():
        parts = [_read(layer, parameter) for parameter in layer.synapse_names]
        found[name] = LayerPosterior(parts[0], parts[1] if len(parts) > 1 else None, float(divergences[name]))
    return Posterior(found)


def _read(layer: DropConnectPPLayer, name: str) -> ParameterPosterior:
    pi = layer.keep_probability(name).detach().clone()
    kept = layer.kept(name)
    alive = torch.ones_like(pi, dtype=torch.bool) if kept is None else kept.clone()
    logit = layer.logit(name).detach()
    entropy = -(pi * functional.log_bernoulli(torch.ones_like(alive), logit))
    entropy -= (1 - pi) * functional.log_bernoulli(torch.zeros_like(alive), logit)
    alpha, beta = (t.detach().clone() for t in layer.hyper_posterior(name))
    return ParameterPosterior(pi, alpha, beta, entropy * alive, alive)
