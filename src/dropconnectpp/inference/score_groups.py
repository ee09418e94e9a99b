"""Small layers scored together on the CPU: one pass over the synapses of all, and one look at all their moments.

An operation on a few thousand synapses takes longer to call than to do. Larger layers, and those whose estimator needs
more of the rewards than their mean, are scored one by one by `score_gradient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropconnectpp.estimators import BBVI, running_coefficient, update_moments
from dropconnectpp.inference.score_gradient import RewardedPasses, prefix_of
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.passes import BinaryGates, ForcedGates
from dropconnectpp.ops.posterior import GatePosterior
from dropconnectpp.ops.posterior_groups import group_pass, groupable, in_parts


@dataclass
class ScoredTogether:
    """What groups of layers add to the bound."""

    names: set[str] = field(default_factory=set)
    kl: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each pass: what it adds to the loss, the posterior's gradient behind it, and its KL."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """What the running moments become."""


@dataclass(frozen=True)
class _Member:
    name: str
    layer: DropConnectPPLayer
    posteriors: list[GatePosterior]
    masks: list[Tensor]


def score_together(
    layers: Mapping[str, DropConnectPPLayer], passes: RewardedPasses, moments: Mapping[str, Tensor | None], scale: float
) -> ScoredTogether:
    """Score the layers that are small and alike; ``moments`` are the bound's buffers by name."""
    found = ScoredTogether()
    if len(passes.samples) > 1 or len(passes.samples[0].arms) > 1 or not torch.is_grad_enabled():
        return found
    groups: dict[object, list[_Member]] = {}
    ties = Counter(layer.tie(name) for layer in layers.values() for name in layer.gate_names)
    for name, layer in layers.items():
        member = _member(name, layer, passes, ties)
        if member is not None:
            key = layer.estimator, layer.kl_weight, layer.prior, member.posteriors[0].gate.dtype
            groups.setdefault(key, []).append(member)
    for members in groups.values():
        if len(members) > 1:
            _score(members, passes, moments, scale, found)
    return found


def _member(name: str, layer: DropConnectPPLayer, passes: RewardedPasses, ties: Counter[object]) -> _Member | None:
    """A layer that can go with others: small, on the CPU, one mask for the batch, nothing shared with another layer."""
    estimator, gates, names = layer.estimator, passes.samples[0].arms[0][layer], layer.gate_names
    if type(estimator) is not BBVI or estimator.baseline != "running" or estimator.per_synapse:
        return None
    if isinstance(gates, ForcedGates):
        each = gates.weight.ndim > layer.weight.ndim
    else:
        each = not isinstance(gates, BinaryGates) or gates.each_example
    if each or any(ties[layer.tie(key)] > 1 for key in names):
        return None
    posteriors = [layer.posterior_of(key) for key in names]
    if not all(groupable(posterior) and posterior.gate.dtype == posteriors[0].gate.dtype for posterior in posteriors):
        return None
    assert isinstance(gates, BinaryGates | ForcedGates)
    return _Member(name, layer, posteriors, [_mask(layer, key, gates) for key in names])


def _mask(layer: DropConnectPPLayer, name: str, gates: BinaryGates | ForcedGates) -> Tensor:
    """A mask of the pass, which the draw remembers."""
    known = None if isinstance(gates, ForcedGates) else gates.draw.masks.get((gates.streams[name], gates.mirrored))
    return layer.gate_mask(name, gates) if known is None else known


def _score(
    members: Sequence[_Member],
    passes: RewardedPasses,
    moments: Mapping[str, Tensor | None],
    scale: float,
    found: ScoredTogether,
) -> None:
    """Score one group: layers with one estimator, one KL weight and one prior."""
    first = members[0].layer
    estimator = first.estimator
    assert isinstance(estimator, BBVI)
    keys = [f"{prefix_of(member.name)}layer" for member in members]
    known = torch.stack([value for key in keys if (value := moments[key]) is not None], 1)  # (2, layers)
    reward = passes.rewards.mean(-1).mean(1).to(known.device)  # (1,)
    coefficients = running_coefficient(reward, known).to(members[0].posteriors[0].gate.dtype)  # (layers,)
    posteriors = [posterior for member in members for posterior in member.posteriors]
    masks = [mask for member in members for mask in member.masks]
    owners = [index for index, member in enumerate(members) for _ in member.posteriors]
    by_layer = [torch.zeros(())] * len(members)
    done = 0
    for part in in_parts(posteriors):
        here = slice(done, done + len(part))
        sizes: dict[int, int] = {}  # of the layers in this part, a weight and its bias together
        for owner, posterior in zip(owners[here], part, strict=True):
            sizes[owner] = sizes.get(owner, 0) + posterior.gate.numel()
        weights = coefficients[list(sizes)]
        loss, kl, squared = group_pass(part, scale * first.kl_weight, masks[here], weights, list(sizes.values()))
        found.kl.append((loss, kl))
        for owner, value in zip(sizes, squared.unbind(), strict=True):
            by_layer[owner] = by_layer[owner] + value
        done = here.stop
    fresh = update_moments(known, reward, torch.stack(by_layer).to(reward.dtype), estimator.decay)
    found.names.update(member.name for member in members)
    found.moments.update(zip(keys, fresh.unbind(1), strict=True))
