"""Every estimator's expected gradient against the truth, by forcing each mask of a tiny network in turn.

A case is a constructor of a masked network and its plain twin, the oracle: the expected log-likelihood
is the twin's, summed over every mask with its probability, and differentiated as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Beta, kl_divergence
from torch.func import functional_call

import dropconnectpp as dcpp
from dropconnectpp.draws import Gates, masked_layers, running
from dropconnectpp.estimators import BBVI, Concrete, Eq16, resolve, running_coefficient, update_moments

Linear, Conv1d, Conv2d = dcpp.DropConnectPPLinear, dcpp.DropConnectPPConv1d, dcpp.DropConnectPPConv2d
NUM_DATA = 7


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small gain nothing from threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------- the cases


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

    def kl(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for _, layer, name in self.synapses():
            pi = torch.sigmoid(layer.logit(name))
            kept = 1 if layer.kept(name) is None else layer.kept(name)
            if layer.hyper == "learned":
                a, b = (F.softplus(getattr(layer, f"{name}_{s}")) for s in ("alpha", "beta"))
            else:
                a, b = layer.alpha + pi, layer.beta + 1 - pi
            log_pi, log_rest = (torch.digamma(v) - torch.digamma(a + b) for v in (a, b))
            total = total - (kept * (Bernoulli(pi).entropy() + pi * log_pi + (1 - pi) * log_rest)).sum()
            prior = Beta(*torch.tensor([layer.alpha, layer.beta], dtype=torch.float64))
            total = total + (kept * kl_divergence(Beta(a, b), prior)).sum()
        return total

    def exact_loss(self) -> Tensor:
        return -self.expected_log_likelihood() + self.kl_weight / NUM_DATA * self.kl()

    # ------------------------------------------------------------------------- every possible draw

    def draws(self) -> list[tuple[float, list[dict[str, Tensor]]]]:
        """Every draw of one sample with its probability; two mappings where masks come in pairs."""
        gates, shapes = [], []
        for keys, layer, name in self.synapses():
            pi = layer.keep_probability(name).detach()
            pi = pi.expand(len(self.x), *pi.shape) if layer.mask == "example" else pi
            shapes.append((keys, pi.shape))
            gates += [outcomes(p, self.elbo._arms, layer.antithetic) for p in pi.flatten().tolist()]
        found = []
        for combination in itertools.product(*gates):
            passes = []
            for arm in range(self.elbo._arms):
                flat = torch.tensor([z[arm] for _, z in combination]).split([s.numel() for _, s in shapes])
                parts = zip(shapes, flat, strict=True)
                passes.append({key: z.view(shape) for (keys, shape), z in parts for key in keys})
            found.append((math.prod(p for p, _ in combination), passes))
        return found

    def expectation(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The ELBO's and the gradient's mean over every draw of all samples."""
        value = torch.zeros((), dtype=torch.float64)
        total = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for samples in itertools.product(self.draws(), repeat=self.num_samples):
            probability = math.prod(p for p, _ in samples)
            terms, gradients = self.run([masks for _, passes in samples for masks in passes])
            torch.testing.assert_close(terms.loss, -terms.elbo / NUM_DATA, rtol=1e-12, atol=1e-12)
            value += probability * terms.elbo
            for name, gradient in gradients.items():
                total[name] += probability * gradient
        return value, total


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


# ------------------------------------------------------------------------------ unbiased estimators

