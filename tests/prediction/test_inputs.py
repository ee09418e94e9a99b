"""What predict takes: tensors, tuples, dictionaries, loaders; in bounded memory; and what it refuses."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ShapeError
from dropconnectpp.prediction import progress
from dropconnectpp.prediction.progress import Progress

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
Z = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(10) % 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = dcpp.DropConnectPPLinear(3, 2)
        self.sizes: list[int] = []

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        self.sizes.append(len(a))
        return scale * self.fc(a + b)


def run(model: nn.Module, *inputs: Any, **options: Any) -> dcpp.Prediction:
    options = {"num_samples": 5, "likelihood": dcpp.categorical, **options}
    return dcpp.predict(model, *inputs, generator=torch.Generator().manual_seed(0), **options)


def test_every_form_gives_the_same() -> None:
    model = Two()
    expected = run(model, X, Z)
    forms = {
        "tuple": ((X, Z),),
        "dictionary": ({"a": X, "b": Z},),
        "loader": (DataLoader(TensorDataset(X, Z, Y), batch_size=4),),
        "loader without targets": (DataLoader(TensorDataset(X, Z), batch_size=4),),
        "loader of dictionaries": (
            [{"a": X[i : i + 3], "b": Z[i : i + 3], "labels": Y} for i in (0, 3, 6, 9)].__iter__(),
        ),
    }
    for name, inputs in forms.items():
        found = run(model, *inputs)
        for field in ("mean", "entropy", "mutual_information", "standard_deviation"):
            torch.testing.assert_close(
                getattr(found, field), getattr(expected, field), msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_model_of_one_input_leaves_a_loaders_target_out() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    expected = run(model, X)
    for data in (TensorDataset(X, Y), TensorDataset(X)):
        torch.testing.assert_close(run(model, DataLoader(data, batch_size=3)).mean, expected.mean)
    torch.testing.assert_close(run(model, DataLoader(X, batch_size=3)).mean, expected.mean)


def test_networks_are_the_same_in_every_batch_and_batches_bounded() -> None:
    model = Two()
    whole = run(model, X, Z, batch_size=None, keep_samples=True)
    assert model.sizes == [10] * 5
    model.sizes.clear()
    parts = run(model, X, Z, batch_size=4, keep_samples=True)
    assert model.sizes == [4] * 5 + [4] * 5 + [2] * 5
    torch.testing.assert_close(parts.samples, whole.samples)
    torch.testing.assert_close(parts.mutual_information, whole.mutual_information)


def test_inputs_without_a_common_first_axis_go_through_whole() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = dcpp.DropConnectPPLinear(3, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return torch.zeros(len(x), 2).index_add(0, edges[1], self.fc(x)[edges[0]])

    edges = torch.randint(10, (2, 30))
    torch.testing.assert_close(run(Graph(), X, edges, batch_size=4).entropy.shape, torch.Size([10]))


def test_an_output_whose_rows_are_no_examples_is_refused() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = dcpp.DropConnectPPLinear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sum(0, keepdim=True)

    with pytest.raises(ArgumentError, match=r"4 examples gave an output of 1 rows. Use batch_size=None"):
        run(Summed(), X, batch_size=4)


def test_output_objects_are_their_logits() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, as_dictionary: bool) -> None:
            super().__init__()
            self.fc = dcpp.DropConnectPPLinear(3, 2)
            self.as_dictionary = as_dictionary

        def forward(self, x: Tensor) -> Any:
            logits = self.fc(x)
            return {"logits": logits, "hidden": x} if self.as_dictionary else Output(logits)

    for as_dictionary in (True, False):
        model = Wrapped(as_dictionary)
        torch.testing.assert_close(run(model, X).mean, run(nn.Sequential(model.fc), X).mean)
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=10)
        elbo(X, Y).loss.backward()
        assert dcpp.predict(model, X, num_samples=2).mean.shape == (10, 2)


def test_an_output_that_is_no_tensor_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(
        ShapeError, match="needs a model that gives a tensor, or an object with a tensor `logits`, got tup"
    ):
        run(Pair(), X)


def test_a_plain_model_is_one_network() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9))
    found = run(model, X)
    assert found.num_samples == 1
    assert found.mutual_information.max() == 0
    torch.testing.assert_close(found.mean, torch.softmax(model[0](X), 1).detach())


# ------------------------------------------------------------------------------------------ likelihoods


def test_the_likelihood_of_training_is_known_and_otherwise_asked_for() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    with pytest.raises(ArgumentError, match=r"does not know which likelihood.*likelihood=dropconnectpp.categorical"):
        dcpp.predict(model, X)
    dcpp.ELBO(model, dcpp.gaussian(), num_data=10)
    assert dcpp.predict(model, X).noise_deviation is not None
    assert dcpp.predict(model, X, likelihood=dcpp.bernoulli).noise_deviation is None
    with pytest.raises(ArgumentError, match="likelihood must be callable"):
        dcpp.predict(model, X, likelihood="gaussian")


def test_one_output_is_never_a_softmax() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 1))
    with pytest.raises(ArgumentError, match="categorical over one output gives it probability 1"):
        dcpp.predict(model, X, likelihood=dcpp.categorical)


def test_misspelt_options_name_the_nearest() -> None:
    model = Two()
    with pytest.raises(ArgumentError, match=r"predict has no option 'num_sample'.*Did you mean 'num_samples'"):
        dcpp.predict(model, X, Z, num_sample=5)
    with pytest.raises(ArgumentError, match="Did you mean 'scale'"):
        dcpp.predict(model, X, Z, scal=5)
    with pytest.raises(ArgumentError, match=r"predict has no option 'qqq'.*predict has num_samples"):
        dcpp.predict(model, X, Z, qqq=5)
    with pytest.raises(ArgumentError, match="predict needs inputs"):
        dcpp.predict(model)
    with pytest.raises(ArgumentError, match="batch_size must be a whole number of at least 1, got 0"):
        dcpp.predict(model, X, Z, batch_size=0)
    with pytest.raises(ArgumentError, match="the loader gave no batch"):
        run(model, iter([]))


# --------------------------------------------------------------------------------------------- progress


def test_the_bar_waits_and_then_says_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("predict", 10, shown=True) as bar:
        for _ in range(10):
            now[0] += 0.5
            bar.step()
    shown = [line.strip() for line in capsys.readouterr().err.split("\r") if line.strip()]
    assert shown[0] == "predict [############                  ] 4/10  2 s, 3 s left"
    assert shown[-1] == "predict [##############################] 10/10  5 s, 0 s left"
    assert len(shown) == 8


def test_the_bar_counts_where_the_length_is_not_known() -> None:
    bar = Progress("predict", None, shown=True)
    bar.done = 7
    assert bar.line(3.2) == "predict  7  3 s"


@pytest.mark.parametrize(("shown", "terminal", "on"), [(None, False, False), (None, True, True), (False, True, False)])
def test_nothing_is_shown_outside_a_terminal(
    monkeypatch: pytest.MonkeyPatch, shown: bool | None, terminal: bool, on: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    run(Two(), X, Z, progress=shown)
    assert ("predict [" in stream.getvalue()) == on
