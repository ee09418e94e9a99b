"""A training that ends with few connections: `SparsityPlan` steps beside the optimiser, as a scheduler does."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dropconnectpp.errors import ArgumentError, named_options
from dropconnectpp.inference.elbo import ELBO
from dropconnectpp.inference.optimisers import Membership, ignore, listen, trust
from dropconnectpp.inference.schedule import Phase, SparsitySchedule, Steering, price_of_kl_weight
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

ON = 30.0
"""Log-odds of a connection that is on for good: its keep probability is 1 in float32."""
TOLERANCE = 0.1
"""How far the share may be from ``keep``, as a share of it."""

_plans: WeakKeyDictionary[ELBO, weakref.ref[SparsityPlan]] = WeakKeyDictionary()


class SparsityPlan:
    """Learn which connections to keep, fix them, and go on with the weights: one training, no search.

    Give ``keep``, the share of weights to end with, or ``price``, the nats of log-likelihood over the training set
    that each connection must earn. ``steps`` is the number of optimiser steps of the whole training. The KL rises over
    the first ``warmup`` of them. After ``fix_at`` of them the support, where pi~ > 1/2, is kept for good, and the
    weights train on. With ``noise`` connections are dropped at that rate, before and after, and the layers' means
    allow for it: DropConnect on what is kept.

    Call `step` after each ``optimizer.step()``. The plan sets the ELBO's ``kl_weight`` and moves the log-odds itself,
    with an Adam whose step size follows from ``steps`` (``logit_lr`` sets another): the optimiser may hold them or
    not, and does nothing to them, weight decay included.

    Layers should start nearly on and have a prior that keeps few, as `convert` with ``preset="sparse"`` makes them.
    Layers whose ``kl_weight`` or prior differ from the first's pay in proportion. Biases have gates too, but count in
    no share.

    >>> model = dropconnectpp.convert(torch.nn.Linear(20, 5), preset="sparse")
    >>> elbo = dropconnectpp.ELBO(model, dropconnectpp.categorical, num_data=100)
    >>> plan = SparsityPlan(elbo, steps=600, keep=0.2)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    >>> x, y = torch.randn(100, 20), torch.arange(100) % 5
    >>> for _ in range(600):
    ...     loss = elbo(x, target=y).loss
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     plan.step()
    >>> plan.phase, int(model.weight_kept.sum()) < 30
    ('fixed', True)
    """

    @named_options
    def __init__(
        self,
        elbo: ELBO,
        steps: int,
        *,
        keep: float | None = None,
        price: float | None = None,
        warmup: float = 0.3,
        fix_at: float = 0.8,
        noise: float = 0.0,
        logit_lr: float | None = None,
        read_every: int | None = None,
    ) -> None:
        self.schedule = SparsitySchedule(
            steps,
            keep=keep,
            price=price,
            warmup=warmup,
            fix_at=fix_at,
            noise=noise,
            logit_lr=logit_lr,
            read_every=read_every,
        )
        self.elbo = elbo
        self.layers = _layers_of(elbo)
        if elbo.kl_weight != 1.0 and elbo not in _plans:  # an earlier plan's weight is this one's to set
            raise ArgumentError(
                f"a SparsityPlan sets the ELBO's kl_weight, got kl_weight={elbo.kl_weight!r}. "
                "Leave it at 1 and give the plan a price."
            )
        self._gates = _gates_of(self.layers)
        self._weights = [(layer, name) for layer, name in self._gates.values() if name == "weight"]
        self._count = sum(layer.weight.numel() for layer, _ in self._weights)
        self._model_parameters = {id(p): p for p in elbo.model.parameters()}
        self._holders = Membership(self._model_parameters)
        self._check_start()
        self._adam = self._new_adam()
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._stepped = self._ever_stepped = self._overflown = False
        self._done = 0
        self._steering = self.schedule.start()
        self._fixed = False
        self._cap()
        self._set_kl_weight()
        earlier = _plans.get(elbo)
        previous = None if earlier is None else earlier()
        if previous is not None:
            ignore(previous)
        _plans[elbo] = weakref.ref(self)
        listen(self)
        trust(elbo)
        self._versions: list[int] | None = None  # of the log-odds, once a step was made: before that, states are loaded

    # -------------------------------------------------------------------------------- for loggers

    @property
    def phase(self) -> Phase:
        """ "rise" while the KL rises, "learn" at its full weight, "fixed" once the support is fixed."""
        return self.schedule.phase(self._done)

    @property
    def price(self) -> float:
        """Nats that a connection must earn now to be kept."""
        return self.schedule.price_at(self._steering, self._done)

    @property
    def steps_done(self) -> int:
        """How often `step` was called."""
        return self._done

    @property
    @torch.no_grad()
    def share_kept(self) -> float:
        """The share of weights with pi~ > 1/2, or on the support once it is fixed. On a GPU this waits for it."""
        total: Tensor | None = None
        for layer, name in self._weights:
            on = _support(layer, name, self._least_logit).sum()
            total = on if total is None else total + on.to(total.device)
        assert total is not None
        return float(total) / self._count

    def __repr__(self) -> str:
        aim = f"keep={self.schedule.keep!r}" if self.schedule.keep is not None else f"price={self.schedule.price!r}"
        return f"SparsityPlan({aim}, step {self._done} of {self.schedule.steps}, phase={self.phase!r})"

    # ------------------------------------------------------------------------------------ the steps

    def step(self) -> None:
        """Move the log-odds by the gradient of the last backward pass, and everything else to the next step."""
        if not self._fixed:
            self._step_logits()
        self._clear()
        self._done += 1
        if self.schedule.reads(self._done):
            self._steering = self.schedule.steer(self._steering, self._done, self.share_kept)
        if self.schedule.fixed(self._done) and not self._fixed:
            self._fix()
        self._set_kl_weight()
        self._versions = self._present_versions()
        if self._done == self.schedule.steps + 1:
            warnings.warn(
                f"SparsityPlan.step was called more often than its steps={self.schedule.steps}: the log-odds have come "
                "to rest, and the weights go on alone. steps is the number of optimiser steps of the whole training.",
                UserWarning,
                stacklevel=2,
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the log-odds' gradients away from an optimiser that is about to step."""
        if optimizer is self._adam or optimizer not in self._holders:
            return
        self._stepped = self._ever_stepped = True
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        self._overflown = overflown = found_inf is not None and bool(found_inf)
        for layer, name in self._gates.values():
            parameter = layer.gate_parameter(name)
            if parameter.grad is not None:
                if not overflown:
                    self._taken[parameter] = parameter.grad if scale is None else parameter.grad / scale
                parameter.grad = None

    @torch.no_grad()
    def _step_logits(self) -> None:
        parameters = [layer.gate_parameter(name) for layer, name in self._gates.values()]
        if not self._stepped:  # an optimiser that is none of torch's, or a gradient scaler that skipped the step
            if self._ever_stepped:
                self._require_overflow()
                return
            self._require_unmoved()
            self._taken = {p: p.grad for p in parameters if p.grad is not None}
            if not all(bool(torch.isfinite(gradient).all()) for gradient in self._taken.values()):
                return
        if not self._taken and self._done == 0 and not self._overflown:
            if not any(parameter.requires_grad for parameter in parameters):
                raise ArgumentError(
                    "SparsityPlan: no log-odds need a gradient: an earlier plan has fixed the support, or they were "
                    "frozen. Convert the model anew, or call requires_grad_() on them."
                )
            raise ArgumentError(
                "SparsityPlan.step found no gradient of the log-odds. Call it after loss.backward() and "
                "optimizer.step(), with the loss of the plan's own ELBO."
            )
        for group in self._adam.param_groups:
            group["lr"] = self.schedule.logit_lr_at(self._done, self._steering)
        for parameter, gradient in self._taken.items():
            parameter.grad = gradient
        self._adam.step()
        self._cap()

    def _clear(self) -> None:
        for layer, name in self._gates.values():
            layer.gate_parameter(name).grad = None
        self._taken.clear()
        self._stepped = self._overflown = False

    def _cap(self) -> None:
        """No keep probability above the ceiling."""
        if self.schedule.noise:
            for layer, name in self._gates.values():
                layer.gate_parameter(name).data.clamp_(max=_log_odds(self.schedule.ceiling))

    def _set_kl_weight(self) -> None:
        first = next(iter(self.layers.values()))
        weight = self.schedule.kl_weight_at(self._steering, self._done, first.alpha, first.beta) / first.kl_weight
        if weight != self.elbo.kl_weight:
            self.elbo.kl_weight = weight

    @property
    def _least_logit(self) -> float:
        return _log_odds(self.schedule.threshold)

    def _fix(self) -> None:
        share = self.share_kept
        ceiling = self.schedule.ceiling
        value = ON if ceiling == 1.0 else _log_odds(ceiling)
        supports = {key: _support(layer, name, self._least_logit) for key, (layer, name) in self._gates.items()}
        for layer in self.layers.values():
            for name in layer.synapse_names:
                layer.keep_only(name, supports[layer.tie(name)])
        for layer, name in self._gates.values():
            layer.gate_parameter(name).data.fill_(value)
        self._settle()
        self._report(share)

    def _settle(self) -> None:
        """Learn no more; where gradients are reduced over processes, parameters must go on having one."""
        self._fixed = True
        self._adam = self._new_adam()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            for layer, name in self._gates.values():
                layer.gate_parameter(name).requires_grad_(False)

    def _report(self, share: float) -> None:
        """Say what was not reached, by name."""
        keep = self.schedule.keep
        if keep is not None and abs(share / keep - 1.0) > TOLERANCE:
            advice = (
                "Connections did not go in time: train for more steps, with a larger logit_lr or a later fix_at."
                if share > keep
                else "Too many went at once: train for more steps, with a smaller logit_lr or a longer warmup."
            )
            warnings.warn(
                f"SparsityPlan: keep={keep:g} was not met: {share:.4g} of the weights are kept, at a price of "
                f"{self._steering.price:.3g} nats. {advice}",
                UserWarning,
                stacklevel=4,
            )
        empty = [name or "the model" for name, layer in self.layers.items() if not bool(_kept(layer).any())]
        if empty:
            warnings.warn(
                f"SparsityPlan: {', '.join(empty)} keeps no weight and passes on nothing but its bias. "
                "Keep a larger share, or leave the layer out of convert().",
                UserWarning,
                stacklevel=4,
            )

    # ------------------------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """All that resuming exactly needs beside the states of the ELBO (or the model) and of the optimiser."""
        return {
            "schedule": asdict(self.schedule),
            "steps_done": self._done,
            "steering": tuple(self._steering),
            "fixed": self._fixed,
            "logit_optimizer": self._adam.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a plan with the same settings was; load the model's state as well, in either order."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ArgumentError(
                f"this is no state of a SparsityPlan: {', '.join(sorted(missing))} missing. Give what state_dict gave."
            )
        theirs, ours = dict(state["schedule"]), asdict(self.schedule)
        changed = [
            f"{key}={theirs.get(key)!r} (here {value!r})" for key, value in ours.items() if theirs.get(key) != value
        ]
        if changed:
            raise ArgumentError(
                f"the saved plan has other settings: {', '.join(changed)}. Make the plan with the saved ones to resume."
            )
        self._adam.load_state_dict(state["logit_optimizer"])
        self._done, self._steering = int(state["steps_done"]), Steering(*state["steering"])
        self._fixed = bool(state["fixed"])
        self._clear()
        if self._fixed:
            self._settle()
        self._set_kl_weight()
        self._versions = None

    # ------------------------------------------------------------------------------------- checks

    def _new_adam(self) -> torch.optim.Adam:
        # eps in nats over the training set: the loss is per example, and its gradient as small as that makes it.
        parameters = [layer.gate_parameter(name) for layer, name in self._gates.values()]
        return torch.optim.Adam(parameters, lr=0.0, eps=1e-5 / self.elbo.num_data)

    def _present_versions(self) -> list[int]:
        return [layer.gate_parameter(name)._version for layer, name in self._gates.values()]

    def _require_overflow(self) -> None:
        """The optimiser did not step: where a gradient overflowed a scaler saw to that, and else the user forgot."""
        logits = [layer.gate_parameter(name).grad for layer, name in self._gates.values()]
        if not any(grad is not None and bool(grad.any()) for grad in logits):
            return
        gradients = [p.grad for p in self._model_parameters.values() if p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            raise ArgumentError(
                "SparsityPlan.step was called, and no optimiser had stepped since the last time. Call it once after "
                "each optimizer.step(): where gradients are accumulated, after the last of their minibatches."
            )

    def _require_unmoved(self) -> None:
        if self._versions is not None and self._present_versions() != self._versions:
            raise ArgumentError(
                "SparsityPlan: something else moves the log-odds, and it is no torch.optim.Optimizer, whose steps the "
                "plan can see. Give that optimiser the other parameters alone: "
                "[p for n, p in model.named_parameters() if not n.endswith('_logit')]."
            )

    def _check_start(self) -> None:
        keep = self.schedule.keep
        if keep is None:
            return
        if keep * self._count < 1.0:
            raise ArgumentError(
                f"keep={keep!r} of {self._count} weights is less than one. The least is {1.0 / self._count:.2g}."
            )
        share = self.share_kept
        if share <= keep:
            raise ArgumentError(
                f"keep={keep!r} needs more connections to choose from: only {share:.4g} of the weights have "
                f"pi~ > {self.schedule.threshold:g} at the start. Use convert(model, preset='sparse'), or "
                "keep_probability=0.9."
            )


def _log_odds(probability: float) -> float:
    return math.log(probability) - math.log1p(-probability)


def _support(layer: DropConnectPPLayer, name: str, least: float) -> Tensor:
    """Where a parameter's connections are on, as booleans of its shape."""
    on = (layer.gate_parameter(name).detach() > least).expand_as(getattr(layer, name))
    kept = layer.kept(name)
    return on.clone() if kept is None else on & kept


def _kept(layer: DropConnectPPLayer) -> Tensor:
    kept = layer.kept("weight")
    assert kept is not None
    return kept


def _layers_of(elbo: ELBO) -> dict[str, DropConnectPPLayer]:
    """The layers whose connections are learned, checked."""
    layers = {n: layer for n, layer in masked_layers(elbo.model).items() if isinstance(layer, DropConnectPPLayer)}
    if not layers:
        raise ArgumentError(
            "a SparsityPlan needs DropConnect++ layers, and the ELBO's model has none. "
            "Use dropconnectpp.convert(model, preset='sparse') first."
        )
    for name, layer in layers.items():
        where = name or "the model"
        if layer.parameterisation != "logit" or layer.hyper == "learned":
            raise ArgumentError(
                f"a SparsityPlan needs parameterisation='logit' and hyper='marginal' or 'optimal', got "
                f"{layer.parameterisation!r} and {layer.hyper!r} in {where}. Use preset='sparse'."
            )
        if layer.weight_logit.dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"a SparsityPlan needs log-odds in float32 or float64, got {layer.weight_logit.dtype} in {where}: "
                "its steps would be rounded away. Train with torch.autocast instead."
            )
        if layer.kl_weight <= 0.0:
            raise ArgumentError(f"a SparsityPlan needs a kl_weight above 0, got {layer.kl_weight!r} in {where}.")
        price_of_kl_weight(1.0, layer.alpha, layer.beta)
    return layers


def _gates_of(layers: Mapping[str, DropConnectPPLayer]) -> dict[Any, tuple[DropConnectPPLayer, str]]:
    """Each gated parameter once, however many layers share it."""

    def each() -> Iterator[tuple[DropConnectPPLayer, str]]:
        for layer in layers.values():
            for name in layer.synapse_names:
                yield layer, name

    found: dict[Any, tuple[DropConnectPPLayer, str]] = {}
    for layer, name in each():
        found.setdefault(layer.tie(name), (layer, name))
    return found
