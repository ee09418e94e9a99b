"""What is measured of trained networks given as layers, as plain numbers: as deployed, whole, and what is left of them.

As deployed, weights outside the support are exactly 0. Shapes: R replicas, N images, K classes, I inputs, O units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.layers import WeightLayer
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.replicas.layered_network import predict
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.stack import fast_products

CHUNK = 500
"""Images at a time."""


def stacked_weights(stack: LayeredStack, deployed: bool) -> list[Tensor]:
    """Every layer's weights (R, I, O): as deployed, or of the whole posterior-mean network."""
    found = []
    for number, weight in enumerate(stack.weights):
        if number not in stack.used:
            found.append(weight)
            continue
        place = stack.gated.index(number)
        find = [segment.deployed_weight if deployed else segment.whole_weight for segment in stack.segments]
        found.append(torch.cat([one(place) for one in find]))
    return found


def supports(stack: LayeredStack) -> list[Tensor]:
    """Which weights of each layer are kept, bool (R, I, O); all of a layer without gates."""
    found = []
    for number, weight in enumerate(stack.weights):
        gated = number in stack.used
        place = stack.gated.index(number) if gated else 0
        kept = [segment.support(place) for segment in stack.segments] if gated else [torch.ones_like(weight).bool()]
        found.append(torch.cat(kept))
    return found


@torch.no_grad()
def logits_of(
    stack: LayeredStack, weights: Sequence[Tensor], told: Callable[[int, int], None] | None = None
) -> Tensor:  # (R, N, K)
    """Logits for the images that the stack is evaluated on."""
    images, found = stack.examples.test_images, []
    with fast_products(stack.device, stack.dtype):
        for part in images.split(stack.chunk or CHUNK):
            found.append(predict(stack.shape, part.to(stack.input_dtype), weights, stack.biases, stack.front).double())
            if told is not None:
                told(sum(one.shape[1] for one in found), len(images))
    return torch.cat(found, 1)


def measures(logits: Tensor, labels: Tensor, bins: int) -> list[dict[str, Any]]:
    """Accuracy in percent, NLL in nats, Brier score and calibration of each replica."""
    labels = labels.expand(logits.shape[:2])
    logs = logits.log_softmax(-1)
    probabilities = logs.exp()
    best, guess = probabilities.max(-1)
    right = (guess == labels).double()
    nll = -logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1])
    brier = (probabilities - one_hot).square().sum(-1)
    # From below too: the NaN of a replica that diverged becomes a negative index.
    index = (best * bins).long().clamp(0, bins - 1)
    counts, confidence, correct = (
        torch.zeros((len(logits), bins), dtype=torch.float64, device=logits.device).scatter_add_(1, index, values)
        for values in (torch.ones_like(best), best, right)
    )
    count = logits.shape[1]
    return [
        {
            "accuracy": float(100.0 * right[r].mean()),
            "nll": float(nll[r].mean()),
            "brier": float(brier[r].mean()),
            "ece": float((confidence[r] - correct[r]).abs().sum() / count),
            "calibration": {
                "counts": counts[r].long().tolist(),
                "confidence": confidence[r].tolist(),
                "correct": correct[r].long().tolist(),
            },
        }
        for r in range(len(logits))
    ]


@torch.no_grad()
def along_the_way(stack: LayeredStack, settings: Evaluation) -> list[dict[str, Any]]:
    """A point of each replica's curve: what it would be if its support were fixed now."""
    points = measures(logits_of(stack, stacked_weights(stack, True)), stack.examples.test_labels, settings.bins)
    kept = torch.stack([one.flatten(1).sum(1) for one in supports(stack)]).sum(0).tolist()
    return [
        {"accuracy": point["accuracy"], "nll": point["nll"], "weights_kept": int(count)}
        for point, count in zip(points, kept, strict=True)
    ]