UNBIASED: dict[str, Any] = {
    "running": BBVI(),
    "per-synapse": BBVI(per_synapse=True),
    "mean-network": BBVI(baseline="mean-network"),
    "leave-one-out": BBVI(baseline="leave-one-out"),
    "disarm": "disarm",
}
LEARNED: dict[str, Any] = {"hyper": "learned", "alpha": 2.0, "beta": 0.7}
DIRECT: dict[str, Any] = {"parameterisation": "probability"}
EXAMPLE: dict[str, Any] = {"mask": "example"}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"network": "linear"},
    "linear, eval, learned, probability": {
        "network": "linear",
        "training": False,
        "kl_weight": 3.0,
        "options": LEARNED | DIRECT,
    },
    "conv2d, eval, prior": {"network": "conv2d", "training": False, "options": {"alpha": 0.5, "beta": 3.0}},
    "conv2d, learned": {"network": "conv2d", "options": {"hyper": "learned"}},
    "two layers": {"network": "two layers", "kl_weight": 0.3, "options": {"alpha": 2.0} | DIRECT},
    "tied": {"network": "tied"},
    "pruned": {"network": "linear", "pruned": True},
    "pruned, eval, learned, probability": {
        "network": "linear",
        "training": False,
        "pruned": True,
        "options": LEARNED | DIRECT,
    },
    "L=3": {"network": "two gates", "num_samples": 3, "options": LEARNED},
    "L=2, probability": {"network": "three gates", "num_samples": 2, "options": DIRECT},
    "L=2, conv1d": {"network": "conv1d", "num_samples": 2, "kl_weight": 2.0},
    "example": {"network": "three gates", "options": EXAMPLE | {"beta": 2.0}},
    "example, conv1d, learned": {"network": "conv1d", "training": False, "options": EXAMPLE | LEARNED | DIRECT},
    "example, L=2": {"network": "two gates", "num_samples": 2, "kl_weight": 0.5, "options": EXAMPLE},
}


def applies(name: str, estimator: str) -> bool:
    """Leave-one-out needs other samples; pairs of masks have three outcomes a gate, at times too many."""
    if estimator == "leave-one-out":
        return SETTINGS[name].get("num_samples", 1) > 1
    return estimator != "disarm" or name not in ("linear", "L=2, probability", "example, L=2")


GRID = [
    pytest.param(setting, estimator, id=f"{estimator}: {name}")
    for name, setting in SETTINGS.items()
    for estimator in UNBIASED
    if applies(name, estimator)
]


@pytest.mark.parametrize(("setting", "estimator"), GRID)
def test_expected_value_and_gradient_are_exact(setting, estimator):
    assert_unbiased(Case(estimator=UNBIASED[estimator], **setting))


@pytest.mark.parametrize(
    ("estimators", "masks"),
    [
        ((BBVI(), BBVI(baseline="mean-network")), ("example", "batch")),
        ((BBVI(), BBVI(baseline="mean-network")), ("batch", "example")),
        ((BBVI(per_synapse=True), "disarm"), ("example", "batch")),
        (("disarm", BBVI(baseline="mean-network")), ("batch", "batch")),
        (("disarm", "disarm"), ("batch", "batch")),
    ],
    ids=str,
)
def test_layers_with_different_estimators_share_a_model(estimators, masks):
    assert_unbiased(Case("two layers", estimators, masks=masks))


@pytest.mark.parametrize("options", [{}, EXAMPLE, DIRECT])
@pytest.mark.parametrize("per_synapse", [False, True])
def test_without_earlier_minibatches_the_kl_alone_moves_the_gates(options, per_synapse):
    case = Case("three gates", BBVI(per_synapse=per_synapse), options=options)
    case.moments = {name: torch.zeros_like(buffer) for name, buffer in case.moments.items()}
    expected = case.gradients(case.kl() / NUM_DATA)
    for _, masks in case.draws():
        _, found = case.run(masks)
        assert_gradients(found, {name: expected[name] for name in gate_names(case)})


class OwnReward(BBVI):
    """Leaks: the baseline is the sample's own reward, as when Eq. (10) is pooled over a layer."""

    def coefficients(self, reward, baseline):
        return reward.mean(1) - reward.mean(1)


class MeanOfAll(BBVI):
    """Leaks: the mean over samples, the sample's own reward among them."""

    def coefficients(self, reward, baseline):
        return reward.mean(1) - reward.mean((0, 1))


class FoldedFirst(BBVI):
    """Leaks: the moments take in this minibatch before they are used."""

    def coefficients(self, reward, baseline):
        own = reward.mean(1)
        return running_coefficient(own, update_moments(baseline, own.mean(0), torch.full_like(own[0], 0.01), 0.9))


@pytest.mark.parametrize("leak", [OwnReward, MeanOfAll, FoldedFirst])
def test_a_leaking_baseline_is_caught(leak):
    with pytest.raises(AssertionError, match="logit"):
        assert_unbiased(Case("two gates", leak(), num_samples=2))


# --------------------------------------------------------------------------- Eq. (16) as printed


