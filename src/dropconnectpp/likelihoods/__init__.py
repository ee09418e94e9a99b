"""Log-likelihoods log p(d | Z) of one example given the network's output, in nats."""

from dropconnectpp.likelihoods.classes import Bernoulli, Categorical, bernoulli, categorical
from dropconnectpp.likelihoods.memory import describe, from_description, remember, remembered
from dropconnectpp.likelihoods.outputs import LogLikelihood, tensor_of
from dropconnectpp.likelihoods.regression import (
    Gaussian,
    HeteroscedasticGaussian,
    LearnedNoise,
    Noise,
    Poisson,
    StudentT,
    gaussian,
    heteroscedastic_gaussian,
    poisson,
    student_t,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LearnedNoise",
    "LogLikelihood",
    "Noise",
    "Poisson",
    "StudentT",
    "bernoulli",
    "categorical",
    "describe",
    "from_description",
    "gaussian",
    "heteroscedastic_gaussian",
    "poisson",
    "remember",
    "remembered",
    "student_t",
    "tensor_of",
]
