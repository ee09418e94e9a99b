"""Stacks of regression networks: their written-out step against the library's layers, and each apart from the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab.config.uci import Kind, Setting, Training
from dropconnectpp.lab.replicas.regression import Networks, Noise, Problem, gradients, prior_logits, start, train

SETTINGS = {
    "plain": [Setting(0.0, 0.3), Setting(0.0, 3.0)],
    "mc-dropout": [Setting(0.3, 0.3), Setting(0.1, 3.0)],
    "dropconnect": [Setting(0.3, 0.3), Setting(0.1, 3.0)],
    "dropconnect++": [Setting(0.3, 0.3), Setting(0.1, 3.0)],
}
HIDDEN, BATCH = 7, 11
SHORT = Training(hidden=HIDDEN, steps=25, folds=1, batch=BATCH)


def problems(count: int = 3, inputs: int = 4) -> list[Problem]:
    found = []
    for k in range(count):
        generator = np.random.default_rng(k)
        x = generator.normal(3.0, 2.0, (20 + 5 * k, inputs))
        found.append(Problem((k, 0), x, 10.0 + np.sin(x[:, 0]) + 0.1 * generator.normal(size=len(x))))
    return found


def spread(kind: str, count: int = 3) -> list[list[Setting]]:
    return [[one] * count for one in SETTINGS[kind]]


def rattled(networks: Networks) -> Networks:
    """Biases, noise and keep probabilities are all alike at the start."""
    torch.manual_seed(0)
    networks.weights.add_(0.1 * torch.randn_like(networks.weights))
    networks.log_noise.add_(0.3 * torch.randn_like(networks.log_noise))
    if networks.logits is not None:
        networks.logits.add_(torch.randn_like(networks.logits))
    return networks


def as_module(networks: Networks, place: int) -> nn.Sequential:
    """One network of the stack as ordinary layers of the library."""
    setting = [one for row in networks.settings for one in row][place]
    sizes = networks.shape.inputs, networks.shape.hidden, 1
    options: dict[str, Any] = {}
    kind: Any = nn.Linear
    if networks.kind == "dropconnect":
        kind, options = dcpp.DropConnectLinear, {"keep_probability": 1.0 - setting.rate}
    elif networks.kind == "dropconnect++":
        kind = dcpp.DropConnectPPLinear
        options = {
            "alpha": 1.0 - setting.rate,
            "beta": setting.rate,
            "hyper": "marginal",
            "estimator": "straight-through",
        }
    model = nn.Sequential(kind(*sizes[:2], **options), nn.ReLU(), kind(*sizes[1:], **options))
    with torch.no_grad():
        for values, suffix in ((networks.weights, ""), (networks.logits, "_logit")):
            if values is not None:
                for name, value in named(networks, values, place).items():
                    model.get_parameter(f"{name}{suffix}").copy_(value)
    return model


def named(networks: Networks, values: Tensor, place: int) -> dict[str, Tensor]:
    """Numbers (M, K) of one network by the names of the layers' parameters."""
    first, bias, second, last = (part[place] for part in networks.shape.parts(values))
    return {"0.weight": first.T, "0.bias": bias[0], "2.weight": second.T, "2.bias": last[0]}


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_gradients_are_those_of_the_librarys_elbo(kind: Kind) -> None:
    given = problems()
    networks = rattled(start(kind, spread(kind), given, HIDDEN))
    torch.manual_seed(1)
    x, y = torch.randn(6, BATCH, 4), torch.randn(6, BATCH)
    counts = torch.tensor([float(len(p.y)) for p in given] * 2).unsqueeze(1)
    precision = torch.tensor([one.precision for row in networks.settings for one in row]).unsqueeze(1)
    gradients(networks, Noise(networks, "noise"), x, y, counts, precision)
    again = Noise(networks, "noise")
    again.gated()
    units = again.units(BATCH)
    for place in range(6):
        model = as_module(networks, place)
        likelihood = dcpp.gaussian(start=float(networks.log_noise[place].exp()))
        inputs = x[place]
        if units is not None:  # a fixed factor in the place of dropout
            inputs = inputs * units[0][place]
            model.insert(2, Factors(units[1][place]))
        elbo = dcpp.ELBO(model, likelihood, num_data=int(counts[place]))
        if again.mask is not None:
            with dcpp.forced_masks(model, named(networks, again.mask, place)):
                loss = elbo(inputs, target=y[place].unsqueeze(1)).loss
        else:
            loss = elbo(inputs, target=y[place].unsqueeze(1)).loss
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        loss = loss + 0.5 * precision[place] / counts[place] * sum(w.square().sum() for w in weights)
        loss.backward()
        found = named(networks, networks.weights.grad, place)
        if networks.logits is not None:
            logits = named(networks, networks.logits.grad, place)
            found |= {f"{name}_logit": value for name, value in logits.items()}
        for name, value in found.items():
            own = name.replace("2.", "3.") if units is not None else name
            torch.testing.assert_close(value, model.get_parameter(own).grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(networks.log_noise.grad[place], likelihood.log_scale.grad[0], rtol=1e-4, atol=1e-6)


class Factors(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factors


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_network_does_not_know_its_neighbours(kind: Kind) -> None:
    given = problems()
    together = train(kind, spread(kind), given, SHORT)
    for g, setting in enumerate(SETTINGS[kind]):
        for p, problem in enumerate(given):
            alone = train(kind, [[setting]], [problem], SHORT)
            place = g * len(given) + p
            torch.testing.assert_close(alone.weights[0], together.weights[place], rtol=1e-4, atol=1e-5)
            x = torch.tensor(problem.x[:5])
            drawn = together.draw(torch.stack([torch.tensor(one.x[:5]) for one in given]), 4)
            torch.testing.assert_close(alone.draw(x.unsqueeze(0), 4)[:, 0, 0], drawn[:, g, p], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(together.of_setting(g).noise[0], together.noise[g])


@pytest.mark.parametrize("kind", SETTINGS)
def test_methods_share_starts_and_differ_in_their_draws(kind: Kind) -> None:
    given = problems()
    networks, plain = start(kind, spread(kind), given, HIDDEN), start("plain", spread("plain"), given, HIDDEN)
    torch.testing.assert_close(networks.weights, plain.weights)
    assert not torch.equal(networks.weights[0], networks.weights[1])
    torch.testing.assert_close(networks.weights[:3], networks.weights[3:])
    drawn = networks.draw(torch.zeros(3, 2, 4), 6)
    assert drawn.shape == ((1 if kind == "plain" else 6), 2, 3, 2)
    assert kind == "plain" or float(drawn.std(0).min()) > 0


def test_a_draw_is_the_mean_network_on_average() -> None:
    given = problems(1)
    networks = rattled(start("dropconnect++", [[SETTINGS["dropconnect++"][0]]], given, HIDDEN))
    noise, counts = Noise(networks, "draws"), torch.zeros_like(networks.weights)
    for _ in range(4000):
        noise.gated()
        counts += noise.mask
    torch.testing.assert_close(counts / 4000, torch.sigmoid(networks.logits), rtol=0, atol=0.05)


def test_what_is_learned_is_in_the_targets_unit() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 2))
    y = 1000.0 + 50.0 * (2.0 * x[:, 0] - x[:, 1] + 0.5 * generator.normal(size=400))
    training = Training(hidden=10, steps=600, folds=1)
    networks = train("plain", [[Setting(0.0, 0.1)]], [Problem((0,), x, y)], training)
    assert float(networks.noise) == pytest.approx(25.0, rel=0.15)
    outputs = networks.draw(torch.tensor(x).unsqueeze(0), 3)[0, 0, 0]
    assert float((outputs - torch.tensor(y)).square().mean().sqrt()) == pytest.approx(25.0, rel=0.15)


def test_columns_that_do_not_change_are_left_out() -> None:
    problem = problems(1)[0]
    x = np.concatenate([problem.x, np.full((len(problem.x), 1), 0.1)], 1)
    networks = train("plain", [[Setting(0.0, 0.1)]], [Problem((0, 0), x, problem.y)], SHORT)
    moved = x.copy()
    moved[:, -1] = 5.0
    both = [networks.draw(torch.tensor(one).unsqueeze(0), 1) for one in (x, moved)]
    torch.testing.assert_close(both[0], both[1])
    assert torch.isfinite(both[0]).all()


def test_the_prior_of_a_rate() -> None:
    torch.testing.assert_close(prior_logits([[Setting(0.1, 1.0)]]), torch.tensor([[9.0]]).log())
