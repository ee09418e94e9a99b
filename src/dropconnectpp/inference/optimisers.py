"""What optimisers do to a posterior's parameters: seen by a hook before each step of any of them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.likelihoods import LearnedNoise, remembered


class Listener(Protocol):
    """What is told of the steps of optimisers."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before an optimiser changes anything."""


_listeners: WeakSet[Any] = WeakSet()
_hooked = False


def listen(listener: Listener) -> None:
    """Tell an object of every optimiser's step, as long as it lives."""
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_tell)
        _hooked = True
    _listeners.add(listener)


def ignore(listener: Listener) -> None:
    """Tell it no more."""
    _listeners.discard(listener)


def _tell(optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
    """A step with a closure, as Lightning and skorch make it, has its gradients once the closure has run."""
    closure = keywords.get("closure") or (arguments[1] if len(arguments) > 1 else None)
    if closure is None:
        _tell_all(optimizer)
        return None

    def told() -> Any:
        result = closure()
        _tell_all(optimizer)
        return result

    if "closure" in keywords:
        return arguments, {**keywords, "closure": told}
    return (arguments[0], told, *arguments[2:]), keywords


def _tell_all(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.before_step(optimizer)


class Membership:
    """Which optimisers hold any of a model's parameters, asked at every step and so remembered."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        self.parameters = parameters
        self._known: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()

    def __contains__(self, optimizer: Optimizer) -> bool:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._known.get(optimizer)
        if known is None or known[0] != size:
            found = any(id(p) in self.parameters for group in optimizer.param_groups for p in group["params"])
            known = self._known[optimizer] = (size, found)
        return known[1]


class PosteriorCheck:
    """Looks once at how a model's optimisers treat its log-odds, and warns where a user would not want that."""

    STEPS = 2
    """Steps of optimisers that hold weights before it speaks: two optimisers may share a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._steps = 0
        self._groups: dict[int, dict[str, Any]] = {}
        listen(self)

    def before_step(self, optimizer: Optimizer) -> None:
        model = self._model()
        if model is None:
            ignore(self)
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        mine = [id(p) for p in (*model.parameters(), *_noise(model)) if id(p) in groups]
        if not mine:
            return
        self._groups |= {key: groups[key] for key in mine}
        self._steps += 1
        if self._steps >= self.STEPS:
            ignore(self)
            for message in _complaints(model, self._groups):
                warnings.warn(message, UserWarning, stacklevel=4)


_checks: WeakKeyDictionary[nn.Module, PosteriorCheck] = WeakKeyDictionary()


def check(owner: nn.Module, model: nn.Module) -> None:
    """Look at how a model's log-odds are trained, as long as its owner lives."""
    _checks[owner] = PosteriorCheck(model)


def trust(owner: nn.Module) -> None:
    """Look no more: something else moves them."""
    found = _checks.pop(owner, None)
    if found is not None:
        ignore(found)


def _noise(model: nn.Module) -> list[nn.Parameter]:
    likelihood = remembered(model)
    return list(likelihood.parameters()) if isinstance(likelihood, LearnedNoise) else []


def _complaints(model: nn.Module, groups: Mapping[int, dict[str, Any]]) -> list[str]:
    outside: list[str] = []
    decayed: list[str] = []
    slow: list[str] = []
    for name, layer in masked_layers(model).items():
        if not isinstance(layer, DropConnectPPLayer):
            continue
        for key in layer.posterior_names:
            parameter: nn.Parameter = getattr(layer, key)
            group = groups.get(id(parameter))
            path = f"{name}.{key}".lstrip(".")
            if group is None:
                if parameter.requires_grad and id(layer.weight) in groups:
                    outside.append(path)
                continue
            if group.get("weight_decay"):
                decayed.append(path)
            beside = groups.get(id(layer.weight))
            if layer.logit_step != 1.0 and beside is not None and group.get("lr") == beside.get("lr"):
                slow.append(f"{path} ({layer.logit_step:g})")
    found = []
    cure = "Use dropconnectpp.parameter_groups(model, lr), or a dropconnectpp.SparsityPlan, which moves them itself."
    if outside:
        found.append(f"No optimiser holds {_listed(outside)}: nothing is learned of these connections. {cure}")
    if decayed:
        found.append(
            f"Weight decay acts on {_listed(decayed)} and pulls these keep probabilities towards 1/2, whatever the "
            f"prior says. {cure}"
        )
    if slow:
        found.append(
            f"The layers' logit_step is not applied to {_listed(slow)}: they move at the weights' step size. {cure}"
        )
    if any(p.requires_grad and id(p) not in groups for p in _noise(model)):
        found.append(
            "No optimiser holds the noise scale that the likelihood learns: it stays where it started. It is a "
            "parameter of the ELBO: use dropconnectpp.parameter_groups(elbo, lr), or elbo.parameters()."
        )
    return found


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")
