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
from dropconnectpp.ops.posterior import GatePosterior, group_pass, groupable, in_parts


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
    estimator, gates = layer.estimator, passes.samples[0].arms[0][layer]
    if type(estimator) is not BBVI or estimator.baseline != "running" or estimator.per_synapse:
        return None
    one_mask = (
        gates.weight.ndim == layer.weight.ndim
        if isinstance(gates, ForcedGates)
        else (isinstance(gates, BinaryGates) and not gates.each_example)
    )
    posteriors = [layer.posterior_of(key) for key in layer.gate_names]
    alike = all(groupable(posterior) and posterior.gate.dtype == posteriors[0].gate.dtype for posterior in posteriors)
    if not one_mask or not alike or any(ties[layer.tie(key)] > 1 for key in layer.gate_names):
        return None
    assert isinstance(gates, BinaryGates | ForcedGates)
    return _Member(name, layer, posteriors, [layer.gate_mask(key, gates) for key in layer.gate_names])


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
    squared: list[Tensor] = []
    done = 0
    for part in in_parts(posteriors):
        here = slice(done, done + len(part))
        loss, kl, scores = group_pass(part, scale * first.kl_weight, masks[here], coefficients[owners[here]])
        found.kl.append((loss, kl))
        squared.append(scores)
        done = here.stop
    every = torch.cat(squared)
    by_layer = every.new_zeros(len(members)).index_add_(0, torch.tensor(owners), every).to(reward.dtype)
    fresh = update_moments(known, reward, by_layer, estimator.decay)
    found.names.update(member.name for member in members)
    found.moments.update(zip(keys, fresh.unbind(1), strict=True))
