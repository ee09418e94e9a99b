"""Experiments that judge uncertainty: how good the probabilities are, and how they fare with little to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dropconnectpp.lab.config.corruptions import CORRUPTIONS
from dropconnectpp.lab.config.ensembles import MEMBERS
from dropconnectpp.lab.config.experiments import Experiment, by_size, of_the_paper
from dropconnectpp.lab.config.method import MethodName
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.config.small_data import EXAMPLES, SmallData

METHODS = ("none", "dropout", "dropconnect", "dropconnect++", "per-example")
FOREIGN = {"cifar10": "svhn", "cifar100": "svhn", "svhn": "cifar10", "fashion-mnist": "mnist", "mnist": "fashion-mnist"}
"""Whose images the networks of a data set should be unsure of, as the field has it."""
IN_COLOUR = ("cifar10", "cifar100", "svhn")
JUDGED = Evaluation(every=25, curve_samples=0, samples=(), shares=(), predictive_samples=30, judged=True)


def uncertainty(
    data: str,
    *,
    methods: Sequence[MethodName | str] = METHODS,
    repeats: int = 20,
    epochs: int | None = None,
    step_size: float | None = None,
    rate: float | None = None,
    root_seed: int = 0,
    foreign: str | None = None,
    together: bool = False,
) -> Experiment:
    """How good are the probabilities: by one pass, over drawn networks, of ensembles; on foreign and corrupted images.

    Without ``foreign`` the images are those of `FOREIGN`. Corruptions are of images in colour.
    """
    base = of_the_paper(
        "table1",
        data,
        methods=methods,
        repeats=repeats,
        epochs=epochs,
        step_size=step_size,
        rate=rate,
        root_seed=root_seed,
        together=together,
    )
    corruptions = CORRUPTIONS if data in IN_COLOUR else ()
    evaluation = replace(JUDGED, foreign=foreign or FOREIGN.get(data), corruptions=corruptions)
    protocols = tuple(replace(protocol, evaluation=evaluation) for protocol in base.protocols)
    return replace(base, protocols=protocols, ensembles=MEMBERS if repeats >= MEMBERS else 0)


def small_data(
    data: str,
    *,
    examples: Sequence[int] = EXAMPLES,
    methods: Sequence[MethodName | str] = METHODS,
    repeats: int = 20,
    epochs: int | None = None,
    step_size: float | None = None,
    rate: float | None = None,
    root_seed: int = 0,
    together: bool = False,
) -> Experiment:
    """How methods fare with few training examples. With all of them, 0, it has the networks of `uncertainty`."""
    base = uncertainty(
        data,
        methods=methods,
        repeats=repeats,
        epochs=epochs,
        step_size=step_size,
        rate=rate,
        root_seed=root_seed,
        together=together,
    )
    return replace(base, protocols=by_size(base.protocols, SmallData(examples=tuple(examples))))
