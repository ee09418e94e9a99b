"""What is measured of trained replicas: all that a report needs, as plain numbers, so that it needs no torch.

Shapes: R replicas, b images of a chunk, K classes, O units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.device import as_tensor
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.network import Segment, log_likelihoods
from dropconnectpp.lab.replicas.stack import Stack, fast_products

CHUNK = 1000
"""Images through the convolutions at a time: few enough for the maps of fifty replicas."""
HISTOGRAM_BINS = 50
QUANTILES = 101
FIGURE_1B = (0.35, 0.4, 0.6)
"""The thresholds of "around 50K take values less than 0.35, another 50K greater than 0.6, ... [0.4, 0.6]"."""

P = ParamSpec("P")
T = TypeVar("T")


def _chunk_of(stack: Stack) -> int:
    return stack.chunk or CHUNK


def blocks(stack: Stack, images: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Which images, and their features (R, b, I): of several chunks, so that masks are drawn less often.

    Of one chunk where memory was short.
    """
    size, inputs = _chunk_of(stack), stack.shape.dense[1]
    bytes_of_chunk = len(stack.units) * size * inputs * torch.finfo(stack.dtype).bits // 8
    many = 1 if stack.chunk is not None else max(1, _bytes_of_block(stack.device) // bytes_of_chunk)
    if many == 1:
        for first in range(0, len(images), size):
            rows = slice(first, min(first + size, len(images)))
            yield rows, stack.features_of(images[rows])
        return
    most = min(many * size, len(images))
    features = torch.empty((len(stack.units), most, inputs), device=stack.device, dtype=stack.dtype)  # for every block
    for first in range(0, len(images), most):
        block = images[first : first + most]
        for start in range(0, len(block), size):
            part = block[start : start + size]
            features[:, start : start + len(part)] = stack.features_of(part)
        yield slice(first, first + len(block)), features[:, : len(block)]


def _bytes_of_block(device: torch.device) -> int:
    """The memory for features: a sixteenth of a GPU's. On a CPU a larger block gains nothing."""
    return 0 if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory // 16


def on_tensor_cores(measure: Callable[Concatenate[Stack, P], T]) -> Callable[Concatenate[Stack, P], T]:
    """Measure with products as in training: without tensor cores the drawn networks of a wide layer take as long."""

    @wraps(measure)
    def measured(stack: Stack, /, *args: P.args, **options: P.kwargs) -> T:
        with fast_products(stack.device, stack.dtype):
            return measure(stack, *args, **options)

    return measured


class _Tally:
    """Accuracy and NLL of one way to predict, summed over chunks."""

    def __init__(self, stack: Stack) -> None:
        self.correct = torch.zeros(len(stack.units), device=stack.device, dtype=torch.float64)
        self.nll = torch.zeros_like(self.correct)
        self.count = 0

    def add(self, rows: slice, logits: Tensor, labels: Tensor) -> None:
        """Logits (R, b, K) of a segment; call `counted` once a chunk is done."""
        expanded = labels.expand(logits.shape[:2])
        self.correct[rows] += (logits.argmax(-1) == expanded).sum(1)
        self.nll[rows] -= log_likelihoods(logits.double(), expanded).sum(1)

    def counted(self, count: int) -> None:
        self.count += count

    def accuracy(self) -> list[float]:
        """In percent."""
        return (100.0 * self.correct / self.count).tolist()

    def mean_nll(self) -> list[float]:
        """In nats per example."""
        return (self.nll / self.count).tolist()


@on_tensor_cores
@torch.no_grad()
def along_the_way(stack: Stack, settings: Evaluation) -> list[dict[str, Any]]:
    """A point of Figure 1(a) for each replica: accuracy and NLL by Eq. (19) and by Eq. (18)."""
    mean, sampled = _Tally(stack), _Tally(stack)
    for rows, inputs in blocks(stack, stack.examples.test_images):
        labels = stack.examples.test_labels[rows]
        for segment in stack.segments:
            mean.add(segment.rows, stack.predict_segment(segment, inputs[segment.rows]), labels)
            if settings.curve_samples:
                averaged = _averages(stack, segment, inputs[segment.rows], (settings.curve_samples,))
                sampled.add(segment.rows, averaged[settings.curve_samples], labels)
        for tally in (mean, sampled):
            tally.counted(len(labels))
    points: list[dict[str, Any]] = [
        {"accuracy": a, "nll": n} for a, n in zip(mean.accuracy(), mean.mean_nll(), strict=True)
    ]
    if settings.curve_samples:
        for point, accuracy, nll in zip(points, sampled.accuracy(), sampled.mean_nll(), strict=True):
            point.update(mc_accuracy=accuracy, mc_nll=nll)
    return points


def _averages(stack: Stack, segment: Segment, inputs: Tensor, counts: tuple[int, ...]) -> dict[int, Tensor]:
    """Eq. (18) for several numbers of samples: logits from the mean activation over the first masks."""
    if not segment.regulariser.random:
        return dict.fromkeys(counts, stack.predict_segment(segment, inputs))
    weight, bias, *output = stack.segment_parameters(segment)
    found: dict[int, Tensor] = {}
    total: Tensor | None = None
    sample = segment.regulariser.sampler(inputs, weight, bias)
    for draw in range(max(counts, default=0)):
        hidden = sample(draw)
        total = hidden.clone() if total is None else total.add_(hidden)
        if draw + 1 in counts:
            found[draw + 1] = linear(total / (draw + 1), *output)
    return found


@on_tensor_cores
@torch.no_grad()
def final(
    stack: Stack,
    settings: Evaluation,
    foreign: Dataset | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Everything measured once training is over, for each replica."""
    counts = tuple(count for count in settings.samples if count)
    monte_carlo = {count: _Tally(stack) for count in counts}
    pruned = _Pruning(stack, settings)
    mean, calibration = _Tally(stack), _Calibration(stack, settings.bins)
    images, labels = stack.examples.test_images, stack.examples.test_labels
    uncertainty = _Uncertainty(stack)
    for rows, inputs in blocks(stack, images):
        target = labels[rows]
        for segment in stack.segments:
            x = inputs[segment.rows]
            logits = stack.predict_segment(segment, x)
            mean.add(segment.rows, logits, target)
            calibration.add(segment.rows, logits, target)
            for count, averaged in _averages(stack, segment, x, counts).items():
                monte_carlo[count].add(segment.rows, averaged, target)
            pruned.add(segment, x, target)
            uncertainty.add(segment, x, settings.predictive_samples, target)
        for tally in (mean, *monte_carlo.values(), *pruned.tallies.values()):
            tally.counted(len(target))
        if progress is not None:
            progress("evaluating", rows.stop, len(labels))
    del inputs, x  # the foreign images' take their place
    results: list[dict[str, Any]] = [
        {
            "accuracy": mean.accuracy()[r],
            "nll": mean.mean_nll()[r],
            **calibration.result(r),
            "mc": [
                {"samples": count, "accuracy": tally.accuracy()[r], "nll": tally.mean_nll()[r]}
                for count, tally in monte_carlo.items()
            ],
            "pruning": pruned.result(r),
            "uncertainty": uncertainty.result(r),
        }
        for r in range(len(stack.units))
    ]
    if foreign is not None and settings.predictive_samples:
        for result, measured in zip(results, _foreign(stack, foreign, settings), strict=True):
            result["foreign"] = {"data": foreign.name, **measured}
    for segment in stack.segments:
        for offset, posterior in enumerate(_posteriors(stack, segment)):
            results[segment.rows.start + offset]["posterior"] = posterior
    return results


class _Calibration:
    """Confidence against correctness in equal bins, and the Brier score."""

    def __init__(self, stack: Stack, bins: int) -> None:
        size = (len(stack.units), bins)
        self.counts = torch.zeros(size, device=stack.device, dtype=torch.float64)
        self.confidence, self.correct = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        self.brier = torch.zeros(size[0], device=stack.device, dtype=torch.float64)
        self.bins = bins

    def add(self, rows: slice, logits: Tensor, labels: Tensor) -> None:
        probabilities = logits.double().softmax(-1)
        best, guess = probabilities.max(-1)
        expanded = labels.expand(guess.shape)
        # From below too: the NaN of a replica that diverged becomes a negative index.
        index = (best * self.bins).long().clamp(0, self.bins - 1)
        self.counts[rows].scatter_add_(1, index, torch.ones_like(best))
        self.confidence[rows].scatter_add_(1, index, best)
        self.correct[rows].scatter_add_(1, index, (guess == expanded).double())
        right = probabilities.gather(-1, expanded.unsqueeze(-1)).squeeze(-1)
        self.brier[rows] += (probabilities.square().sum(-1) - 2.0 * right + 1.0).sum(1)

    def result(self, r: int) -> dict[str, Any]:
        counts, total = self.counts[r], self.counts[r].sum()
        return {
            "brier": float(self.brier[r] / total),
            "ece": float((self.confidence[r] - self.correct[r]).abs().sum() / total),
            "calibration": {
                "counts": counts.long().tolist(),
                "confidence": self.confidence[r].tolist(),
                "correct": self.correct[r].long().tolist(),
            },
        }


class _Uncertainty:
    """Entropy of the predictive distribution over whole networks, and mutual information with the mask, in nats."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.entropy = torch.zeros(len(stack.units), device=stack.device, dtype=torch.float64)
        self.information, self.nll = torch.zeros_like(self.entropy), torch.zeros_like(self.entropy)
        self.correct = torch.zeros_like(self.entropy)
        self.counts = torch.zeros_like(self.entropy)

    def add(self, segment: Segment, inputs: Tensor, samples: int, labels: Tensor | None = None) -> None:
        if not samples:
            return
        samples = samples if segment.regulariser.random else 1
        weight, bias, *output = self.stack.segment_parameters(segment)
        mean: Tensor | float = 0.0
        expected: Tensor | float = 0.0
        sample = segment.regulariser.sampler(inputs, weight, bias)
        for draw in range(samples):
            logs = linear(sample(draw), *output).double().log_softmax(-1)
            mean = mean + logs.exp() / samples
            expected = expected + _entropy(logs.exp()) / samples
        assert isinstance(mean, Tensor)
        entropy, rows = _entropy(mean), segment.rows
        self.entropy[rows] += entropy.sum(1)
        self.information[rows] += (entropy - expected).sum(1)
        self.counts[rows] += entropy.shape[1]
        if labels is not None:
            expanded = labels.expand(entropy.shape)
            self.correct[rows] += (mean.argmax(-1) == expanded).sum(1)
            self.nll[rows] -= mean.gather(-1, expanded.unsqueeze(-1)).clamp_min(1e-300).log().sum((1, 2))

    def result(self, r: int, labelled: bool = True) -> dict[str, Any] | None:
        count = float(self.counts[r])
        if not count:
            return None
        found = {"entropy": float(self.entropy[r]) / count, "mutual_information": float(self.information[r]) / count}
        if labelled:
            found |= {"accuracy": 100.0 * float(self.correct[r]) / count, "nll": float(self.nll[r]) / count}
        return found


def _entropy(probabilities: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


def check_foreign(side: int, foreign: Dataset) -> None:
    """Raise if the images of another data set do not have the network's size."""
    if foreign.shape[1:] != (side, side):
        raise ProtocolError(
            f"foreign images must be {side} x {side} as the network's, and those of {foreign.name} are "
            f"{foreign.shape[1]} x {foreign.shape[2]}."
        )


def foreign_images(stack: Stack, foreign: Dataset) -> Tensor:
    """The test images of another data set, brought to this one's number of channels."""
    images = as_tensor(foreign.test.images, stack.device)
    check_foreign(stack.shape.side, foreign)
    channels = stack.shape.channels
    if images.shape[1] != channels:
        images = images.float().mean(1, keepdim=True).round().to(torch.uint8).expand(-1, channels, -1, -1)
    return images


def _foreign(stack: Stack, foreign: Dataset, settings: Evaluation) -> list[dict[str, Any]]:
    """Uncertainty on images of another data set."""
    uncertainty = _Uncertainty(stack)
    for _, inputs in blocks(stack, foreign_images(stack, foreign)):
        for segment in stack.segments:
            uncertainty.add(segment, inputs[segment.rows], settings.predictive_samples)
    return [uncertainty.result(r, labelled=False) or {} for r in range(len(stack.units))]


class _Pruning:
    """Accuracy by Eq. (19) of networks that keep a share of their weights, by four scores; all biases are kept."""

    def __init__(self, stack: Stack, settings: Evaluation) -> None:
        self.stack, self.shares = stack, settings.shares
        self.tallies: dict[tuple[str, float], _Tally] = {}
        self.weights: dict[tuple[int, str, float], Tensor] = {}
        for segment in stack.segments:
            for name, score in _scores(stack, segment).items():
                order = score.flatten(1).argsort(dim=1, descending=True, stable=True)
                for share in self.shares:
                    kept = torch.zeros_like(order, dtype=torch.bool)
                    kept.scatter_(1, order[:, : max(1, round(share * order.shape[1]))], True)
                    self.weights[(segment.rows.start, name, share)] = kept.view(score.shape)
                    self.tallies.setdefault((name, share), _Tally(stack))

    def add(self, segment: Segment, inputs: Tensor, labels: Tensor) -> None:
        weight, bias, *output = self.stack.segment_parameters(segment)
        for (start, name, share), kept in self.weights.items():
            if start == segment.rows.start:
                hidden = segment.regulariser.mean_pass(inputs, weight * kept, bias)
                self.tallies[(name, share)].add(segment.rows, linear(hidden, *output), labels)

    def result(self, r: int) -> list[dict[str, Any]]:
        segment = next(s for s in self.stack.segments if s.rows.start <= r < s.rows.stop)
        return [
            {"score": name, "share": share, "accuracy": tally.accuracy()[r], "nll": tally.mean_nll()[r]}
            for start, name, share in self.weights  # in the segment's own order, whatever its neighbours
            if start == segment.rows.start
            for tally in [self.tallies[(name, share)]]
        ]


def _scores(stack: Stack, segment: Segment) -> dict[str, Tensor]:
    """The scores that rank weights; pi~ only where it was learned."""
    weight, regulariser = stack.segment_parameters(segment)[0], segment.regulariser
    count = weight[0].numel()
    noise = Stream(stack.protocol.root_seed, "pruning").uniform(regulariser.replicas, 0, count).view(weight.shape)
    scores = {"magnitude": weight.abs(), "random": noise}
    if regulariser.parameters:
        keep = regulariser.keep_probability("weight")
        scores = {"keep_probability": keep, "product": keep * weight.abs(), **scores}
    return scores


def _posteriors(stack: Stack, segment: Segment) -> list[dict[str, Any] | None]:
    """What was learned of each synapse, summed up: Figure 1(b)."""
    regulariser = segment.regulariser
    if not regulariser.parameters:
        return [None] * len(regulariser.replicas)
    weight = stack.segment_parameters(segment)[0]
    kl = regulariser.kl().tolist()
    keep_weight, keep_bias = (regulariser.keep_probability(name).flatten(1) for name in ("weight", "bias"))
    found: list[dict[str, Any] | None] = []
    for r in range(len(regulariser.replicas)):
        keep = keep_weight[r].double()
        everything = torch.cat([keep, keep_bias[r].double()])
        low, middle, high = FIGURE_1B
        ordered = everything.sort().values
        places = torch.linspace(0, len(ordered) - 1, QUANTILES, dtype=torch.float64).round().long()
        found.append(
            {
                "synapses": len(everything),
                "kl": kl[r],
                "mean": float(everything.mean()),
                "standard_deviation": float(everything.std()),
                "histogram": torch.histc(everything.cpu(), HISTOGRAM_BINS, 0.0, 1.0).long().tolist(),
                "quantiles": ordered[places.to(ordered.device)].tolist(),
                "below_0.35": int((everything < low).sum()),
                "between_0.4_and_0.6": int(((everything >= middle) & (everything <= high)).sum()),
                "above_0.6": int((everything > high).sum()),
                "correlation_with_magnitude": _correlation(keep, weight[r].flatten().abs().double()),
            }
        )
    return found


def _correlation(one: Tensor, other: Tensor) -> float | None:
    one, other = one - one.mean(), other - other.mean()
    scale = float(one.norm() * other.norm())
    return float(one @ other) / scale if scale > 0 else None
