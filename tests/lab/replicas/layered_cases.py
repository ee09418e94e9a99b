"""A small network given as layers, every method that makes one small, and stacks of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from tiny_cases import tiny

from dropconnectpp.lab.config.layers import Layer
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training
from dropconnectpp.lab.config.pruning import L0, FixedSupport, GradualMagnitude, OneShot, Plan, Pruning, SparseVD
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.network import Unit

LAYERS = (
    Layer(kind="convolution", units=3, size=3, padding=1, gated=True),
    Layer(kind="pool", size=2),
    Layer(kind="activation"),
    Layer(kind="dense", units=6, gated=True),
    Layer(kind="activation", function="tanh"),
    Layer(kind="dense"),
)
PROTOCOL = Protocol(
    data="tiny",
    architecture=Architecture(layers=LAYERS),
    training=Training(step_size=0.01, optimiser="adam", schedule="second-half", batch_size=16, epochs=5),
    evaluation=Evaluation(every=2),
)
"""Four steps an epoch: twenty in all. The last layer has no gates."""
METHODS: dict[str, Method | Pruning] = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.3),
    "dropconnect": Method(kind="dropconnect", rate=0.3),
    "gradual": GradualMagnitude(keep=0.25, every=2, noise="dropconnect", rate=0.2),
    "by layer": GradualMagnitude(keep=0.3, every=3, ranking="layer", noise="dropout", rate=0.2),
    "one-shot": OneShot(keep=0.2, floor=0.1),
    "random": FixedSupport(shares=(0.5, 0.1)),
    "plan": Plan(keep=0.3, noise=0.2),
    "price": Plan(price=3.0, hyper="optimal", fix_at=1.0, logit_lr=0.3),
    "by size": Plan(price=3.0, support="magnitude", logit_lr=0.3),
    "any": Plan(price=3.0, support="random", logit_lr=0.3),
    "no learning": Plan(keep=0.2, learning=False),
    "groups": Plan(price=3.0, granularity="input", logit_lr=0.3),
    "units": Plan(price=3.0, granularity="unit", logit_lr=0.3),
    "sparse vd": SparseVD(kl_weight=2.0, log_variance=-4.0),
    "vd ranked": SparseVD(keep=0.1, log_variance=-4.0),
    "l0": L0(weight=2.0),
    "l0 ranked": L0(keep=0.1),
}


def unit(name: str, replica: int = 0, protocol: Protocol = PROTOCOL) -> Unit:
    """One network of a method."""
    method = METHODS[name]
    changed = {"method": method} if isinstance(method, Method) else {"pruning": method}
    return Unit(replace(protocol, **changed), replica)


def stack_of(*units: Unit, device: str = "cpu", graph: bool = True) -> LayeredStack:
    """A stack on noise of three classes."""
    return LayeredStack(units, tiny(), torch.device(device), graph=graph)


def train(stack: LayeredStack, epochs: int | None = None) -> LayeredStack:
    """To the end, or so many epochs."""
    for _ in range(stack.protocol.training.epochs if epochs is None else epochs):
        stack.train_epoch()
    return stack
