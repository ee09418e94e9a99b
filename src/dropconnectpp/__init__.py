"""DropConnect++ for any PyTorch model: a network that learns which of its connections to keep."""

from dropconnectpp import estimators, functional
from dropconnectpp.draws import forced_masks, sampling
from dropconnectpp.elbo import ELBO, ELBOTerms, kl_divergence, named_kl, parameter_groups
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
