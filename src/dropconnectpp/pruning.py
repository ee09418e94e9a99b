"""Pruning by the posterior, by magnitude or by both: what goes is switched off for good."""

from __future__ import annotations

import copy
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ShapeError, check_choice
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def prune(
    model: ModelT,
    *,
    keep: float | None = None,
    threshold: float | None = None,
    score: str | None = None,
    scope: str = "layer",
    biases: bool = False,
    pattern: str | None = None,
    inplace: bool = False,
) -> ModelT:
    """Keep the best synapses of the masked layers and switch the others off.

    Give ``keep``, the share to keep, or ``threshold``, the least score to keep, or ``pattern``. ``score`` is
    "keep_probability" (pi~), "magnitude" (|W|) or "product" (pi~ |W|, the size of the mean weight).
    Without one a share is kept by "product", since pi~ alone ranks badly where little was learned,
    and a threshold is one of pi~. ``scope`` ranks within each layer or over the whole model. Biases
    are left alone unless ``biases`` is set: they are synapses too, but cost nothing. What is kept is
    a boolean buffer (`weight_kept`, `bias_kept`): it is saved with the model, counts in the KL, and
    training goes on around it. `torch.distributed.checkpoint` reads only what the model to load into
    has: prune that one first. A DropConnect++ layer raises if its masks were not read; one of fixed
    rate cannot know.

    ``pattern="2:4"`` keeps the best 2 of every 4 weights that follow each other along the inputs, which is what the
    sparse products of NVIDIA's cards from Ampere on need. It makes a model smaller, and mostly slower: PyTorch's own
    tutorial has 0.40 to 0.95 times the dense speed for BERT (pytorch/tutorials#3236), and one row times 4096 x 4096 has
    0.11 (pytorch/pytorch#111339). It pays with thousands of rows: 1.24 and 1.27 times for ViT-L with 13,008 (torchao).

    Raises:
        ArgumentError: Options contradict each other, or the model has no layer that can be ranked so.
        ShapeError: A layer's inputs are not a multiple of 4, and the pattern asks for that. The model is as it was.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(100, 10))
    >>> int(prune(model, keep=0.1)[0].weight_kept.sum())
    100
    >>> int(prune(model, pattern="2:4")[0].weight_kept.sum())
    500
    """
    if pattern is not None:
        _check_pattern(pattern, keep, threshold, scope, biases)
    elif (keep is None) == (threshold is None):
        raise ArgumentError(
            f"prune needs either keep or threshold, got keep={keep!r} and threshold={threshold!r}. "
            'Or give pattern="2:4" alone.'
        )
    if keep is not None and not 0.0 < keep <= 1.0:
        raise ArgumentError(f"keep must lie in (0, 1], got {keep!r}. To keep every synapse use keep=1.0.")
    if score is None:
        score = "keep_probability" if threshold is not None else "product"
    check_choice("score", score, ("keep_probability", "magnitude", "product"))
    check_choice("scope", scope, ("layer", "global"))
    model = model if inplace else copy.deepcopy(model)
    layers = masked_layers(model)
    _check_prunable(layers, score)
    if pattern is not None:
        _check_inputs(layers)
    scores: dict[Any, Tensor] = {}
    owners: dict[Any, list[tuple[MaskedLayer, str]]] = {}
    for layer in layers.values():
        for name in layer.synapse_names if biases else layer.weight_names:
            owners.setdefault(layer.tie(name), []).append((layer, name))
            scores.setdefault(layer.tie(name), _score(layer, name, score))
    groups = [list(scores)] if scope == "global" else _by_layer(layers, scores, biases)
    for group in groups:
        ranked = {key: scores[key] for key in group}
        chosen = _best(ranked, keep, threshold) if pattern is None else _two_of_four(ranked)
        for key, kept in chosen.items():
            for layer, name in owners[key]:
                layer.keep_only(name, kept)
    empty = [n or "the model" for n, one in layers.items() if one.weight_names and not bool(_alive(one).any())]
    if empty:
        warnings.warn(
            f"prune: {', '.join(empty)} keeps no weight and passes on nothing but its bias. "
            "Use a larger share or scope='layer'.",
            UserWarning,
            stacklevel=2,
        )
    return model


