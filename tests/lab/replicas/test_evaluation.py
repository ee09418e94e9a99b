"""What is measured of trained replicas, against slow numpy formulas on a tiny stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import norm
from stack_cases import CPU, METHODS, bright, settings, stack_of

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Evaluation, Normalisation
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset, Split
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

Array = NDArray[np.float64]
UNITS = [
    Unit(settings(METHODS["none"]), 0),
    Unit(settings(METHODS["dropout"]), 1),
    Unit(settings(METHODS["dropconnect"]), 2),
    Unit(settings(Method(kind="dropconnect", rate=0.3, evaluation="gaussian")), 3),
    Unit(settings(METHODS["bbvi"]), 4),
    Unit(settings(METHODS["bbvi"]), 5),
    Unit(settings(Method(estimator="straight-through", parameterisation="probability", hyper="optimal")), 6),
]
ROWS = range(len(UNITS))
WHAT = Evaluation(samples=(0, 1, 3, 5), curve_samples=5, shares=(1.0, 0.5, 0.1, 0.001), bins=6, predictive_samples=4)
SEED = UNITS[0].protocol.root_seed
EPOCHS = 3


@pytest.fixture(scope="module")
def stack() -> Stack:
    found = stack_of(*UNITS)
    for _ in range(EPOCHS):
        found.train_epoch()
    return found


@pytest.fixture(scope="module")
def results(stack: Stack) -> list[dict[str, Any]]:
    return evaluation.final(stack, WHAT, foreign=bright(seed=9, channels=3))


class Oracle:
    """One replica of the stack in numpy, one network at a time."""

    def __init__(self, stack: Stack, row: int) -> None:
        self.method = UNITS[row].protocol.method
        self.replica = torch.tensor([UNITS[row].replica])
        self.parameters = {name: value[row].detach() for name, value in stack.parameters.items()}
        names = ("dense.weight", "dense.bias", "output.weight", "output.bias")
        self.weight, self.bias, self.out_weight, self.out_bias = (self.parameters[n].numpy() for n in names)
        segment = next(s for s in stack.segments if s.rows.start <= row < s.rows.stop)
        place = row - segment.rows.start
        self.learned = {k: v[place].detach() for k, v in segment.regulariser.parameters.items()}
        self.test = bright().test

    def features(self, images: NDArray[np.uint8]) -> Array:
        pixels = images.astype(np.float64)
        spread = pixels.std((1, 2, 3), keepdims=True)
        x = torch.from_numpy((pixels - pixels.mean((1, 2, 3), keepdims=True)) / spread)
        x = F.relu(F.conv2d(x, self.parameters["conv0.weight"], self.parameters["conv0.bias"], padding=1))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        x = F.relu(F.conv2d(x, self.parameters["conv1.weight"], self.parameters["conv1.bias"], padding=1))
        return x.flatten(1).numpy()

    def keep(self, name: str) -> Array:
        if self.learned:
            key = f"{name}_logit"
            logit = self.learned[key] if key in self.learned else torch.logit(self.learned[f"{name}_probability"])
            return torch.sigmoid(logit).numpy()  # rounded as in the stack: many are equal, and ranked
        rate = self.method.rate if self.method.kind == "dropconnect" else 0.0
        return np.full_like(getattr(self, name), 1 - (rate or 0.0))

    def mean_hidden(self, x: Array, weight: Array | None = None) -> Array:
        weight = self.weight if weight is None else weight
        keep, keep_bias = self.keep("weight"), self.keep("bias")
        mean = x @ (weight * keep).T + self.bias * keep_bias
        if self.method.evaluation == "mean":
            return np.maximum(mean, 0)
        variance = x**2 @ (weight**2 * keep * (1 - keep)).T + self.bias**2 * keep_bias * (1 - keep_bias)
        deviation = np.sqrt(variance + 1e-12)
        return mean * norm.cdf(mean / deviation) + deviation * norm.pdf(mean / deviation)

    def gates(self, purpose: str, keep: Array, draw: int) -> Array:
        stream = Stream(SEED, f"evaluation:{purpose}")
        return stream.bernoulli(torch.from_numpy(keep)[None], self.replica, 0, draw)[0].double().numpy()

    def sampled_hidden(self, x: Array, draw: int) -> Array:
        if self.method.kind in ("none", "dropout"):
            hidden = np.maximum(x @ self.weight.T + self.bias, 0)
            if self.method.kind == "none":
                return hidden
            keep = 1 - self.method.rate
            return hidden * self.gates("dropout", np.full(hidden.shape[1], keep), draw) / keep
        weight = self.weight * self.gates("weight", self.keep("weight"), draw)
        return np.maximum(x @ weight.T + self.bias * self.gates("bias", self.keep("bias"), draw), 0)

    def probabilities(self, hidden: Array) -> Array:
        logits = hidden @ self.out_weight.T + self.out_bias
        exp = np.exp(logits - logits.max(1, keepdims=True))
        return exp / exp.sum(1, keepdims=True)

    def measure(self, probabilities: Array) -> dict[str, float]:
        labels = self.test.labels
        right = probabilities[np.arange(len(labels)), labels]
        return {
            "accuracy": 100 * float(np.mean(probabilities.argmax(1) == labels)),
            "nll": float(-np.log(right).mean()),
        }

    def averaged(self, x: Array, count: int) -> Array:
        return self.probabilities(np.mean([self.sampled_hidden(x, draw) for draw in range(count)], axis=0))

    def uncertainty(self, x: Array, count: int) -> tuple[Array, dict[str, float]]:
        each = np.stack([self.probabilities(self.sampled_hidden(x, draw)) for draw in range(count)])
        mean = each.mean(0)
        entropy = -(mean * np.log(mean)).sum(1)
        expected = -(each * np.log(each)).sum(2).mean(0)
        return mean, {"entropy": float(entropy.mean()), "mutual_information": float((entropy - expected).mean())}


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------ the oracles


@pytest.mark.parametrize("row", ROWS)
def test_accuracy_and_nll_are_those_of_the_mean_network(stack, results, row):
    own = Oracle(stack, row)
    expected = own.measure(own.probabilities(own.mean_hidden(own.features(own.test.images))))
    assert {name: results[row][name] for name in expected} == near(expected)


@pytest.mark.parametrize("row", ROWS)
def test_calibration_counts_confidence_against_correctness(stack, results, row):
    own = Oracle(stack, row)
    probabilities = own.probabilities(own.mean_hidden(own.features(own.test.images)))
    bins = [[0, 0.0, 0] for _ in range(WHAT.bins)]
    brier = 0.0
    for p, label in zip(probabilities, own.test.labels, strict=True):
        chosen = bins[min(int(p.max() * WHAT.bins), WHAT.bins - 1)]
        chosen[0] += 1
        chosen[1] += p.max()
        chosen[2] += int(p.argmax() == label)
        brier += sum((p[k] - (k == label)) ** 2 for k in range(len(p)))
    found, count = results[row], len(own.test.labels)
    assert found["calibration"]["counts"] == [b[0] for b in bins]
    assert found["calibration"]["confidence"] == near([b[1] for b in bins])
    assert found["calibration"]["correct"] == [b[2] for b in bins]
    assert found["brier"] == near(brier / count)
    gaps = [b[0] / count * abs(b[2] / b[0] - b[1] / b[0]) for b in bins if b[0]]
    assert found["ece"] == near(sum(gaps))


def test_full_confidence_falls_into_the_last_bin(stack):
    sure = evaluation._Calibration(stack, 10)
    logits = torch.tensor([1000.0, 0.0, 0.0]).expand(len(UNITS), 2, 3)
    sure.add(slice(0, len(UNITS)), logits, torch.tensor([0, 1]))
    found = sure.result(3)
    assert found["calibration"]["counts"] == [0] * 9 + [2]
    assert (found["ece"], found["brier"]) == (0.5, 1.0)


@pytest.mark.parametrize("row", ROWS)
def test_monte_carlo_averages_the_activation_over_the_first_masks(stack, results, row):
    own = Oracle(stack, row)
    x = own.features(own.test.images)
    expected = [{"samples": count, **own.measure(own.averaged(x, count))} for count in (1, 3, 5)]
    assert [{**point} for point in results[row]["mc"]] == [near(point) for point in expected]


def test_monte_carlo_with_fewer_samples_uses_the_first_masks(stack, results):
    for count in (1, 3, 5):
        alone = evaluation.final(stack, replace(WHAT, samples=(count,)))
        for one, other in zip(alone, results, strict=True):
            assert one["mc"][0] == next(point for point in other["mc"] if point["samples"] == count)


@pytest.mark.parametrize("row", ROWS)
def test_uncertainty_is_that_of_whole_networks(stack, results, row):
    own = Oracle(stack, row)
    mean, expected = own.uncertainty(own.features(own.test.images), WHAT.predictive_samples)
    assert results[row]["uncertainty"] == near({**expected, **own.measure(mean)})
    assert (expected["mutual_information"] > 1e-6) == (own.method.kind != "none")


@pytest.mark.parametrize("row", ROWS)
def test_pruning_keeps_a_share_of_the_weights_by_each_score(stack, results, row):
    own = Oracle(stack, row)
    x = own.features(own.test.images)
    noise = Stream(SEED, "pruning").uniform(own.replica, 0, own.weight.size)[0].numpy()
    scores = {"magnitude": np.abs(own.weight).ravel(), "random": noise}
    if own.learned:
        keep = own.keep("weight").ravel()
        scores |= {"keep_probability": keep, "product": keep * scores["magnitude"]}
    found = {(point["score"], point["share"]): point for point in results[row]["pruning"]}
    assert found.keys() == {(name, share) for name in scores for share in WHAT.shares}
    for (name, share), point in found.items():
        order = np.argsort(-scores[name], kind="stable")[: max(1, round(share * own.weight.size))]
        kept = np.zeros(own.weight.size)
        kept[order] = 1
        hidden = own.mean_hidden(x, own.weight * kept.reshape(own.weight.shape))
        expected = own.measure(own.probabilities(hidden))
        assert {key: point[key] for key in expected} == near(expected), (name, share)
    whole = {"accuracy": results[row]["accuracy"], "nll": results[row]["nll"]}
    assert {key: found["magnitude", 1.0][key] for key in whole} == near(whole)


@pytest.mark.parametrize("row", ROWS)
def test_the_posterior_is_summed_up_where_there_is_one(stack, results, row):
    own, found = Oracle(stack, row), results[row]["posterior"]
    if not own.learned:
        assert found is None
        return
    keep, everything = own.keep("weight").ravel(), np.concatenate([own.keep(n).ravel() for n in ("weight", "bias")])
    ordered = np.sort(everything)
    assert found["synapses"] == everything.size == stack.shape.synapses
    assert found["mean"] == near(everything.mean())
    assert found["standard_deviation"] == near(everything.std(ddof=1))
    assert found["histogram"] == np.histogram(everything, 50, (0, 1))[0].tolist()
    assert found["quantiles"] == near(ordered[np.round(np.linspace(0, everything.size - 1, 101)).astype(int)])
    assert found["below_0.35"] == (everything < 0.35).sum()
    assert found["between_0.4_and_0.6"] == ((everything >= 0.4) & (everything <= 0.6)).sum()
    assert found["above_0.6"] == (everything > 0.6).sum()
    assert found["correlation_with_magnitude"] == near(np.corrcoef(keep, np.abs(own.weight).ravel())[0, 1])
    segment = next(s for s in stack.segments if s.rows.start <= row < s.rows.stop)
    assert found["kl"] == near(segment.regulariser.kl().tolist()[row - segment.rows.start])


def test_a_posterior_that_was_not_trained_has_no_correlation():
    untrained = stack_of(UNITS[4])
    assert evaluation.final(untrained, WHAT)[0]["posterior"]["correlation_with_magnitude"] is None


@pytest.mark.parametrize("row", ROWS)
def test_the_curve_has_both_predictions(stack, results, row):
    point = evaluation.along_the_way(stack, WHAT)[row]
    sampled = results[row]["mc"][-1]
    assert point == near(
        {
            "accuracy": results[row]["accuracy"],
            "nll": results[row]["nll"],
            "mc_accuracy": sampled["accuracy"],
            "mc_nll": sampled["nll"],
        }
    )
    without = evaluation.along_the_way(stack, replace(WHAT, curve_samples=0))[row]
    assert without == {"accuracy": point["accuracy"], "nll": point["nll"]}


# ------------------------------------------------------------------------------------- foreign images


def grey(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    mean = np.rint(images.astype(np.float64).mean(1, keepdims=True)).astype(np.uint8)
    return np.repeat(mean, channels, axis=1)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_foreign_images_are_brought_to_the_networks_channels(stack, channels):
    foreign = bright(seed=9, channels=channels, classes=7)
    found = evaluation.final(stack, replace(WHAT, samples=(), shares=()), foreign=foreign)
    images = foreign.test.images if channels == 2 else grey(foreign.test.images, 2)
    for row in ROWS:
        own = Oracle(stack, row)
        _, expected = own.uncertainty(own.features(images), WHAT.predictive_samples)
        assert found[row]["foreign"].pop("data") == "tiny9"
        assert found[row]["foreign"] == near(expected)


def test_foreign_images_of_another_size_are_an_error(stack):
    with pytest.raises(ProtocolError, match="foreign images must be 8 x 8 as the network's, and those of tiny9 are 12"):
        evaluation.final(stack, WHAT, foreign=bright(seed=9, side=12))


def test_foreign_images_are_standardised_with_the_training_sets_statistics():
    protocol = replace(settings(METHODS["dropconnect"]), normalisation=Normalisation(scope="data-set"))
    own = stack_of(Unit(protocol, 0))
    dataset = bright()
    foreign = replace(bright(), name="copy", test=Split(dataset.test.images, dataset.test.labels))
    (found,) = evaluation.final(own, WHAT, foreign=foreign)
    measured = {name: found["uncertainty"][name] for name in ("entropy", "mutual_information")}
    assert found["foreign"] == {"data": "copy", **measured}


def test_nothing_is_said_of_uncertainty_without_samples(stack):
    found = evaluation.final(stack, replace(WHAT, predictive_samples=0, samples=()), foreign=bright(seed=9))
    assert all(one["uncertainty"] is None and "foreign" not in one and one["mc"] == [] for one in found)


# ------------------------------------------------------------------------------------------ as a whole


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and plain(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)


def test_results_are_plain_json_data(stack, results):
    for found in (results, evaluation.along_the_way(stack, WHAT)):
        assert plain(found)
        assert json.loads(json.dumps(found, allow_nan=False)) == found


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """Every number by its path; the texts become part of it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {f"{where} {value}": 0} if value is None or isinstance(value, str) else {where: value}
    return {path: leaf for key, item in items for path, leaf in flat(item, f"{where}/{key}").items()}


