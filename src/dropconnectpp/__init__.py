"""DropConnect++ for any PyTorch model: a network that learns which of its connections to keep.

Names are imported when they are first used, so that what needs no torch (reports, data sets) starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dropconnectpp import estimators, functional, likelihoods, metrics
    from dropconnectpp.compaction.reduction import compact
    from dropconnectpp.compaction.sparse import to_sparse
    from dropconnectpp.conversion import convert, coverage, plain_state_dict, to_dense
    from dropconnectpp.errors import DropConnectError
    from dropconnectpp.inference.divergence import kl_divergence, named_kl
    from dropconnectpp.inference.elbo import ELBO, ELBOTerms
    from dropconnectpp.inference.epoch_schedule import EpochSchedule
    from dropconnectpp.inference.parameter_groups import parameter_groups
    from dropconnectpp.inference.plan import SparsityPlan
    from dropconnectpp.io import load, save, to_onnx
    from dropconnectpp.layers.public import (
        DropConnectConv1d,
        DropConnectConv2d,
        DropConnectConv3d,
        DropConnectLinear,
        DropConnectPPConv1d,
        DropConnectPPConv2d,
        DropConnectPPConv3d,
        DropConnectPPLinear,
    )
    from dropconnectpp.layers.sampling import forced_masks, sampling
    from dropconnectpp.likelihoods import (
        bernoulli,
        categorical,
        gaussian,
        heteroscedastic_gaussian,
        poisson,
        student_t,
    )
    from dropconnectpp.metrics import Calibration, Evaluation, calibrate, evaluate
    from dropconnectpp.posterior_summary import Posterior, posterior
    from dropconnectpp.prediction import Prediction, predict
    from dropconnectpp.presets import PRESETS
    from dropconnectpp.pruning import prune

__version__ = "0.2.0"
"""The only place that says it: pyproject.toml reads it from here."""

__all__ = [
    "ELBO",
    "PRESETS",
    "Calibration",
    "DropConnectConv1d",
    "DropConnectConv2d",
    "DropConnectConv3d",
    "DropConnectError",
    "DropConnectLinear",
    "DropConnectPPConv1d",
    "DropConnectPPConv2d",
    "DropConnectPPConv3d",
    "DropConnectPPLinear",
    "ELBOTerms",
    "EpochSchedule",
    "Evaluation",
    "Posterior",
    "Prediction",
    "SparsityPlan",
    "bernoulli",
    "calibrate",
    "categorical",
    "compact",
    "convert",
    "coverage",
    "estimators",
    "evaluate",
    "forced_masks",
    "functional",
    "gaussian",
    "heteroscedastic_gaussian",
    "kl_divergence",
    "likelihoods",
    "load",
    "metrics",
    "named_kl",
    "parameter_groups",
    "plain_state_dict",
    "poisson",
    "posterior",
    "predict",
    "prune",
    "sampling",
    "save",
    "student_t",
    "to_dense",
    "to_onnx",
    "to_sparse",
]

_MODULES = {
    "compaction.reduction": ("compact",),
    "compaction.sparse": ("to_sparse",),
    "conversion": ("convert", "coverage", "plain_state_dict", "to_dense"),
    "inference.divergence": ("kl_divergence", "named_kl"),
    "inference.elbo": ("ELBO", "ELBOTerms"),
    "inference.epoch_schedule": ("EpochSchedule",),
    "inference.parameter_groups": ("parameter_groups",),
    "inference.plan": ("SparsityPlan",),
    "errors": ("DropConnectError",),
    "estimators": (),
    "functional": (),
    "io": ("load", "save", "to_onnx"),
    "layers": tuple(name for name in __all__ if name.endswith(("Linear", "1d", "2d", "3d"))),
    "layers.sampling": ("forced_masks", "sampling"),
    "likelihoods": ("bernoulli", "categorical", "gaussian", "heteroscedastic_gaussian", "poisson", "student_t"),
    "metrics": ("Calibration", "Evaluation", "calibrate", "evaluate"),
    "posterior_summary": ("Posterior", "posterior"),
    "prediction": ("Prediction", "predict"),
    "presets": ("PRESETS",),
    "pruning": ("prune",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
