"""A tiny masked network and its plain twin: the oracle of the exact tests.

The expected log-likelihood is the twin's, summed over every mask with its probability, and
differentiated as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, kl_divergence
from torch.func import functional_call

import dropconnectpp as dcpp
from dropconnectpp.estimators import resolve
from dropconnectpp.layers.base import masked_layers

Linear, Conv1d, Conv2d = dcpp.DropConnectPPLinear, dcpp.DropConnectPPConv1d, dcpp.DropConnectPPConv2d
NUM_DATA = 7
LEARNED: dict[str, Any] = {"hyper": "learned", "alpha": 2.0, "beta": 0.7}
OPTIMAL: dict[str, Any] = {"hyper": "optimal"}
MARGINAL: dict[str, Any] = {"hyper": "marginal", "alpha": 2.0, "beta": 0.7}
DIRECT: dict[str, Any] = {"parameterisation": "probability"}
EXAMPLE: dict[str, Any] = {"mask": "example"}


def tie(first: nn.Module, last: nn.Module) -> None:
    """Share weights and all that is known of their gates; biases stay apart."""
    for name, parameter in first.named_parameters():
        if name.startswith("weight"):
            setattr(last, name, parameter)


def tied(layer: type[nn.Module], **options: Any) -> nn.Module:
    model = nn.Sequential(layer(2, 2, bias=False, **options), nn.Tanh(), layer(2, 2, **options))
    tie(model[0], model[2])
    return model


NETWORKS: dict[str, tuple[Callable[..., nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "two gates": (
        lambda **o: nn.Sequential(Linear(2, 1, bias=False, **o), nn.Tanh(), nn.Linear(1, 3)),
        lambda: nn.Sequential(nn.Linear(2, 1, bias=False), nn.Tanh(), nn.Linear(1, 3)),
        (2, 2),
    ),
    "three gates": (
        lambda **o: nn.Sequential(Linear(2, 1, activation=nn.Tanh(), **o), nn.Identity(), nn.Linear(1, 3)),
        lambda: nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 3)),
        (2, 2),
    ),
    "linear": (
        lambda **o: nn.Sequential(Linear(2, 2, **o), nn.Tanh(), nn.Linear(2, 3)),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)),
        (3, 2),
    ),
    "conv1d": (
        lambda **o: nn.Sequential(Conv1d(1, 1, 2, **o), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Conv1d(1, 1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2)),
        (2, 1, 4),
    ),
    "conv2d": (
        lambda **o: nn.Sequential(Conv2d(1, 1, 2, **o), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Conv2d(1, 1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)),
        (3, 1, 3, 3),
    ),
    "two layers": (
        lambda **o: nn.Sequential(Linear(2, 1, **o), nn.Tanh(), Linear(1, 2, bias=False, **o)),
        lambda: nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 2, bias=False)),
        (2, 2),
    ),
    "tied": (lambda **o: tied(Linear, **o), lambda: tied(nn.Linear), (2, 2)),
    "one layer": (lambda **o: nn.Sequential(Linear(2, 2, **o)), lambda: nn.Sequential(nn.Linear(2, 2)), (3, 2)),
    "multilinear": (  # linear in each gate: no activation, and a likelihood linear in the output
        lambda **o: nn.Sequential(Linear(2, 1, **o), Linear(1, 2, bias=False, **o)),
        lambda: nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2, bias=False)),
        (2, 2),
    ),
}


def log_softmax_likelihood(output: Tensor, target: Tensor) -> Tensor:
    return F.log_softmax(output, 1).gather(1, target[:, None])[:, 0]


def linear_likelihood(output: Tensor, target: Tensor) -> Tensor:
    return output[:, 0] - 0.3 * output[:, 1] * (1 + target)


def quadratic_likelihood(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target[:, None]).square().sum(1)


@dataclass
class Case:
    network: str
    estimator: Any = "bbvi"  # or one for each masked layer
    num_samples: int = 1
    training: bool = True
    kl_weight: float = 1.0
    kl_weights: tuple[float, ...] = ()  # each masked layer's own
    likelihood: Callable[..., Tensor] = dcpp.categorical
    masks: tuple[str, str] = ("batch", "batch")  # of each masked layer, where the estimators are several
    pruned: bool = False  # the first layer's first weight and last bias
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make, make_plain, shape = NETWORKS[self.network]
        generator = torch.Generator().manual_seed(11)
        several = isinstance(self.estimator, tuple)
        self.model = make(estimator="bbvi" if several else self.estimator, **self.options).double()
        self.plain = make_plain().double()
        layers = masked_layers(self.model).values()
        for layer, weight in zip(layers, self.kl_weights, strict=True) if self.kl_weights else ():
            layer.kl_weight = weight
        for layer, estimator, mask in zip(layers, self.estimator, self.masks, strict=True) if several else ():
            layer.estimator, layer.mask = resolve(estimator), mask
        if self.pruned:
            self.model[0].keep_only("weight", torch.arange(4).view(2, 2) > 0)
            self.model[0].keep_only("bias", torch.arange(2) < 1)
        for name, parameter in self.model.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            spread = {"probability": 0.2 + 0.6 * noise}.get(name.rpartition("_")[2], 3 * noise - 1.5)
            parameter.data.copy_(spread)
        self.x = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.y = torch.arange(shape[0]) % 2
        self.elbo = dcpp.ELBO(self.model, self.likelihood, NUM_DATA, self.num_samples, self.kl_weight)
        self.elbo.train(self.training)
        for buffer in self.elbo.moments.buffers():  # what earlier minibatches might have left
            buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.1)
            buffer[0] *= -1.5
        self.moments = {name: buffer.clone() for name, buffer in self.elbo.moments.named_buffers()}

    @property
    def arms(self) -> int:
        return 2 if any(layer.antithetic for layer in masked_layers(self.model).values()) else 1

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def synapses(self) -> list[tuple[list[str], Any, str]]:
        """Each masked parameter once: the names it goes by, a layer that has it, its name there."""
        found: dict[Any, tuple[list[str], Any, str]] = {}
        for owner, layer in masked_layers(self.model).items():
            for name in layer.synapse_names:
                found.setdefault(layer.tie(name), ([], layer, name))[0].append(f"{owner}.{name}")
        return list(found.values())

    def run(self, masks: list[dict[str, Tensor]]) -> tuple[dcpp.ELBOTerms, dict[str, Tensor]]:
        """The terms and the loss's gradient by every parameter, from the same moments each time."""
        for name, buffer in self.elbo.moments.named_buffers():
            buffer.copy_(self.moments[name])
        with dcpp.forced_masks(self.model, masks):
            terms = self.elbo(self.x, target=self.y)
        return terms, self.gradients(terms.loss)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        names, values = zip(*self.parameters.items(), strict=True)
        grads = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        return dict(zip(names, grads, strict=True))

    # -------------------------------------------------------------------------------- the oracle

    def log_likelihood(self, gates: dict[str, Tensor]) -> Tensor:
        """The plain twin's mean log-likelihood with its weights gated."""
        weights = {name: p for name, p in self.parameters.items() if name in self.plain.state_dict()}
        for keys, layer, name in self.synapses():
            weights |= {key: getattr(layer, name) * gates[keys[0]] for key in keys}
        likelihood = log_softmax_likelihood if self.likelihood is dcpp.categorical else self.likelihood
        output = functional_call(self.plain, weights, self.x, tie_weights=False)
        return likelihood(output, self.y).mean()

    def expected_log_likelihood(self) -> Tensor:
        pis = [layer.keep_probability(name) for _, layer, name in self.synapses()]
        total = torch.zeros((), dtype=torch.float64)
        for bits in itertools.product((0.0, 1.0), repeat=sum(pi.numel() for pi in pis)):
            flat = torch.tensor(bits, dtype=torch.float64).split([pi.numel() for pi in pis])
            masks = [part.view_as(pi) for part, pi in zip(flat, pis, strict=True)]
            q = torch.stack([(z * pi + (1 - z) * (1 - pi)).prod() for z, pi in zip(masks, pis, strict=True)]).prod()
            gates = {keys[0]: z for (keys, _, _), z in zip(self.synapses(), masks, strict=True)}
            total = total + q * self.log_likelihood(gates)
        return total

    def kl(self, weighted: bool = False) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for _, layer, name in self.synapses():
            total = total + (layer.kl_weight if weighted else 1.0) * divergence(layer, name)
        return total

    def exact_loss(self) -> Tensor:
        return -self.expected_log_likelihood() + self.kl_weight / NUM_DATA * self.kl(weighted=True)

    # ------------------------------------------------------------------------- every possible draw

    def draws(self) -> list[tuple[float, list[dict[str, Tensor]]]]:
        """Every draw of one sample with its probability; two mappings where masks come in pairs."""
        gates, shapes = [], []
        for keys, layer, name in self.synapses():
            pi = layer.keep_probability(name).detach()
            pi = pi.expand(len(self.x), *pi.shape) if layer.mask == "example" else pi
            shapes.append((keys, pi.shape))
            gates += [outcomes(p, self.arms, layer.antithetic) for p in pi.flatten().tolist()]
        found = []
        for combination in itertools.product(*gates):
            passes = []
            for arm in range(self.arms):
                flat = torch.tensor([z[arm] for _, z in combination]).split([s.numel() for _, s in shapes])
                parts = zip(shapes, flat, strict=True)
                passes.append({key: z.view(shape) for (keys, shape), z in parts for key in keys})
            found.append((math.prod(p for p, _ in combination), passes))
        return found

    def expectation(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The ELBO's and the gradient's mean over every draw of all samples."""
        value = torch.zeros((), dtype=torch.float64)
        total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        terms = []
        for samples in itertools.product(self.draws(), repeat=self.num_samples):
            probability = math.prod(p for p, _ in samples)
            found, gradients = self.run([masks for _, passes in samples for masks in passes])
            terms.append(torch.stack([found.loss.detach(), found.elbo, found.kl]))
            value += probability * found.elbo
            for name, gradient in gradients.items():
                total[name] += probability * gradient
        losses, elbos, kls = torch.stack(terms, 1)
        torch.testing.assert_close(losses, -elbos / NUM_DATA, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(kls, self.kl().expand_as(kls), rtol=1e-10, atol=1e-10)
        return value, total


def divergence(layer: Any, name: str) -> Tensor:
    """KL of a parameter's synapses by torch.distributions: from p(z) where pi is summed out, else over (z, pi)."""
    pi = torch.sigmoid(layer.logit(name)).flatten()
    kept = torch.ones_like(pi) if layer.kept(name) is None else layer.kept(name).flatten()
    prior = Beta(*torch.tensor([layer.alpha, layer.beta], dtype=torch.float64))
    if layer.hyper == "marginal":
        return (kept * kl_divergence(Bernoulli(pi), Bernoulli(prior.mean))).sum()
    member = groups(getattr(layer, name).shape, layer.sharing) * kept  # (G, n)
    if layer.hyper == "learned":
        a, b = (F.softplus(getattr(layer, f"{name}_{s}")).flatten() for s in ("alpha", "beta"))
        some = kept  # a pruned synapse's own q(pi) is out of the bound too
    else:
        a, b = layer.alpha + member @ pi, layer.beta + member @ (1 - pi)
        some = member.sum(1).clamp(max=1)
    log_pi, log_rest = (member.T @ (torch.digamma(v) - torch.digamma(a + b)) for v in (a, b))
    gates = kept * (Bernoulli(pi).entropy() + pi * log_pi + (1 - pi) * log_rest)
    return (some * kl_divergence(Beta(a, b), prior)).sum() - gates.sum()


def groups(shape: torch.Size, sharing: str) -> Tensor:
    """Which synapses share one pi, (G, n): a layer's, an output's or an input's; its biases among themselves."""
    places = torch.arange(shape.numel()).view(shape)
    if sharing == "synapse":
        of = places
    elif sharing == "layer" or len(shape) == 1:
        of = torch.zeros_like(places)
    else:
        axis = {"unit": 0, "input": 1}[sharing]
        of = torch.arange(shape[axis]).view(*[-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)
    return F.one_hot(of.flatten()).T.double()


def outcomes(p: float, arms: int, antithetic: bool) -> list[tuple[float, tuple[int, ...]]]:
    found = [(p, (1,) * arms), (1 - p, (0,) * arms)]
    if antithetic:
        apart = min(p, 1 - p)
        found = [(apart, (1, 0)), (apart, (0, 1)), (max(0.0, 2 * p - 1), (1, 1)), (max(0.0, 1 - 2 * p), (0, 0))]
    return [(probability, masks) for probability, masks in found if probability > 0]


def assert_unbiased(case: Case) -> None:
    value, gradients = case.expectation()
    loss = case.exact_loss()
    torch.testing.assert_close(value, -NUM_DATA * loss.detach(), rtol=1e-11, atol=1e-10)
    assert_gradients(gradients, case.gradients(loss))


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def gate_names(case: Case) -> list[str]:
    return [name for name in case.parameters if name.endswith(("_logit", "_probability"))]


def others(case: Case, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that every estimator gets right: those of all but the gates."""
    return {name: gradients[name] for name in gradients if name not in gate_names(case)}


def relative_bias(case: Case, found: dict[str, Tensor]) -> float:
    """The bias of the gates' gradient as a share of the likelihood's exact one, in norms."""
    exact = case.gradients(case.exact_loss())
    truth = case.gradients(case.expected_log_likelihood())
    error = torch.cat([(found[name] - exact[name]).flatten() for name in gate_names(case)])
    return float(error.norm() / torch.cat([truth[name].flatten() for name in gate_names(case)]).norm())