def test_the_size_of_a_chunk_does_not_matter(stack, results, monkeypatch):
    point = evaluation.along_the_way(stack, WHAT)
    for size in (1, 10, 23):
        monkeypatch.setattr(evaluation, "CHUNK", size)
        said: list[Any] = []

        def note(*what: Any, said: list[Any] = said) -> None:
            said.append(what)

        again = evaluation.final(stack, WHAT, foreign=bright(seed=9, channels=3), progress=note)
        assert flat(again) == near(flat(results))
        assert flat(evaluation.along_the_way(stack, WHAT)) == near(flat(point))
        assert said[-1] == ("evaluating", 23, 23)
        assert len(said) == -(-23 // size)


def test_on_a_card_several_chunks_are_one_block_unless_memory_was_short(stack, results, monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK", 5)
    of_chunk = len(stack.units) * 5 * stack.shape.dense[1] * 8
    monkeypatch.setattr(evaluation, "_bytes_of_block", lambda device: 3 * of_chunk - 1)
    for chunk, blocks in ((None, [10, 20, 23]), (7, [7, 14, 21, 23])):
        monkeypatch.setattr(stack, "chunk", chunk)
        said: list[int] = []
        again = evaluation.final(
            stack, WHAT, foreign=bright(seed=9, channels=3), progress=lambda _, done, __, said=said: said.append(done)
        )
        assert flat(again) == near(flat(results))
        assert said == blocks


def test_products_are_those_of_training(stack, monkeypatch):
    inside = []

    @contextmanager
    def noted(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    monkeypatch.setattr(evaluation, "fast_products", noted)
    real = Stack.predict_segment

    def predict(own: Stack, *arguments: Any) -> torch.Tensor:
        assert inside[-1], "every product is"
        return real(own, *arguments)

    monkeypatch.setattr(Stack, "predict_segment", predict)
    evaluation.final(stack, WHAT)
    evaluation.along_the_way(stack, WHAT)
    assert inside == [True, False] * 2


def test_a_replica_is_measured_as_it_would_be_alone(stack, results):
    for row in ROWS:
        alone = stack_of(UNITS[row])
        for _ in range(EPOCHS):
            alone.train_epoch()
        assert flat(evaluation.final(alone, WHAT, foreign=bright(seed=9, channels=3))[0]) == near(flat(results[row]))


def test_evaluation_leaves_training_alone(stack):
    before = stack.state()
    evaluation.final(stack, WHAT)
    after = stack.state()
    assert all(torch.equal(value, after["tensors"][name]) for name, value in before["tensors"].items())


def test_a_replica_that_diverged_says_so_and_does_not_disturb_the_others(results):
    wild = [
        Unit(replace(u.protocol, training=replace(u.protocol.training, step_size=1e200)), u.replica)
        if row in (2, 5)
        else u
        for row, u in enumerate(UNITS)
    ]
    broken = Stack(wild, bright(), CPU)
    for _ in range(EPOCHS):
        broken.train_epoch()
    found = evaluation.final(broken, WHAT, foreign=bright(seed=9, channels=3))
    points = evaluation.along_the_way(broken, WHAT)
    for row in ROWS:
        if row in (2, 5):
            assert not np.isfinite(found[row]["nll"])
            assert not np.isfinite(points[row]["nll"])
        else:
            assert flat(found[row]) == near(flat(results[row]))


def test_held_out_examples_take_the_test_sets_place():
    own = stack_of(Unit(settings(METHODS["none"], holdout=12), 0))
    own.train_epoch()
    (found,) = evaluation.final(own, WHAT)
    assert sum(found["calibration"]["counts"]) == 12
    held = Dataset(
        "held",
        bright().train,
        Split(own.examples.test_images.numpy(), own.examples.test_labels.numpy()),
        bright().classes,
        "",
        "",
        bright().provenance,
    )
    other = stack_of(Unit(settings(METHODS["none"]), 0), dataset=held)
    other.load_state(own.state())
    assert evaluation.final(other, WHAT)[0]["nll"] == near(found["nll"])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_a_gpu_measures_what_a_cpu_does(stack, results, precision):
    units = [Unit(replace(unit.protocol, precision=precision), unit.replica) for unit in UNITS]
    cuda = Stack(units, bright(), torch.device("cuda"))
    cuda.load_state(stack.state())
    found = evaluation.final(cuda, WHAT, foreign=bright(seed=9, channels=3))
    assert plain(found)
    if precision == "float64":
        assert flat(found) == near(flat(results))
        assert flat(evaluation.along_the_way(cuda, WHAT)) == near(flat(evaluation.along_the_way(stack, WHAT)))
    else:
        assert [one["nll"] for one in found] == pytest.approx([one["nll"] for one in results], rel=0.02)
