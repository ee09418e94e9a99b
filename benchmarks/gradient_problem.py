"""What `gradient_quality.py` measures: a small trained network, the estimators, and the exact gradient as reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.estimators import BBVI

CLASSES = 10
LATENT = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str = "cpu"
    gates: tuple[int, ...] = (10**2, 10**4, 10**6)
    draws: int = 400
    row_seconds: float = 1.5
    """Time for the draws of one row and one way of choosing minibatches; at least `fewest` are made."""
    fewest: int = 6
    reference_masks: int = 8
    """For more than 10^5 gates; smaller networks, where they cost nothing, get eight times as many."""
    batch: int = 64
    examples: int = 256
    training_steps: int = 60
    tiny_draws: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for count in self.gates:
            if math.isqrt(count) ** 2 != count:
                raise SystemExit(f"--gates must be square numbers, got {count}: the masked layer is a square.")
        if self.examples % self.batch:
            raise SystemExit(f"--examples must be a multiple of --batch, got {self.examples} and {self.batch}.")


@dataclass(frozen=True)
class Case:
    """One row: an estimator, how its layer draws masks, and how many samples a step takes."""

    title: str
    estimator: Any
    mask: str = "batch"
    num_samples: int = 1
    passes: int = 1
    enumerable: bool = True


CASES = (
    Case("bbvi, running", BBVI()),
    Case("bbvi, running per synapse", BBVI(per_synapse=True)),
    Case("bbvi, mean-network", BBVI(baseline="mean-network"), passes=2),
    Case("bbvi, leave-one-out of 2", BBVI(baseline="leave-one-out"), num_samples=2, passes=2),
    Case("bbvi, running, mask per example", BBVI(), mask="example"),
    Case("bbvi, mean-network, mask per example", BBVI(baseline="mean-network"), mask="example", passes=2),
    Case("disarm", "disarm", passes=2),
    Case("straight-through", "straight-through"),
    Case("local", "local", enumerable=False),
    Case("concrete", "concrete", enumerable=False),
)


@dataclass
class Problem:
    """Data from a teacher, and a network that has learned some of it."""

    inputs: Tensor  # (N, I)
    targets: Tensor  # (N,)
    state: dict[str, Tensor]
    logit: Tensor  # (H, I)
    accuracy: float = field(default=0.0)

    def network(self, estimator: Any = "straight-through", mask: str = "batch") -> nn.Sequential:
        hidden, width = self.logit.shape
        options = {"bias": False, "activation": nn.ReLU(), "estimator": estimator, "mask": mask}
        gated = dcpp.DropConnectPPLinear(width, hidden, **options)
        model = nn.Sequential(gated, nn.Linear(hidden, CLASSES)).to(self.inputs.device)
        model.load_state_dict({**self.state, "0.weight_logit": self.logit})
        return model


def make_problem(inputs: int, hidden: int, settings: Settings) -> Problem:
    """Inputs with a low-dimensional structure, a ReLU teacher's labels, logits spread around zero."""
    torch.manual_seed(settings.seed)
    device = torch.device(settings.device)
    latent = torch.randn(settings.examples, LATENT)
    x = latent @ torch.randn(LATENT, inputs) / math.sqrt(LATENT) + 0.5 * torch.randn(settings.examples, inputs)
    teacher = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    with torch.no_grad():
        scores = teacher(latent)
    y = (scores - scores.mean(0)).argmax(1)
    start = nn.Sequential(dcpp.DropConnectPPLinear(inputs, hidden, bias=False), nn.Linear(hidden, CLASSES))
    logit = 0.5 * torch.randn(hidden, inputs)
    state = {key: value.to(device) for key, value in start.state_dict().items()}
    problem = Problem(x.to(device), y.to(device), state, logit.to(device))
    model = problem.network()
    weights = [p for name, p in model.named_parameters() if not name.endswith("logit")]
    optimiser = torch.optim.Adam(weights, lr=3e-3 if inputs < 500 else 3e-4)
    batches = minibatches(settings)
    for _ in range(settings.training_steps):
        part = next(batches)
        loss = nn.functional.cross_entropy(model(problem.inputs[part]), problem.targets[part])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    problem.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        predicted = model.eval()(problem.inputs).argmax(1)
    problem.accuracy = float((predicted == problem.targets).double().mean())
    return problem


def minibatches(settings: Settings) -> Iterator[Tensor]:
    """Indices of random minibatches, the whole data set in every epoch."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    while True:
        yield from torch.randperm(settings.examples, generator=generator).split(settings.batch)


def reference(problem: Problem, settings: Settings, *, fixed: bool) -> Tensor:  # (K, G)
    """The exact derivative, a mask at a time; with the minibatch free, whole epochs are averaged."""
    torch.manual_seed(settings.seed + 3)
    order = torch.arange(settings.examples).split(settings.batch)
    count = settings.reference_masks * (1 if problem.logit.numel() > 10**5 else 8)
    rows = []
    for index in range(max(2, count) if fixed else max(2, count // len(order)) * len(order)):
        part = order[0] if fixed else order[index % len(order)]
        rows.append(flip_gradient(problem, problem.inputs[part], problem.targets[part]))
    stacked = torch.stack(rows)
    return stacked if fixed else stacked.view(-1, len(order), stacked.shape[1]).mean(1)


@torch.no_grad()
def flip_gradient(problem: Problem, x: Tensor, y: Tensor) -> Tensor:  # (G,)
    """pi~ (1 - pi~) (loss with the gate on - loss with it off), every other gate as one mask has it."""
    weight, out = problem.state["0.weight"], problem.state["1.weight"]
    pi = torch.sigmoid(problem.logit)
    mask = torch.rand_like(pi) < pi
    before = x @ (weight * mask).t()  # (B, H)
    scores = torch.relu(before) @ out.t() + problem.state["1.bias"]  # (B, C)
    log_probabilities = scores.log_softmax(1)
    change = torch.where(mask, -weight, weight)  # (H, I) what the other value of the gate adds
    gradient = torch.empty_like(pi)
    for h in range(pi.shape[0]):
        moved = torch.relu(before[:, h, None] + x * change[h]) - torch.relu(before[:, h, None])  # (B, I)
        shift = torch.zeros_like(moved)
        for c in range(CLASSES):  # log sum_c p_c exp(v_c moved): the change of the log-normaliser
            shift.add_(torch.exp(moved * out[c, h]).mul_(log_probabilities[:, c, None].exp()))
        loss = shift.log_().sub_(moved * out[y, h, None])  # (B, I) loss with the gate changed - loss as it is
        gradient[h] = torch.where(mask[h], -1.0, 1.0) * loss.mean(0)
    return (gradient * pi * (1 - pi)).flatten()
