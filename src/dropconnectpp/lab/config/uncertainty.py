"""Experiments that judge uncertainty: how good the probabilities are, and how they fare with little to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dropconnectpp.lab.config.corruptions import CORRUPTIONS
from dropconnectpp.lab.config.ensembles import MEMBERS
from dropconnectpp.lab.config.experiments import Experiment, by_size, of_the_paper
from dropconnectpp.lab.config.method import MethodName
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.config.small_data import SmallData

METHODS = ("none", "dropout", "dropconnect", "dropconnect++", "per-example")
FOREIGN = {"cifar10": "svhn", "cifar100": "svhn", "svhn": "cifar10", "fashion-mnist": "mnist", "mnist": "fashion-mnist"}
"""Whose images the networks of a data set should be unsure of, as the field has it."""
IN_COLOUR = ("cifar10", "cifar100", "svhn")
JUDGED = Evaluation(every=25, curve_samples=0, samples=(), shares=(), predictive_samples=30, judged=True)


def uncertainty(
    data: str,
    *,
    fewer: SmallData | None = None,
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

    Without ``foreign`` the images are those of `FOREIGN`. Corruptions are of images in colour. With ``fewer`` all that
    is asked with few training examples; two epochs of these are too few steps to choose a step size by, so it is
    chosen on held-out data, with the rate.
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
        together=together or (fewer is not None and step_size is None),
    )
    corruptions = CORRUPTIONS if data in IN_COLOUR else ()
    evaluation = replace(JUDGED, foreign=foreign or FOREIGN.get(data), corruptions=corruptions)
    protocols = tuple(replace(protocol, evaluation=evaluation) for protocol in base.protocols)
    if fewer is not None:
        protocols = by_size(protocols, fewer)
    return replace(base, protocols=protocols, ensembles=MEMBERS if repeats >= MEMBERS else 0)
