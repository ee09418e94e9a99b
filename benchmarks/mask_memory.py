"""Measure what pi~ and the weights remember of the masks of the first minibatches.

    python benchmarks/mask_memory.py --replicas 2 --epochs 1        # a quick look

A stack of replicas is trained with Adagrad. Its first step has full size whatever the gradient is. For the weights that
may be too much: the loss jumps. For pi~, learned by the score, it comes with the first minibatch that has a baseline,
the second. pi~ may then be little else than the mask of that minibatch, in which the weights that were on took a large
correction.

loss                      of a minibatch in nats per image, before the step that it leads to
share of pi~'s variance   squared correlation of pi~ with the mask of that minibatch, over the synapses of a network;
                          for the first so many minibatches their sum, since masks are independent
on, off                   accuracy in percent of a network that keeps the half of its dense weights that was on, or off,
                          in that minibatch
never used                the same with masks that training did not see: a random half

Means over the networks with 95% intervals (Student's t). Masks are drawn again at one half, where pi~ stays.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import torch
from reporting import Cell, Report, Table, parser
from scipy.stats import t as student
from torch import Tensor

from dropconnectpp.lab import data
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol, Training
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.kernels.dense import draw_masks, linear
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.network import Segment, Unit
from dropconnectpp.lab.replicas.stack import Stack

METHODS = {
    "DropConnect++": Method(hyper="optimal"),
    "DropConnect++, random sign": Method(hyper="optimal", reward="random-sign"),
    "DropConnect": Method(kind="dropconnect", rate=0.5),
}
MINIBATCHES = (1, 2, 3, 5, 10, 30, 100)
"""Of which the masks are compared, counted from 1."""
TOGETHER = (10, 100)
"""So many of the first minibatches are also taken together."""
NEVER = 10**9
"""Training does not come so far."""
CHUNK = 500


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    dataset: str
    hidden: int
    replicas: int
    epochs: int
    step_size: float


def stacked(settings: Settings, dataset: Dataset) -> Stack:
    """Networks of every method with the same starts, orders of examples and streams of masks."""
    protocol = Protocol(
        data=settings.dataset,
        architecture=Architecture(hidden=settings.hidden),
        training=Training(step_size=settings.step_size, epochs=settings.epochs),
    )
    units = [
        Unit(replace(protocol, method=method), replica)
        for method in METHODS.values()
        for replica in range(settings.replicas)
    ]
    return Stack(units, dataset, torch.device(settings.device))


def train(stack: Stack) -> Tensor:  # (T, R)
    """All epochs; the loss of each minibatch of the first one, for each network."""
    sums = [torch.zeros_like(stack.loss_sum)]
    stack.on_batch = lambda _: sums.append(stack.loss_sum.clone())
    for epoch in range(epochs := stack.protocol.training.epochs):
        stack.train_epoch()
        stack.on_batch = None
        print(f"[epoch {epoch + 1}/{epochs}]", file=sys.stderr, flush=True)
    return torch.stack(sums).diff(dim=0) / stack.protocol.training.batch_size


def masks(stack: Stack, segment: Segment, minibatch: int) -> Tensor:
    """What was on in a minibatch, (R, O, I)."""
    regulariser = segment.regulariser
    half = torch.full_like(regulariser.keep_probability("weight"), 0.5)
    stream = Stream(stack.protocol.root_seed, "mask:weight")
    return draw_masks(stream, half, regulariser.replicas, minibatch - 1)


def shares(keep: Tensor, mask: Tensor) -> Tensor:  # (R, O, I) -> (R,)
    """Squared correlation over the synapses of each network."""
    pairs = torch.stack([keep.double().flatten(1), mask.double().flatten(1)], 1)  # (R, 2, O I)
    return torch.stack([torch.corrcoef(pair)[0, 1].square() for pair in pairs])


@torch.no_grad()
def accuracies(stack: Stack, segment: Segment, kept: list[Tensor]) -> Tensor:  # (K, R)
    """In percent, by one pass, of networks with a part of their dense weights."""
    weight, bias, *output = stack.segment_parameters(segment)
    correct = torch.zeros(len(kept), len(weight), dtype=torch.float64, device=weight.device)
    images, labels = stack.examples.test_images, stack.examples.test_labels
    for first in range(0, len(images), CHUNK):
        part = slice(first, first + CHUNK)
        inputs = stack.features_of(images[part])[segment.rows]
        for row, mask in zip(correct, kept, strict=True):
            hidden = segment.regulariser.mean_pass(inputs, weight * mask, bias)
            row += (linear(hidden, *output).argmax(-1) == labels[part]).sum(1)
    return 100.0 * correct / len(images)


def interval(values: Tensor, digits: int) -> str:
    """Mean and 95% interval."""
    half = student.ppf(0.975, len(values) - 1) * float(values.std()) / math.sqrt(len(values))
    return f"{float(values.mean()):.{digits}f} ± {half:.{digits}f}"


def loss_table(stack: Stack, losses: Tensor, numbers: list[int], note: str) -> Table:
    """How the loss goes in the first minibatches."""
    rows: list[list[Cell]] = [
        [name, *(interval(losses[number - 1, segment.rows], 2) for number in numbers)]
        for name, segment in zip(METHODS, stack.segments, strict=True)
    ]
    return Table("Loss", ["method", *(f"minibatch {number}" for number in numbers)], rows, note)


def shares_table(stack: Stack, numbers: list[int], note: str) -> Table:
    """How much of pi~ is the masks of the first minibatches."""
    sums = [number for number in TOGETHER if number <= len(stack.batches)]
    rows: list[list[Cell]] = []
    for name, segment in zip(METHODS, stack.segments, strict=True):
        if segment.regulariser.parameters:
            keep = segment.regulariser.keep_probability("weight")
            of = {n: shares(keep, masks(stack, segment, n)) for n in {*numbers, *range(1, max(sums) + 1), NEVER}}
            together = [torch.stack([of[n] for n in range(1, last + 1)]).sum(0) for last in sums]
            rows.append([name, *(interval(share, 3) for share in [*(of[n] for n in numbers), *together, of[NEVER]])])
    columns = [*(f"minibatch {number}" for number in numbers), *(f"the first {last}" for last in sums)]
    return Table("Share of pi~'s variance that is a minibatch's mask", ["method", *columns, "never used"], rows, note)


def halves_table(stack: Stack, numbers: list[int], note: str) -> Table:
    """What is left of a network that keeps half of its dense weights by a mask."""
    rows: list[list[Cell]] = []
    for name, segment in zip(METHODS, stack.segments, strict=True):
        seen = [masks(stack, segment, number) for number in (*numbers, NEVER)]
        found = accuracies(stack, segment, [*seen, *(~mask for mask in seen), torch.ones_like(seen[0])])
        whole = interval(found[-1], 2)
        rows += [
            [name, state, whole, *(interval(row, 2) for row in part)]
            for state, part in (("on", found[: len(seen)]), ("off", found[len(seen) : -1]))
        ]
    columns = ["method", "kept", "all", *(f"minibatch {number}" for number in numbers), "never used"]
    return Table("Accuracy with half of the dense weights, by one minibatch's mask", columns, rows, note)


def main() -> None:
    """Train, compare with the masks, cut by them."""
    options = parser(__doc__)
    options.add_argument("--dataset", default="fashion-mini", help="a name that `dcpp data list` shows")
    options.add_argument("--hidden", type=int, default=64, help="units of the dense layer (default: 64)")
    options.add_argument("--replicas", type=int, default=4, help="networks of each method (default: 4)")
    options.add_argument("--epochs", type=int, default=5, help="passes over the training set (default: 5)")
    options.add_argument("--step-size", type=float, default=0.005, help="Adagrad's step size (default: 0.005)")
    given = vars(options.parse_args())
    out = given.pop("out")
    settings = Settings(**given)
    if settings.replicas < 2:
        options.error("--replicas must be 2 or more: intervals need a spread.")
    report = Report("What the masks of the first minibatches leave behind", torch.device(settings.device), settings)
    dataset = data.load(settings.dataset)
    stack = stacked(settings, dataset)
    if len(stack.batches) < TOGETHER[0]:
        sys.exit(f"{settings.dataset} has {len(stack.batches)} minibatches an epoch; {TOGETHER[0]} are needed.")
    losses = train(stack)
    numbers = [number for number in MINIBATCHES if number <= len(stack.batches)]
    note = f"{settings.dataset}, {settings.hidden} units, {settings.replicas} networks, epochs: {settings.epochs}."
    if not dataset.provenance.verified:
        note += " The images' files do not have the official checksums."
    report.add(loss_table(stack, losses, numbers, note))
    report.add(shares_table(stack, numbers, note))
    report.add(halves_table(stack, numbers, note))
    report.write(out)


if __name__ == "__main__":
    main()
