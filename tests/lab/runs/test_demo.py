"""What the demo trains and measures: nobody has a head start, shares are met, the test set chooses nothing."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_cases import tiny
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.runs.demo import Settings, measuring, training

EPOCHS = 2


@pytest.fixture(scope="module")
def images() -> training.Images:
    return training.Images.of(tiny("tiny", train=320, test=60, side=8, seed=4))


def test_every_method_starts_from_the_same_weights_and_sees_the_same_minibatches(images, monkeypatch):
    seen: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def fit(name: str) -> Any:
        def fake(
            model: nn.Module, loss: Any, images: training.Images, epochs: int, seed: int, lr: float, *_: Any
        ) -> None:
            order = torch.Generator().manual_seed(seed)
            weights = [layer.weight.detach().clone() for layer in model if hasattr(layer, "weight")]
            seen[name] = torch.cat([one.flatten() for one in weights]), [torch.randperm(320, generator=order)]

        return fake

    methods = {"dense": (), "with_posterior": (), "planned": (0.1,), "gradual": (0.1,)}
    for name, keep in methods.items():
        with monkeypatch.context() as patch:
            patch.setattr(training, "fit", fit(name))
            getattr(training, name)(images, EPOCHS, 3, *keep)
    first, order = seen["dense"]
    for weights, others in seen.values():
        assert torch.equal(weights, first)
        assert torch.equal(others[0], order[0])


def test_the_order_of_examples_depends_on_the_seed_alone(images):
    def batches(seed: int, model: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found.append(y)
            return nn.functional.cross_entropy(model(x), y)

        training.fit(model, loss, images, EPOCHS, seed, 1e-3)
        return found

    one, other = batches(0, training.start(images, 0)), batches(0, training.start(images, 9))
    assert len(one) == EPOCHS * (320 // training.BATCH)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, batches(1, training.start(images, 0)), strict=True))


def test_gradual_pruning_ends_with_the_largest_weights_and_exactly_the_share(images):
    model = training.gradual(images, EPOCHS, 0, 0.05)
    weights = torch.cat([layer.weight.flatten() for layer in model if isinstance(layer, nn.Linear)])
    found = measuring.kept(model)
    assert int((weights != 0).sum()) == round(0.05 * len(weights))
    assert found["share"] == pytest.approx(0.05, abs=1e-4)
    assert sum(found["pixels"]) == int((model[0].weight != 0).sum())
    assert len(found["pixels"]) == 64


@pytest.fixture(scope="module")
def planned(images) -> nn.Module:
    return training.planned(images, 60, 0, 0.1)


def test_the_plan_is_that_of_the_library_with_its_defaults(planned):
    fresh = dcpp.convert(nn.Linear(30, 10), preset="sparse")
    plan = dcpp.SparsityPlan(dcpp.ELBO(fresh, dcpp.categorical, num_data=10), steps=10, keep=0.1)
    assert (plan.schedule.warmup, plan.schedule.fix_at, plan.schedule.noise) == (0.3, 0.8, 0.0)
    assert plan.schedule.fix_at == training.PRUNED_UNTIL, "both fix what they keep at the same step"
    assert measuring.kept(planned)["share"] == pytest.approx(0.1, rel=0.2)


def test_bytes_and_outputs_before_and_after_compact(images, planned):
    found = measuring.sizes(planned, training.start(images, 0).eval(), images)
    assert found["bytes"][1] < 0.5 * found["bytes"][0]
    assert found["parameters"][1] < found["parameters"][0]
    assert found["apart"] < 1e-3
    assert found["accuracy"] == pytest.approx(measuring.accuracy(planned, images), abs=2.0)
    assert all(ms > 0.0 for ms in found["ms"])


def test_connections_name_units_that_a_weight_joins(images):
    model = training.gradual(images, EPOCHS, 0, 0.05)
    behind = [layer.weight for layer in model if isinstance(layer, nn.Linear)][1:]
    for found, weight in zip(measuring.connections(model), behind, strict=True):
        assert len(found) == int((weight != 0).sum())
        assert all(weight[to, start] != 0 for start, to in found)


def test_doubt_of_a_plain_network_has_no_disagreement_and_one_of_drawn_ones_has(images):
    plain, drawn = training.dense(images, 1, 0), training.with_posterior(images, 1, 0)
    found, ours = measuring.doubt(plain, images, 0), measuring.doubt(drawn, images, 0)
    assert "auroc_of_mutual_information" not in found or math.isclose(found["auroc_of_mutual_information"], 0.5)
    assert 0.0 <= ours["auroc_of_mutual_information"] <= 1.0
    for one in (found, ours):
        assert 0.0 <= one["auroc"] <= 1.0
        assert one["entropy"] >= 0.0
    assert measuring.doubt(drawn, images, 0) == ours, "the same seed draws the same networks"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1, got 0."),
        ({"epochs": 0}, "epochs must be at least 1, got 0."),
        ({"keep": ()}, r"keep must be shares between 0 and 1, got \(\)."),
        ({"keep": (0.5, 1.0)}, "keep must be shares between 0 and 1"),
    ],
)
def test_settings_that_show_nothing_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Settings(**wrong)


def test_step_sizes_are_chosen_on_training_images_of_another_set_alone():
    path = Path(__file__).parents[3] / "tools" / "choose_demo.py"
    spec = importlib.util.spec_from_file_location("choose_demo", path)
    assert spec is not None
    assert spec.loader is not None
    choose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(choose)
    given = tiny("tiny", train=200, test=30, side=8, seed=1)
    held = choose.held_out(given, 150, 40)
    expected = training.Images.of(given)
    assert torch.equal(torch.cat([held.train, held.test]), expected.train[:190])
    assert torch.equal(torch.cat([held.train_labels, held.test_labels]), expected.train_labels[:190])
    for chosen in (training.DENSE_LR, training.POSTERIOR_LR, training.PLANNED_LR, training.GRADUAL_LR):
        assert chosen in choose.STEPS
    found = choose.accuracies(held, choose.METHODS["plain network"], 1e-3, 1, 2)
    assert len(found) == 2
