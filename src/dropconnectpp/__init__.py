"""DropConnect++ for any PyTorch model: a network that learns which of its connections to keep."""

from dropconnectpp import estimators, functional
from dropconnectpp.conversion import convert, plain_state_dict, to_dense
from dropconnectpp.draws import forced_masks, sampling
from dropconnectpp.elbo import ELBO, ELBOTerms, kl_divergence, named_kl, parameter_groups
from dropconnectpp.errors import DropConnectError
from dropconnectpp.export import load, save, to_onnx
from dropconnectpp.layers import (
    DropConnectConv1d,
    DropConnectConv2d,
    DropConnectConv3d,
    DropConnectLinear,
    DropConnectPPConv1d,
    DropConnectPPConv2d,
    DropConnectPPConv3d,
    DropConnectPPLinear,
)
from dropconnectpp.likelihoods import bernoulli, categorical, gaussian
from dropconnectpp.posterior import Posterior, posterior
from dropconnectpp.prediction import Prediction, predict
from dropconnectpp.pruning import prune

__all__ = [
    "ELBO",
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
    "Posterior",
    "Prediction",
    "bernoulli",
    "categorical",
    "convert",
    "estimators",
    "forced_masks",
    "functional",
    "gaussian",
    "kl_divergence",
    "load",
    "named_kl",
    "parameter_groups",
    "plain_state_dict",
    "posterior",
    "predict",
    "prune",
    "sampling",
    "save",
    "to_dense",
    "to_onnx",
]
