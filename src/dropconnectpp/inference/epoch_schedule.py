"""Step size, rate and price by epoch, for any training loop: `EpochSchedule` steps once an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.inference.elbo import ELBO
from dropconnectpp.inference.epoch_values import Between, check_values, value_at
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnect import DropConnectLayer

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class EpochSchedule:
    """A schedule that was found elsewhere, such as by `dcpp run population`, followed in a loop of your own.

    ``at`` names epochs, counted from 0, and each setting has a value for each of them. Between two of them a setting
    stays (``between="hold"``) or goes on a line (``"linear"``); after the last it stays. The settings of epoch 0 are
    set at once, and those of the next with each `step`, which is called once an epoch.

    ``lr`` is set in all groups of ``optimizer``; a group with another step size keeps its ratio to the first's, as the
    logits of `parameter_groups` have it. ``rate``, the share dropped, is set in the DropConnect and Dropout layers of
    ``model``. ``kl_weight`` is set in the `ELBO`, given as ``model``.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectLinear(4, 8), torch.nn.Linear(8, 3))
    >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    >>> schedule = EpochSchedule(optimizer, model, at=[0, 10], lr=[0.01, 0.03], rate=[0.5, 0.9], between="linear")
    >>> for epoch in range(5):
    ...     schedule.step()  # after the batches of an epoch
    >>> schedule.settings, optimizer.param_groups[0]["lr"], round(model[0].fixed_keep_probability, 3)
    ({'lr': 0.02, 'rate': 0.7}, 0.02, 0.3)

    Args:
        optimizer: the optimiser whose step size follows ``lr``; None where ``lr`` is not given.
        model: a model or an `ELBO`, for ``rate`` and ``kl_weight``.
        at: the epochs that are named; the first is 0.
        lr: step sizes.
        rate: shares dropped.
        kl_weight: weights of the KL.
        between: what a setting is between two epochs that are named.

    Raises:
        ArgumentError: a value is out of range, or there is nothing for it to be set in.
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        model: nn.Module | None = None,
        *,
        at: Sequence[int],
        lr: Sequence[float] = (),
        rate: Sequence[float] = (),
        kl_weight: Sequence[float] = (),
        between: Between = "hold",
    ) -> None:
        given = {"lr": lr, "rate": rate, "kl_weight": kl_weight}
        self.at, self.between = tuple(at), between
        self.values = {name: tuple(map(float, values)) for name, values in given.items() if len(values)}
        check_values(self.at, self.values, between)
        self.epoch = 0
        self._optimizer, self._model = optimizer, None if model is None else weakref.ref(model)
        self._ratios: list[float] = []
        if "lr" in self.values:
            self._ratios = _ratios(optimizer)
        if "rate" in self.values and not any(_with_rate(model)):
            raise ArgumentError("rate is set in DropConnect and Dropout layers, and the model has none.")
        if "kl_weight" in self.values and not isinstance(model, ELBO):
            raise ArgumentError("kl_weight is set in an ELBO: give it as model.")
        self._apply()

    @property
    def settings(self) -> dict[str, float]:
        """The values of the epoch under way."""
        return {name: value_at(self.at, values, self.epoch, self.between) for name, values in self.values.items()}

    def step(self) -> None:
        """Go on to the next epoch."""
        self.epoch += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: the schedule and the epoch, as plain data."""
        values = {name: list(one) for name, one in self.values.items()}
        return {"epoch": self.epoch, "at": list(self.at), "between": self.between, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with its schedule.

        Raises:
            ArgumentError: the state is of other settings than this schedule's.
        """
        at, values = tuple(state["at"]), {name: tuple(map(float, one)) for name, one in state["values"].items()}
        if values.keys() != self.values.keys():
            theirs, ours = ", ".join(values), ", ".join(self.values)
            raise ArgumentError(f"the state is of a schedule of {theirs}; this one is of {ours}.")
        check_values(at, values, state["between"])
        self.epoch = check_count("epoch", state["epoch"], minimum=0)
        self.at, self.values, self.between = at, values, state["between"]
        self._apply()

    def _apply(self) -> None:
        settings, model = self.settings, None if self._model is None else self._model()
        if "lr" in settings:
            assert self._optimizer is not None
            for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = ratio * settings["lr"]
        if "rate" in settings:
            for module in _with_rate(model):
                _set_rate(module, settings["rate"])
        if "kl_weight" in settings and isinstance(model, ELBO):
            model.kl_weight = settings["kl_weight"]


def _ratios(optimizer: Optimizer | None) -> list[float]:
    """Each group's step size as a multiple of the first's."""
    if optimizer is None:
        raise ArgumentError("lr is set in an optimizer: give it.")
    sizes = [float(group["lr"]) for group in optimizer.param_groups]
    if not sizes[0] > 0.0:
        raise ArgumentError(f"the optimizer's first group must have a positive step size, got {sizes[0]}.")
    return [size / sizes[0] for size in sizes]


def _with_rate(model: nn.Module | None) -> Iterator[nn.Module]:
    """Modules that drop a fixed share."""
    if model is None:
        return
    yield from (layer for layer in masked_layers(model).values() if isinstance(layer, DropConnectLayer))
    yield from (module for module in model.modules() if isinstance(module, DROPOUTS))


def _set_rate(module: nn.Module, rate: float) -> None:
    if isinstance(module, DropConnectLayer):
        module.fixed_keep_probability = 1.0 - rate
    else:
        module.p = rate  # type: ignore[assignment]
