"""Judge uncertainty by the field's own tables: `evaluate` a model on a loader, `calibrate` it, or score tensors."""

from dropconnectpp.metrics.calibration import Calibration, calibrate
from dropconnectpp.metrics.classes import (
    Reliability,
    brier,
    ece,
    equal_counts,
    equal_width,
    nll,
)
from dropconnectpp.metrics.evaluation import evaluate
from dropconnectpp.metrics.ranking import aurc, auroc, fpr95, risk_coverage
from dropconnectpp.metrics.result import Evaluation
from dropconnectpp.metrics.values import crps_of_samples, interval_coverage, sharpness

__all__ = [
    "Calibration",
    "Evaluation",
    "Reliability",
    "aurc",
    "auroc",
    "brier",
    "calibrate",
    "crps_of_samples",
    "ece",
    "equal_counts",
    "equal_width",
    "evaluate",
    "fpr95",
    "interval_coverage",
    "nll",
    "risk_coverage",
    "sharpness",
]
