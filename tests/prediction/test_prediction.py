"""predict: exact where masks can be enumerated, honest about uncertainty, and polite to the model."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dropconnectpp as dcpp
from dropconnectpp import likelihoods
from dropconnectpp.errors import ArgumentError, NonFiniteError

DOUBLE = torch.float64


def classifier(*layers: nn.Module) -> nn.Sequential:
    """A model that knows its likelihood, as an ELBO leaves it."""
    model = nn.Sequential(*layers)
    likelihoods.remember(model, dcpp.categorical)
    return model


def tiny_model(activation: nn.Module | None = None) -> nn.Sequential:
    return classifier(
        dcpp.DropConnectPPLinear(2, 2, activation=activation, dtype=DOUBLE), nn.Linear(2, 3, dtype=DOUBLE)
    )


def all_masks(model: nn.Sequential) -> list[dict[str, Tensor]]:
    """Every mask of the first layer, equally likely at pi~ = 1/2."""
    found = []
    for bits in itertools.product([0, 1], repeat=6):
        values = torch.tensor(bits)
        found.append({"0.weight": values[:4].view(2, 2), "0.bias": values[4:]})
    return found


def test_average_of_activations_is_the_expectation_of_eq_17() -> None:
    model = tiny_model(nn.Tanh())
    x = torch.randn(4, 2, dtype=DOUBLE)
    masks = all_masks(model)
    with torch.no_grad(), dcpp.forced_masks(model, masks):
        found = dcpp.predict(model, x, num_samples=len(masks), average="activations").mean
    layer = model[0]
    expected = torch.zeros(4, 2, dtype=DOUBLE)
    for mask in masks:
        expected += torch.tanh(x @ (layer.weight * mask["0.weight"]).T + layer.bias * mask["0.bias"]) / len(masks)
    assert torch.allclose(found, torch.softmax(model[1](expected), 1), atol=1e-10)


def test_average_of_probabilities_is_the_predictive_mean() -> None:
    model = tiny_model(nn.Tanh())
    x = torch.randn(4, 2, dtype=DOUBLE)
    masks = all_masks(model)
    samples = []
    with torch.no_grad():
        for mask in masks:
            with dcpp.forced_masks(model, mask):
                samples.append(torch.softmax(model(x), 1))
        with dcpp.forced_masks(model, masks):
            found = dcpp.predict(model, x, num_samples=len(masks), average="probabilities")
    stack = torch.stack(samples)
    entropy = lambda p: -(p * p.log()).sum(-1)  # noqa: E731
    assert torch.allclose(found.probabilities, stack.mean(0), atol=1e-10)
    assert torch.allclose(found.standard_deviation, stack.std(0), atol=1e-10)
    assert torch.allclose(found.entropy, entropy(stack.mean(0)), atol=1e-10)
    assert torch.allclose(found.mutual_information, entropy(stack.mean(0)) - entropy(stack).mean(0), atol=1e-10)
    assert (found.mutual_information > 0).all()


def test_eval_mode_is_eq_19() -> None:
    model = tiny_model(nn.Tanh()).eval()
    with torch.no_grad():
        model[0].weight_logit.normal_()
    x = torch.randn(4, 2, dtype=DOUBLE)
    layer = model[0]
    hidden = torch.tanh(x @ (torch.sigmoid(layer.weight_logit) * layer.weight).T + 0.5 * layer.bias)
    assert torch.allclose(model(x), model[1](hidden), atol=1e-12)


@pytest.mark.parametrize("average", ["activations", "networks"])
def test_many_samples_approach_the_mean_network_of_a_linear_layer(average: str) -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2, activation=nn.Identity(), dtype=DOUBLE))
    x = torch.randn(5, 3, dtype=DOUBLE)
    count = 4000
    found = dcpp.predict(
        model, x, num_samples=count, average=average, likelihood=dcpp.gaussian(1.0),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    layer = model[0]
    error = 0.5 * torch.sqrt(x.square() @ layer.weight.square().T + layer.bias.square()) / count**0.5
    z = ((found.mean - model.eval()(x)) / error).detach().abs().max()
    assert z < 5.0
    assert found.entropy is None


@pytest.mark.parametrize("average", ["activations", "networks"])
def test_the_same_seed_gives_the_same_prediction(average: str) -> None:
    model = tiny_model(nn.ReLU())
    x = torch.randn(4, 2, dtype=DOUBLE)

    def run(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return dcpp.predict(model, x, num_samples=3, average=average, generator=generator).mean

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


@pytest.mark.parametrize("average", ["activations", "networks"])
def test_batchnorm_and_dropout_are_left_alone(average: str) -> None:
    model = classifier(nn.BatchNorm1d(2), dcpp.DropConnectPPLinear(2, 4, activation=nn.ReLU()), nn.Dropout(0.5))
    model[2].eval()  # a mixture of modes comes back as it was
    before = {k: v.clone() for k, v in model.state_dict().items()}
    masks = {"1.weight": torch.ones(4, 2), "1.bias": torch.ones(4)}
    with dcpp.forced_masks(model, masks):
        found = dcpp.predict(model, torch.randn(8, 2), num_samples=3, average=average)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model] == [True, True, False]
    if found.standard_deviation is not None:
        assert found.standard_deviation.abs().max() < 1e-6  # one mask, no dropout: nothing varies
    assert not found.mean.requires_grad


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self.seen:
                    self.seen.add(key)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        if key in self.seen:
            self.seen.remove(key)
            self.now -= size


@pytest.mark.parametrize("average", ["activations", "networks"])
def test_memory_does_not_grow_with_the_number_of_samples(average: str) -> None:
    model = classifier(dcpp.DropConnectPPLinear(64, 64, activation=nn.ReLU()))
    peaks = []
    for count in (2, 50):
        with LiveBytes() as watch:
            dcpp.predict(model, torch.randn(4, 64), num_samples=count, average=average)
        peaks.append(watch.peak)
    assert peaks[1] <= 1.5 * peaks[0]


def test_bernoulli_and_any_callable() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    x = torch.randn(5, 3)
    found = dcpp.predict(model, x, num_samples=4, average="probabilities", likelihood=dcpp.bernoulli)
    assert ((found.mean > 0) & (found.mean < 1)).all()
    assert found.mutual_information.shape == (5,)
    custom = dcpp.predict(model, x, num_samples=4, average="probabilities", likelihood=lambda o, t: o.sum(1))
    assert custom.entropy is None
    assert custom.standard_deviation.shape == (5, 2)


def test_further_inputs_and_options_reach_the_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = dcpp.DropConnectPPLinear(3, 2)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return scale * self.fc(a + b)

    inputs = torch.randn(2, 4, 3)
    found = dcpp.predict(Two(), *inputs, likelihood=dcpp.categorical, scale=0.0)
    assert torch.allclose(found.mean, torch.full((4, 2), 0.5))


def test_errors_name_the_rule() -> None:
    model = classifier(dcpp.DropConnectPPLinear(3, 2))
    x = torch.randn(4, 3)
    with pytest.raises(ArgumentError, match=r"averages what the activation gives, and 0 has none.*'networks'"):
        dcpp.predict(model, x, average="activations")
    with pytest.raises(ArgumentError, match="num_samples must be a whole number of at least 1, got 0"):
        dcpp.predict(model, x, num_samples=0, average="probabilities")
    with pytest.raises(ArgumentError, match="average must be one of"):
        dcpp.predict(model, x, average="luck")
    x[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="input 0 holds values that are not finite"):
        dcpp.predict(model, x, average="probabilities")
    assert model.training
