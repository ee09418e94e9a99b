"""Prediction with uncertainty: what networks drawn from the learned connectivity say, and how much they disagree."""

from dropconnectpp.prediction.monte_carlo import predict
from dropconnectpp.prediction.result import Prediction

__all__ = ["Prediction", "predict"]
