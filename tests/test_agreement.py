"""convert(example_input=...) finds every layer whose gates a pass does not use, and names it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.conversion.hosting import Host
from dropconnectpp.errors import ConversionError
from dropconnectpp.layers.base import MaskedLayer


class Reader(nn.Module):
    """Reads one layer's weight, as Mamba's kernels do, and calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.linear(self.called(x), self.read.weight, self.read.bias), (4,))


class Autoencoder(nn.Module):
    """Calls its encoder, and decodes with the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.other = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"decoded": F.linear(torch.tanh(self.encoder(self.other(x) * scale)), self.encoder.weight.t())}


class Noisy(nn.Module):
    """Draws in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x))


NO_HOSTS = {"mask": "example"}  # gates where a weight is read need one mask for the batch


@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_a_layer_whose_weight_is_read_has_its_gates_there_or_is_named(kind: str) -> None:
    model, x = Reader(), torch.randn(2, 4)
    converted = dcpp.convert(model, kind=kind, example_input=x).eval()
    assert isinstance(converted.read, Host)
    assert isinstance(converted.called, MaskedLayer)
    torch.testing.assert_close(converted(x), dcpp.to_dense(converted)(x))
    with pytest.raises(ConversionError, match=r"did not ask for the gates of 'read'\. Either .* exclude=\['read'\]"):
        dcpp.convert(model, kind=kind, example_input=x, **NO_HOSTS)
    converted = dcpp.convert(model, exclude="read", kind=kind, example_input=x, **NO_HOSTS)
    assert type(converted.read) is nn.Linear


def test_a_layer_that_is_called_and_read_has_one_mask_for_both_or_is_named() -> None:
    example = {"x": torch.randn(2, 4), "scale": 2.0}
    converted = dcpp.convert(Autoencoder(), example_input=example).eval()
    assert isinstance(converted.encoder, Host)
    assert isinstance(converted.other, MaskedLayer)
    with torch.no_grad():
        converted.encoder.connections.weight.weight_logit.normal_()
    torch.testing.assert_close(converted(**example), dcpp.to_dense(converted)(**example))
    with dcpp.sampling(converted, torch.Generator().manual_seed(0)):
        drawn = converted(**example)
    folded = dcpp.to_dense(converted, "sample", generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, folded(**example))
    with pytest.raises(ConversionError, match=r"the weights of 'encoder' are also read as they are"):
        dcpp.convert(Autoencoder(), example_input=example, **NO_HOSTS)
    dcpp.convert(Autoencoder(), include="other", example_input=example, **NO_HOSTS)


def test_a_layer_that_nobody_calls_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match="'unused'"):
        dcpp.convert(model, inplace=True, example_input=torch.randn(1, 2))


@pytest.mark.parametrize("options", [NO_HOSTS, {}], ids=["layers", "hosts"])
def test_a_model_refused_in_place_is_the_one_it_was(options: dict[str, Any]) -> None:
    model = Reader().train()
    if not options:
        model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    model.read.eval()
    layers, state, x = dict(model.named_modules()), copy.deepcopy(model.state_dict()), torch.randn(2, 4)
    numbers = torch.get_rng_state()
    with pytest.raises(ConversionError):
        dcpp.convert(model, inplace=True, example_input=x, **options)
    assert dict(model.named_modules()) == layers
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert (model.training, model.called.training, model.read.training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), numbers)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (lambda: nn.Linear(4, 2), torch.randn(3, 4)),
        (tied, torch.randn(3, 4)),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Dropout()), torch.randn(2, 2, 5, 5)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
        (Noisy, torch.randn(3, 4)),
        (lambda: nn.Linear(4, 4).bfloat16(), torch.randn(3, 4).bfloat16()),
        (lambda: nn.Linear(4, 4).double(), torch.randn(3, 4).double()),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": "example"}, {"granularity": "unit"}, {"kind": "dropconnect", "activation": nn.ReLU()}],
    ids=["plain", "example", "unit", "fixed"],
)
@pytest.mark.filterwarnings("ignore:convert left plain:UserWarning")
def test_models_that_use_their_gates_pass(make: Any, example: Tensor, options: dict[str, Any]) -> None:
    model = dcpp.convert(make().train(), example_input=example, **options)
    assert all(module.training for module in model.modules())


def test_pruned_layers_are_compared_as_they_are() -> None:
    model = dcpp.prune(dcpp.convert(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), include="0"), keep=0.5)
    dcpp.convert(model, example_input=torch.randn(2, 6))
