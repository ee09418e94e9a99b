"""Groups of parameters for torch's optimisers: weights, posterior and noise."""

from __future__ import annotations

from typing import Any

from torch import nn

from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.likelihoods import LearnedNoise


def parameter_groups(
    model: nn.Module, lr: float, *, logit_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser: "weights", which decay, and "posterior", which never does.

    Give it the ELBO for a third, "noise", where the likelihood learns it; that does not decay either.
    The posterior's group holds logits (or probabilities) and Beta parameters, at step size
    ``logit_lr``; by default at ``lr`` times their layer's ``logit_step``, with one group named
    "posterior" for each step that occurs. Parameters that need no gradient are left out.

    >>> groups = parameter_groups(dropconnectpp.DropConnectPPLinear(3, 2), lr=0.01, logit_lr=0.1)
    >>> [(group["name"], group["lr"], len(group["params"])) for group in groups]
    [('weights', 0.01, 2), ('posterior', 0.1, 2)]
    >>> model = torch.nn.Sequential(*(dropconnectpp.DropConnectPPLinear(3, 3, logit_step=s) for s in (1.0, 5.0)))
    >>> [(group["name"], group["lr"], len(group["params"])) for group in parameter_groups(model, lr=0.01)]
    [('weights', 0.01, 4), ('posterior', 0.01, 2), ('posterior', 0.05, 2)]
    """
    steps: dict[int, float] = {}
    for layer in masked_layers(model).values():
        if isinstance(layer, DropConnectPPLayer):
            for key in layer.posterior_names:  # shared ones keep the first layer's step
                steps.setdefault(id(getattr(layer, key)), 1.0 if logit_lr is not None else layer.logit_step)
    noises = {id(p) for module in model.modules() if isinstance(module, LearnedNoise) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    noise = [p for p in trained if id(p) in noises]
    weights = [p for p in trained if id(p) not in steps and id(p) not in noises]
    posterior: dict[float, list[nn.Parameter]] = {}
    for parameter in trained:
        if id(parameter) in steps:
            posterior.setdefault(steps[id(parameter)], []).append(parameter)
    base = lr if logit_lr is None else logit_lr
    groups: list[dict[str, Any]] = [{"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay}]
    for step, parameters in posterior.items():
        size = base if step == 1.0 else base * step  # a tensor stays the caller's own
        groups.append({"name": "posterior", "params": parameters, "lr": size, "weight_decay": 0.0})
    groups.append({"name": "noise", "params": noise, "lr": lr, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
