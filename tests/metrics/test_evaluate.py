"""`evaluate`: what it measures, in one table and one figure, batch by batch by the same networks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn import metrics as sk
from stack_cases import METHODS, settings, stack_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryCalibrationError, MulticlassCalibrationError

import dropconnectpp as dcpp
from dropconnectpp import metrics
from dropconnectpp.errors import ArgumentError, MissingPackageError, ShapeError
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.modules import to_module
from dropconnectpp.lab.replicas.network import Unit

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (90,), generator=torch.Generator().manual_seed(1))
FOREIGN = 3 * torch.randn(40, 4, generator=torch.Generator().manual_seed(2))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(dcpp.DropConnectPPLinear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def run(model: nn.Module, data: Any, ood: Any = None, **options: Any) -> metrics.Evaluation:
    options = {"likelihood": dcpp.categorical, "num_samples": 7, "generator": seeded(), **options}
    return dcpp.evaluate(model, data, ood, **options)


def predictions(model: nn.Module, x: Tensor, **options: Any) -> dcpp.Prediction:
    """By the networks that `run` draws."""
    seed = int(torch.randint(2**62, (), generator=seeded()))
    options = {"likelihood": dcpp.categorical, "num_samples": 7, **options}
    return dcpp.predict(model, x, generator=torch.Generator().manual_seed(seed), **options)


def test_classes_are_measured_as_others_measure_them(model: nn.Module) -> None:
    found = run(model, (X, Y), {"far": FOREIGN}, bins=6)
    expected = predictions(model, X)
    p = expected.probabilities.double().numpy()
    p /= p.sum(1, keepdims=True)
    assert found["accuracy"] == pytest.approx(100 * sk.accuracy_score(Y, p.argmax(1)))
    assert found["nll"] == pytest.approx(sk.log_loss(Y, p), rel=1e-5)
    assert found["brier"] == pytest.approx(sk.brier_score_loss(Y.numpy(), p, scale_by_half=False), rel=1e-5)
    ece = MulticlassCalibrationError(3, n_bins=6)(expected.probabilities, Y)
    assert found["ece"] == pytest.approx(100 * float(ece), rel=1e-4)
    assert found["adaptive_ece"] == pytest.approx(100 * metrics.ece(expected.probabilities, Y, 6, adaptive=True))
    confidence, guess = expected.probabilities.max(1)
    assert found["aurc"] == pytest.approx(100 * metrics.aurc(1 - confidence.double(), (guess != Y).double()))
    foreign = predictions(model, FOREIGN)
    truth = np.r_[np.zeros(90), np.ones(40)]
    for name, field in (("entropy", "entropy"), ("mutual information", "mutual_information")):
        pair = [getattr(one, field) for one in (expected, foreign)]
        assert found[f"auroc, {name} of far"] == pytest.approx(sk.roc_auc_score(truth, torch.cat(pair)), rel=1e-6)
        assert found[f"fpr95, {name} of far"] == pytest.approx(100 * metrics.fpr95(*pair))
    assert len(found) == 10
    assert len(list(found)) == 10


def test_standard_errors_are_those_of_the_mean(model: nn.Module) -> None:
    found = run(model, DataLoader(TensorDataset(X, Y), batch_size=11))
    each = -predictions(model, X).log_prob(Y)
    assert found.figures["nll"].error == pytest.approx(float(each.std() / 90**0.5), rel=1e-4)


def test_batches_change_nothing(model: nn.Module) -> None:
    whole = run(model, (X, Y), FOREIGN)
    forms = [
        (DataLoader(TensorDataset(X, Y), batch_size=13), DataLoader(TensorDataset(FOREIGN), batch_size=9)),
        ([{"input": X[i : i + 45], "labels": Y[i : i + 45]} for i in (0, 45)].__iter__(), (FOREIGN, torch.ones(40))),
    ]
    for data, ood in forms:
        found = run(model, data, ood)
        assert found == pytest.approx(dict(whole), rel=1e-5)
        assert found.counts == whole.counts == {"": 90, "ood": 40}
    assert run(model, (X, Y), FOREIGN, batch_size=8) == pytest.approx(dict(whole), rel=1e-5)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    model.train()
    model[1].eval()
    run(model, (X, Y))
    assert [part.training for part in model] == [True, False, True]
    assert torch.is_grad_enabled()


def test_yes_and_no(model: nn.Module) -> None:
    y = (torch.rand(90, 3, generator=seeded()) < 0.3).float()
    found = run(model, (X, y), likelihood=dcpp.bernoulli, bins=8)
    p = predictions(model, X, likelihood=dcpp.bernoulli).mean.flatten()
    flat = y.flatten()
    assert found["nll"] == pytest.approx(sk.log_loss(flat, p.double()), rel=1e-5)
    assert found["brier"] == pytest.approx(sk.brier_score_loss(flat, p.double()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * sk.accuracy_score(flat, p > 0.5))
    assert found["ece"] == pytest.approx(100 * float(BinaryCalibrationError(n_bins=8)(p, flat.long())), rel=1e-4)
    with pytest.raises(ArgumentError, match="must be 0 or 1"):
        run(model, (X, y + 0.5), likelihood=dcpp.bernoulli)


def test_each_pixel_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(dcpp.DropConnectPPConv2d(1, 3, 3, padding=1))
    x, y = torch.randn(5, 1, 4, 6), torch.randint(3, (5, 4, 6))
    found = run(model, (x, y), torch.randn(4, 1, 4, 6))
    p = predictions(model, x).mean.movedim(1, -1).flatten(0, -2).double()
    p = p / p.sum(1, keepdim=True)
    assert found["nll"] == pytest.approx(sk.log_loss(y.flatten(), p), rel=1e-5)
    assert found.counts == {"": 5, "ood": 4}


def test_real_values(model: nn.Module) -> None:
    y = torch.randn(90, 3, generator=seeded())
    found = run(model, (X, y), FOREIGN, likelihood=dcpp.gaussian(0.8), level=0.6)
    expected = predictions(model, X, likelihood=dcpp.gaussian(0.8))
    low, high = expected.interval(0.6)
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(y.flatten(), expected.mean.flatten()), rel=1e-5)
    assert found["nll"] == pytest.approx(float(-expected.log_prob(y).mean()), rel=1e-5)
    assert found["crps"] == pytest.approx(float(expected.crps(y).mean()), rel=1e-5)
    assert found["coverage"] == pytest.approx(100 * metrics.interval_coverage(low, high, y))
    assert found["sharpness"] == pytest.approx(metrics.sharpness(low, high), rel=1e-5)
    far = predictions(model, FOREIGN, likelihood=dcpp.gaussian(0.8))
    pair = [one.model_deviation.mean(1) for one in (expected, far)]
    assert found["auroc, model deviation of ood"] == pytest.approx(metrics.auroc(*pair))
    assert "inside the 60% interval" in str(found)
    assert float(found.panels.pit.sum()) == pytest.approx(1.0)


def test_intervals_of_the_true_noise_hold_their_share() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model[0].weight)
    torch.manual_seed(4)
    y = torch.distributions.StudentT(4.0).sample((600, 1))
    found = run(model, (torch.ones(600, 1), y), likelihood=dcpp.student_t(1.0, df=4.0))
    assert found["coverage"] == pytest.approx(90.0, abs=3.5)
    assert float(found.panels.pit.max()) == pytest.approx(0.05, abs=0.03)
    counts = torch.poisson(torch.full((4000, 1), 2.5), generator=seeded())
    nn.init.constant_(model[0].weight, float(np.log(2.5)))
    found = run(model, (torch.ones(4000, 1), counts), likelihood=dcpp.poisson())
    assert found["rmse"] == pytest.approx(2.5**0.5, rel=0.05)
    assert found["coverage"] > 88.0


def test_a_likelihood_of_ones_own_is_all_there_is(model: nn.Module) -> None:
    def laplace(output: Tensor, target: Tensor) -> Tensor:
        return (-(output - target).abs() - np.log(2.0)).sum(1)

    y = torch.randn(90, 3)
    found = run(model, (X, y), likelihood=laplace)
    logs = torch.stack([laplace(o, y) for o in predictions(model, X, likelihood=laplace, keep_samples=True).outputs])
    assert dict(found) == pytest.approx({"nll": float(-(torch.logsumexp(logs, 0) - np.log(7)).mean())}, rel=1e-5)
    with pytest.raises(ArgumentError, match="nothing to draw"):
        found.plot()


def test_it_is_the_laboratorys_own_figure() -> None:
    stack = stack_of(Unit(settings(METHODS["none"]), 0), Unit(settings(METHODS["none"]), 1))
    stack.train_epoch()
    measured = evaluation.final(stack, Evaluation(samples=(0,), bins=6, predictive_samples=1))
    images, labels = stack.examples.test_images, stack.examples.test_labels
    for row, expected in enumerate(measured):
        network = to_module(stack, row)
        inputs = stack.examples.standardise(images, stack.dtype)
        found = run(network, (inputs, labels), bins=6)
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
        assert found["nll"] == pytest.approx(expected["nll"], rel=1e-5)
        assert found["brier"] == pytest.approx(expected["brier"], rel=1e-5)
        assert found["ece"] == pytest.approx(100 * expected["ece"], rel=1e-4)


# ---------------------------------------------------------------------------------------- what is shown


def test_the_table_names_everything(model: nn.Module) -> None:
    text = str(run(model, (X, Y), {"far": FOREIGN, "noise": FOREIGN}))
    assert text.startswith("90 examples, 7 networks, categorical\n")
    for part in (
        "accuracy",
        "negative log-likelihood",
        "Brier score",
        "AURC",
        "far: 40 foreign examples",
        "AUROC, ent",
    ):
        assert part in text
    assert text.count("FPR95") == 4
    assert " ± " in text


@pytest.mark.parametrize(("likelihood", "panels"), [(dcpp.categorical, 3), (dcpp.gaussian(1.0), 2)])
def test_the_figure_has_a_panel_for_each_thing(model: nn.Module, likelihood: Any, panels: int) -> None:
    y = Y if panels == 3 else torch.randn(90, 3)
    figure = run(model, (X, y), FOREIGN, likelihood=likelihood).plot()
    assert isinstance(figure, Figure)
    assert len(figure.axes) == panels
    assert all(axes.get_xlabel() and (axes.lines or axes.patches) for axes in figure.axes)
    figure.canvas.draw()


def test_a_figure_without_matplotlib_says_what_to_install(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(model, (X, Y))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        found.plot()


# -------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ((X,), {}, ArgumentError, "A batch has no target"),
        (X, {}, ArgumentError, "A batch has no target"),
        ((X, Y[:5]), {}, ShapeError, "as many, got 90, 5"),
        ([], {}, ArgumentError, "Expected a loader"),
        (3, {}, ArgumentError, "got int"),
        (iter(()), {}, ArgumentError, "the loader gave no batch"),
        ((X, Y), {"ood": {"far": iter(())}}, ArgumentError, "the loader of far gave no batch"),
        ((X, Y), {"likelihood": None}, ArgumentError, "does not know which likelihood"),
        ((X, Y), {"likelihood": dcpp.gaussian(1.0)}, ShapeError, r"targets of shape \(90, 3\), got \(90,\)"),
        ((X, Y.unsqueeze(1)), {}, ShapeError, r"classes of shape \(90,\)"),
        ((X, Y + 1), {}, ArgumentError, "from 0 to 2, got 1 to 3"),
        ((X, Y), {"level": 1.5}, ArgumentError, "level"),
        ((X, Y), {"num_samples": 0}, ArgumentError, "num_samples"),
        ((X, Y), {"average": "mean"}, ArgumentError, "average must be one of"),
    ],
)
def test_bad_input_is_named(
    model: nn.Module, data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(model, data, **options)


def test_an_unknown_figure_names_the_known_ones(model: nn.Module) -> None:
    with pytest.raises(KeyError, match="there are accuracy, nll"):
        run(model, (X, Y))["acuracy"]