def printed_loss(case: Case, masks: dict[str, Tensor], varpi: Tensor, generator: torch.Generator) -> Tensor:
    """Minus Eq. (16)'s objective over N, whose gradient by W, pi~, alpha~ and beta~ the equation prints."""
    score = torch.zeros((), dtype=torch.float64)
    for keys, layer, name in case.synapses():
        a, b = layer.hyper_posterior(name)
        heads, tails = (torch._standard_gamma(v.detach(), generator=generator) for v in (a, b))
        score = score + Bernoulli(layer.keep_probability(name)).log_prob(masks[keys[0]].double()).sum()
        score = score + Beta(a, b).log_prob(heads / (heads + tails)).sum()
    return -case.log_likelihood(masks) + case.kl_weight / NUM_DATA * case.kl() + varpi * score


@pytest.mark.parametrize("baseline", ["running", "same-sample"])
def test_eq16_is_the_printed_gradient_for_one_sample(baseline):
    case = Case("three gates", Eq16(baseline=baseline), kl_weight=2.0, options=LEARNED)
    case.elbo.generator = torch.Generator()
    for _, (masks,) in case.draws():
        case.elbo.generator.manual_seed(3)
        _, found = case.run([masks])
        varpi = case.log_likelihood(masks).detach()
        if baseline == "running":
            varpi = case.moments["0/layer"][0] / case.moments["0/layer"][1]
        assert_gradients(found, case.gradients(printed_loss(case, masks, varpi, torch.Generator().manual_seed(3))))


@pytest.mark.parametrize("options", [LEARNED, LEARNED | EXAMPLE, LEARNED | DIRECT])
def test_eq16_carries_no_data_or_the_data_with_the_wrong_sign(options):
    for baseline in ("running", "same-sample"):
        case = Case("three gates", Eq16(baseline=baseline), options=options)
        exact = case.gradients(case.exact_loss())
        kl = case.gradients(case.kl() / NUM_DATA)
        _, found = case.expectation()
        for name in gate_names(case):
            data = exact[name] - kl[name]
            wrong = kl[name] if baseline == "running" else kl[name] - data
            torch.testing.assert_close(found[name], wrong, rtol=0, atol=1e-10)
            assert data.abs().min() > 1e-3
        weights = [name for name in exact if name.endswith((".weight", ".bias"))]
        assert_gradients(found, {name: exact[name] for name in weights})


# --------------------------------------------------------------------------- biased estimators


@pytest.mark.parametrize("options", [{}, EXAMPLE, LEARNED, DIRECT])
def test_straight_through_is_exact_where_the_likelihood_is_linear_in_each_gate(options):
    assert_unbiased(Case("multilinear", "straight-through", likelihood=linear_likelihood, options=options))


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_straight_through_errs_by_the_curvature_in_the_gates(network):
    biases = {}
    for scale in (1.0, 0.1, 0.01):
        case = Case(network, "straight-through")
        case.model[0].weight.data *= scale
        case.model[0].bias.data *= scale
        biases[scale] = relative_bias(case, case.expectation()[1])
    assert 0.5 < biases[1.0] < 2.0  # 1.44 and 0.69 of the gradient itself, where tanh saturates
    assert biases[0.1] < 0.2  # 0.049 and 0.18
    assert biases[0.01] < 0.15 * biases[0.1]  # of first order in the weights


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_straight_through_is_the_slope_in_each_gate(network):
    case = Case(network, "straight-through")
    _, found = case.expectation()
    exact = case.gradients(case.exact_loss())
    assert_gradients(found, others(case, exact))
    expected = case.gradients(case.kl() / NUM_DATA)
    for probability, (masks,) in case.draws():  # the slope in each gate at the masks, times d pi~ / d logit
        gates = {keys[0]: masks[keys[0]].double().requires_grad_() for keys, _, _ in case.synapses()}
        slopes = torch.autograd.grad(case.log_likelihood(gates), list(gates.values()))
        for (keys, layer, name), slope in zip(case.synapses(), slopes, strict=True):
            pi = layer.keep_probability(name).detach()
            expected[f"{keys[0]}_logit"] = expected[f"{keys[0]}_logit"] - probability * slope * pi * (1 - pi)
    assert_gradients(found, {name: expected[name] for name in gate_names(case)})


def constant_noise(monkeypatch, value):
    monkeypatch.setattr(torch, "randn", lambda shape, *, dtype, **_: torch.full(shape, value, dtype=dtype))