def _check_prunable(layers: dict[str, MaskedLayer], score: str) -> None:
    if not layers:
        raise ArgumentError("prune: the model has no masked layer. Use dropconnectpp.convert(model) first.")
    fixed = [name or "the model" for name, layer in layers.items() if not isinstance(layer, DropConnectPPLayer)]
    if fixed and score == "keep_probability":
        raise ArgumentError(
            f"score='keep_probability' cannot rank {', '.join(fixed)}: DropConnect keeps every synapse at one rate. "
            "Use score='magnitude'."
        )


PATTERNS = ("2:4",)
"""How many of how many weights along the inputs are kept."""


def _check_pattern(pattern: str, keep: float | None, threshold: float | None, scope: str, biases: bool) -> None:
    check_choice("pattern", pattern, PATTERNS)
    for name, value, default in (
        ("keep", keep, None),
        ("threshold", threshold, None),
        ("scope", scope, "layer"),
        ("biases", biases, False),
    ):
        if value != default:
            raise ArgumentError(
                f"prune: pattern={pattern!r} says by itself which weights are kept, got {name}={value!r} too. "
                f"Leave out {name}, or the pattern."
            )


def _check_inputs(layers: dict[str, MaskedLayer]) -> None:
    ranked = {name: layer for name, layer in layers.items() if layer.weight_names}
    wrong = {name: layer.weight.shape[1] for name, layer in ranked.items() if layer.weight.shape[1] % 4}
    if wrong:
        listed = ", ".join(f"{name or 'the model'} has {inputs}" for name, inputs in wrong.items())
        raise ShapeError(
            "prune: the pattern 2:4 needs a multiple of 4 inputs (channels of each group for a convolution), "
            f"and {listed}. Leave those layers plain: dropconnectpp.convert(model, exclude=[...])."
        )


def _two_of_four(scores: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """The masks of the best 2 of each 4 along axis 1, the inputs; what an earlier pruning took does not come back."""
    chosen: dict[Any, Tensor] = {}
    for key, value in scores.items():
        fours = value.movedim(1, -1).unflatten(-1, (-1, 4))
        best = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, fours.topk(2, dim=-1).indices, True)
        chosen[key] = (best & (fours > -torch.inf)).flatten(-2).movedim(-1, 1).contiguous()
    return chosen


def _by_layer(layers: dict[str, MaskedLayer], scores: dict[Any, Tensor], biases: bool) -> list[list[Any]]:
    groups: list[list[Any]] = []
    seen: set[Any] = set()
    for layer in layers.values():
        keys = [layer.tie(name) for name in (layer.synapse_names if biases else layer.weight_names)]
        fresh = [key for key in keys if key not in seen]
        seen.update(fresh)
        groups.append([key for key in fresh if key in scores])
    return [group for group in groups if group]


def _score(layer: MaskedLayer, name: str, score: str) -> Tensor:
    magnitude: Tensor = getattr(layer, name).detach().abs().float()
    pi = layer.keep_probability(name).detach().float()
    values: Tensor = {"keep_probability": pi, "magnitude": magnitude, "product": pi * magnitude}[score]
    kept = layer.kept(name)
    return values if kept is None else values.masked_fill(~kept, -torch.inf)


def _alive(layer: MaskedLayer) -> Tensor:
    kept = layer.kept("weight")
    return torch.ones((), dtype=torch.bool) if kept is None else kept


def _best(scores: dict[Any, Tensor], keep: float | None, threshold: float | None) -> dict[Any, Tensor]:
    """The boolean masks of what stays; exactly round(keep * n) synapses for a share."""
    if keep is None:
        assert threshold is not None
        return {key: value >= threshold for key, value in scores.items()}
    flat = torch.cat([value.flatten().cpu() for value in scores.values()])
    chosen = torch.zeros(flat.numel(), dtype=torch.bool)
    chosen[torch.topk(flat, round(keep * flat.numel())).indices] = True
    chosen &= flat > -torch.inf  # what an earlier pruning took does not come back
    parts = chosen.split([value.numel() for value in scores.values()])
    return {key: part.view_as(value).to(value.device) for (key, value), part in zip(scores.items(), parts, strict=True)}