@torch.no_grad()
def final(
    stack: LayeredStack, settings: Evaluation, progress: Callable[[str, int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Everything measured once training is over, for each replica."""

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress("evaluating", done, total)

    labels = stack.examples.test_labels
    deployed = measures(logits_of(stack, stacked_weights(stack, True), told), labels, settings.bins)
    whole = measures(logits_of(stack, stacked_weights(stack, False)), labels, settings.bins)
    kept = supports(stack)
    kl = torch.cat([segment.kl() for segment in stack.segments]).tolist()
    prices = [price for segment in stack.segments for price in segment.prices()]
    results = []
    for r in range(len(stack.units)):
        layers = layers_left(stack.layers, [one[r] for one in kept])
        if not stack.protocol.training.holdout:  # of a trial only its error and what it keeps count
            for layer, one, mask in zip(layers, stack.layers, kept, strict=True):
                layer |= kept_along(one, mask[r])
        results.append(
            deployed[r]
            | {
                "whole": {name: value for name, value in whole[r].items() if name != "calibration"},
                "weights": stack.shape.weights,
                "weights_kept": sum(layer["kept"] for layer in layers),
                "biases": stack.shape.biases,
                "layers": layers,
                "kl": kl[r],
                "price": prices[r],
            }
        )
    return results


def layers_left(layers: Sequence[WeightLayer], kept: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What is left of each layer of one replica: weights, and the units and inputs that are still connected.

    A unit is left if it has a connection from an input that is left, and one to a unit that is left; what is not can be
    removed without a change but to biases. The last layer's units need no connection onwards. ``connected`` counts the
    weights between inputs and units that are left. A layer without gates says so: shares are not of its weights.
    """
    masks = [by_features(one, mask) for one, mask in zip(layers, kept, strict=True)]
    alive = [torch.ones(masks[0].shape[0], dtype=torch.bool, device=masks[0].device)]
    for mask in masks:  # forward: what an input reaches
        alive.append(_reached(mask, _as_inputs(mask, alive[-1])))
    for place in range(len(layers) - 1, -1, -1):  # backward: what reaches an output
        mask = masks[place]
        inputs = _as_inputs(mask, alive[place])
        useful = (mask & alive[place + 1]).any(1) & inputs
        alive[place] = alive[place] & _as_units(useful, alive[place])
    found = []
    for place, (one, mask, whole) in enumerate(zip(layers, masks, kept, strict=True)):
        left = mask & _as_inputs(mask, alive[place])[:, None] & alive[place + 1]
        weights = _weights_of(one, whole, left)
        found.append(
            {
                "name": one.name,
                "weights": one.weights,
                "kept": int(whole.sum()),
                "connected": weights,
                "units": one.units,
                "units_left": int(alive[place + 1].sum()),
                "inputs": mask.shape[0],
                "inputs_left": int(left.any(1).sum()),
                **({} if one.layer.gated else {"gated": False}),
            }
        )
    return found


def kept_along(one: WeightLayer, mask: Tensor) -> dict[str, list[int]]:
    """How many weights of a layer are kept at each place, of each map that comes in, and of each unit.

    Places are those of a filter, or of the maps or the image that a dense layer reads; a layer that reads units has one
    place. Nothing of a layer without gates or with all of its weights.
    """
    if not one.layer.gated or bool(mask.all()):
        return {}
    maps = one.inputs if one.convolution else one.inputs // one.side_in**2
    counts = mask.view(-1, maps, one.units).long()
    axes = {"by_place": (1, 2), "by_map": (0, 2), "by_unit": (0, 1)}
    return {name: counts.sum(axis).tolist() for name, axis in axes.items()}


def by_features(one: WeightLayer, mask: Tensor) -> Tensor:  # (I, O) -> (inputs, O)
    """Which inputs are connected to which units: a filter's places count as one, a dense layer's inputs are its own."""
    return mask.view(-1, one.inputs, one.units).any(0) if one.convolution else mask


def _as_inputs(mask: Tensor, units: Tensor) -> Tensor:
    """Which inputs of a layer come from units that are left: each map of a convolution gives a dense layer many."""
    return units.repeat(mask.shape[0] // len(units))


def _as_units(inputs: Tensor, units: Tensor) -> Tensor:
    """Which units before a layer have an input that is used."""
    return inputs.view(-1, len(units)).any(0)


def _reached(mask: Tensor, inputs: Tensor) -> Tensor:
    return (mask & inputs[:, None]).any(0)


def _weights_of(one: WeightLayer, whole: Tensor, left: Tensor) -> int:
    """Weights kept between inputs and units that are left."""
    if not one.convolution:
        return int(left.sum())
    return int((whole.view(-1, one.inputs, one.units) & left).sum())
