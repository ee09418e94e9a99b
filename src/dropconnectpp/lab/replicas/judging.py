"""How good the probabilities of trained replicas are: on the test set, on corrupted images, and against foreign ones.

Everything is measured of the logarithms of probabilities, whoever made them: one pass, drawn networks, an ensemble.
Shapes: R replicas, N images, b images of a block, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from dropconnectpp.lab.config.corruptions import SEVERITIES
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.data.corruptions import corrupt
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.replicas.evaluation import blocks, foreign_images, on_tensor_cores
from dropconnectpp.lab.replicas.network import Segment
from dropconnectpp.lab.replicas.stack import Stack

Way = Literal["one pass", "networks"]
"""How a network predicts: by its mean, or by the average over drawn networks."""
Images = tuple[str, int]
"""Which images: "test", "foreign", or a corruption, with its severity or 0."""
TEST, FOREIGN = ("test", 0), ("foreign", 0)


@on_tensor_cores
@torch.no_grad()
def judge(
    stack: Stack,
    settings: Evaluation,
    foreign: Dataset | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep: Callable[[Images, Tensor], None] | None = None,
) -> list[list[dict[str, Any]]]:
    """For each replica what is measured, by way of predicting and by images; see `scores`.

    ``keep`` is given the log-probabilities (R, N, K) of each set of images, by drawn networks where a method has them.
    """
    found: list[list[dict[str, Any]]] = [[] for _ in stack.units]
    known: dict[Way, Tensor] = {}
    total = 1 + (foreign is not None) + len(SEVERITIES) * len(settings.corruptions)
    for done, (images, pixels) in enumerate(_sets(stack, settings, foreign), 1):
        by_way = _log_probabilities(stack, pixels, settings.predictive_samples)
        for way, logs in by_way.items():
            rows = [segment.rows for segment in stack.segments if way == "one pass" or segment.regulariser.random]
            replicas = [r for one in rows for r in range(one.start, one.stop)]
            if images == TEST:
                known[way] = entropies(logs)
            measured = scores(images, logs, stack.examples.test_labels, known[way])
            for r in replicas:
                found[r].append({"prediction": way, **_named(measured[r], foreign)})
        if keep is not None:
            keep(images, by_way.get("networks", by_way["one pass"]))
        if progress is not None:
            progress("judging", done, total)
    return found


def _named(measured: dict[str, Any], foreign: Dataset | None) -> dict[str, Any]:
    is_foreign = foreign is not None and measured["images"] == FOREIGN[0]
    return measured | {"data": foreign.name} if is_foreign and foreign is not None else measured


def _sets(stack: Stack, settings: Evaluation, foreign: Dataset | None) -> Iterator[tuple[Images, Tensor]]:
    """The images that are judged; the test set comes first."""
    yield TEST, stack.examples.test_images
    if foreign is not None:
        yield FOREIGN, foreign_images(stack, foreign)
    for name in settings.corruptions:
        for severity in SEVERITIES:
            yield (name, severity), corrupt(stack.examples.test_images, name, severity)  # type: ignore[arg-type]


def _log_probabilities(stack: Stack, images: Tensor, samples: int) -> dict[Way, Tensor]:
    """By one pass and, where networks are drawn of any replica, averaged over them; (R, N, K) each."""
    shape = (len(stack.units), len(images), stack.shape.classes)
    ways: list[Way] = ["one pass"]
    if samples and any(segment.regulariser.random for segment in stack.segments):
        ways.append("networks")
    found = {way: torch.empty(shape, device=stack.device, dtype=torch.float32) for way in ways}
    for rows, inputs in blocks(stack, images):
        for segment in stack.segments:
            x = inputs[segment.rows]
            one = stack.predict_segment(segment, x).double().log_softmax(-1)
            for way, logs in found.items():
                drawn = way == "networks" and segment.regulariser.random
                logs[segment.rows, rows] = (_over_networks(stack, segment, x, samples) if drawn else one).float()
    return found


def _over_networks(stack: Stack, segment: Segment, x: Tensor, samples: int) -> Tensor:  # (R, b, K)
    weight, bias, *output = stack.segment_parameters(segment)
    sample = segment.regulariser.sampler(x, weight, bias)
    total: Tensor | None = None
    for draw in range(samples):
        logs = linear(sample(draw), *output).double().log_softmax(-1)
        total = logs if total is None else torch.logaddexp(total, logs)
    assert total is not None
    return total - math.log(samples)


def entropies(logs: Tensor) -> Tensor:  # (R, N, K) -> (R, N)
    """Of the predicted distributions, in nats."""
    wide = logs.double()
    return -(wide.exp() * wide).sum(-1)


def scores(images: Images, logs: Tensor, labels: Tensor, known: Tensor, bins: int = 15) -> list[dict[str, Any]]:
    """What is stored of each replica's predictions on a set of images.

    Args:
        images: which they are.
        logs: log-probabilities, (R, N, K).
        labels: the classes of the test images, (N,).
        known: entropies on the test images, (R, N).
        bins: of the calibration error.
    """
    name, severity = images
    which = [{"images": name, "severity": severity} for _ in logs]
    if images != FOREIGN:
        return [one | score for one, score in zip(which, class_scores(logs, labels, bins), strict=True)]
    unsure = entropies(logs)
    return [one | _told_apart(known[r], unsure[r]) for r, one in enumerate(which)]


def _told_apart(known: Tensor, foreign: Tensor) -> dict[str, float | None]:
    """How well the entropy tells foreign images; None of a replica that diverged."""
    if not bool(known.isfinite().all() & foreign.isfinite().all()):
        return {"auroc": None, "fpr95": None, "entropy": None}
    from dropconnectpp.metrics import auroc, fpr95  # imports Triton where it is installed, a quarter of a second

    return {"auroc": auroc(known, foreign), "fpr95": fpr95(known, foreign), "entropy": float(foreign.mean())}


def class_scores(logs: Tensor, labels: Tensor, bins: int) -> list[dict[str, float]]:  # (R, N, K), (N,)
    """Accuracy in percent, NLL in nats, Brier score and calibration error of each replica."""
    wide = logs.double()
    probabilities, target = wide.exp(), labels.expand(logs.shape[:2])
    right = wide.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    confidence, guess = probabilities.max(-1)
    correct = (guess == target).double()
    # From below too: the NaN of a replica that diverged becomes a negative index.
    place = (confidence * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(len(logs), bins, device=logs.device, dtype=torch.float64)
    gaps.scatter_add_(1, place, confidence - correct)
    measured = {
        "accuracy": 100.0 * correct.mean(1),
        "nll": -right.mean(1),
        "brier": (probabilities.square().sum(-1) - 2.0 * right.exp() + 1.0).mean(1),
        "ece": gaps.abs().sum(1) / logs.shape[1],
    }
    columns = {name: values.tolist() for name, values in measured.items()}
    return [{name: column[r] for name, column in columns.items()} for r in range(len(logs))]