def quadrature(monkeypatch, case, order):
    """The gradient's mean over the noise of `local`, the same for all outputs: so outputs must not interact."""
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(order))
    total = {name: torch.zeros_like(p) for name, p in case.parameters.items()}
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        constant_noise(monkeypatch, node)
        for name, gradient in case.gradients(case.elbo(case.x, target=case.y).loss).items():
            total[name] += weight * gradient
    return total


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_local_has_the_moments_of_every_mask(network):
    case = Case(network, "local")
    layer = case.model[0]
    mean, deviation = layer.gaussian_moments(case.x)
    outputs, weights = [], []
    with torch.no_grad():
        for probability, (masks,) in case.draws():
            with dcpp.forced_masks(case.model, masks):
                outputs.append(layer(case.x))
            weights.append(probability)
    outputs, weights = torch.stack(outputs), torch.tensor(weights, dtype=torch.float64)
    average = torch.tensordot(weights, outputs, 1)
    torch.testing.assert_close(mean, average, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        deviation.square(), torch.tensordot(weights, (outputs - average) ** 2, 1), rtol=0, atol=1e-10
    )
    with running({layer: Gates("gaussian", seed=4)}):  # noise of its own for each example and output
        noise = torch.randn(mean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        torch.testing.assert_close(layer(case.x), mean + deviation * noise)


@pytest.mark.parametrize("options", [{}, LEARNED, DIRECT])
def test_local_is_exact_where_the_likelihood_is_quadratic_in_the_outputs(monkeypatch, options):
    case = Case("one layer", "local", likelihood=quadratic_likelihood, options=options)
    assert_gradients(quadrature(monkeypatch, case, 2), case.gradients(case.exact_loss()))


def test_local_errs_where_the_gated_sum_is_not_gaussian(monkeypatch):
    case = Case("two gates", "local")
    assert 0.01 < relative_bias(case, quadrature(monkeypatch, case, 60)) < 0.05  # 0.024


def relaxed_loss(case: Case, noise: list[Tensor], temperature: float) -> Tensor:
    gates = {
        keys[0]: torch.sigmoid((layer.logit(name) + torch.log1p(-u) - torch.log(u)) / temperature)
        for (keys, layer, name), u in zip(case.synapses(), noise, strict=True)
    }
    return -case.log_likelihood(gates)


@pytest.mark.parametrize("options", [{}, LEARNED, DIRECT])
@pytest.mark.parametrize("temperature", [2 / 3, 0.1])
def test_concrete_is_the_relaxed_gradient_for_one_draw_of_noise(options, temperature):
    case = Case("linear", Concrete(temperature=temperature), options=options)
    case.elbo.generator = torch.Generator().manual_seed(8)
    found = case.gradients(case.elbo(case.x, target=case.y).loss)
    generator = torch.Generator().manual_seed(8)
    noise = [torch.rand(s, dtype=torch.float64, generator=generator) for s in ((2, 2), (2,))]
    assert_gradients(found, case.gradients(relaxed_loss(case, noise, temperature) + case.kl() / NUM_DATA))


def test_concrete_tends_to_the_mask_as_it_cools():
    gaps = []
    for temperature in (1.0, 0.1, 0.01, 1e-4):
        case = Case("linear", Concrete(temperature=temperature))
        case.elbo.generator = torch.Generator().manual_seed(8)
        relaxed = case.elbo(case.x, target=case.y).output
        case.elbo.eval()  # binary masks from the same noise
        case.elbo.generator.manual_seed(8)
        gaps.append(float((relaxed - case.elbo(case.x, target=case.y).output).detach().abs().max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-9


def test_concrete_errs_less_as_it_cools():
    case = Case("two gates", "concrete")
    points = (torch.arange(30, dtype=torch.float64) + 0.5) / 30
    biases = []
    for temperature in (2 / 3, 0.3):
        grid = [relaxed_loss(case, [torch.stack([u, v]).view(1, 2)], temperature) for u in points for v in points]
        found = case.gradients(torch.stack(grid).mean() + case.kl() / NUM_DATA)
        biases.append(relative_bias(case, found))
    assert 0.2 < biases[0] < 0.3  # 0.250
    assert biases[1] < 0.5 * biases[0]  # 0.100
