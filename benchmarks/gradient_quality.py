"""Measure how good each estimator's gradient is: variance, signal-to-noise ratio, bias and direction.

    python benchmarks/gradient_quality.py --gates 100 --draws 50    # a quick look

The network is a two-layer ReLU classifier of a teacher's labels, its weights trained a little, with a
gate on every synapse of the first layer. Measured is the gradient of the mean log-likelihood of an
example by the gates' logits (the KL is the same for every estimator and left out), over repeated draws
of the masks with the minibatch fixed, and with the minibatch drawn anew each time.

The reference is the exact derivative pi~ (1 - pi~) E[R(z_i = 1) - R(z_i = 0)], R the reward, with the
expectation over all other gates taken over a few masks: switching one gate changes one hidden unit, so
every gate's difference costs little. It has no bias and little variance.

What the columns mean, for draws g_1..g_n of an estimator and the reference's mean r:

passes      forward passes through the network for one gradient
draws       n
variance    of one gate's gradient, averaged over the gates
SNR         per gate: length of the mean gradient over the root of its total variance. The length is
            taken along the reference, mean_k <g_k, r> / |r|. The length of an average of n draws would
            be inflated by their noise; products of different, independent draws are not. |r|^2 is
            likewise the mean product of different masks of the reference.
            One scalar reward shared by G gates gives about 1 / sqrt(G).
cosine      between one draw and the reference, averaged: how far one step points the right way
bias        |mean g - r| / |r|, each square by products of different draws; "< x" where it is not
            resolved: two standard errors, by the jackknife over draws and over the reference's masks

The last table has the bias on a network of six gates, where every mask (every pair of masks, for two
passes) can be forced in turn and weighted with its probability: no noise is left. Estimators with
continuous noise are averaged over many draws instead.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gradient_problem import CASES, CLASSES, Case, Problem, Settings, make_problem, minibatches, reference
from reporting import Cell, Report, Table, parser
from torch import Tensor

import dropconnectpp as dcpp

# ------------------------------------------------------------------------------------ the gradients


def measure(problem: Problem, case: Case, settings: Settings, *, fixed: bool) -> Tensor:  # (n, G)
    """Gradients of the loss by the logits, draw after draw.

    The running baseline comes from other minibatches in either way: it is warmed up first, and with
    the minibatch fixed it stays as it is, lest it learn that minibatch's own reward.
    """
    torch.manual_seed(settings.seed + 2)
    model = problem.network(case.estimator, case.mask)
    elbo = dcpp.ELBO(model, dcpp.categorical, settings.examples, num_samples=case.num_samples, kl_weight=0.0)
    logit = model[0].weight_logit
    batches = minibatches(settings)

    def draw(part: Tensor) -> Tensor:
        model.zero_grad()
        elbo(problem.inputs[part], target=problem.targets[part]).loss.backward()
        return logit.grad.flatten().clone()

    if elbo.moments._buffers:
        for _ in range(min(30, 2 * settings.draws)):
            draw(next(batches))
    first = torch.arange(settings.batch)
    if fixed:
        elbo.eval()
        model.train()
    found: list[Tensor] = []
    start = time.perf_counter()
    while len(found) < settings.draws:
        found.append(draw(first if fixed else next(batches)))
        if len(found) >= settings.fewest and time.perf_counter() - start > settings.row_seconds:
            break
    return torch.stack(found)


# --------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Quality:
    """What the draws say of an estimator, see the head of this file."""

    variance: float
    snr: float
    cosine: float
    bias: float
    bias_error: float  # of the square of `bias`


def assess(draws: Tensor, truth: Tensor) -> Quality:  # (n, G), (K, G)
    """Everything follows from the products of draws and of the reference's masks with one another."""
    products = Products(*(m.double().cpu() for m in (draws @ draws.t(), draws @ truth.t(), truth @ truth.t())))
    total = products.trace()
    length = products.reference_square().sqrt()
    along = products.cross.mean(1)  # (n,)
    bias = products.bias_square()
    error = 0.0
    for axis, count in enumerate(products.cross.shape):  # the jackknife, over draws and over masks
        left_out = torch.stack([products.without(axis, index).bias_square() for index in range(count)])
        error += float((count - 1) / count * (left_out - left_out.mean()).square().sum())
    return Quality(
        variance=float(total / draws.shape[1]),
        snr=float(along.mean() / length / total.sqrt()),
        cosine=float((along / products.draws.diagonal().clamp_min(1e-30).sqrt()).mean() / length),
        bias=float(bias.clamp_min(0.0).sqrt()),
        bias_error=math.sqrt(error),
    )


@dataclass(frozen=True)
class Products:
    """Inner products of n draws and K masks of the reference, whose noise is independent."""

    draws: Tensor  # (n, n)
    cross: Tensor  # (n, K)
    truth: Tensor  # (K, K)

    def without(self, axis: int, index: int) -> Products:
        """The same with one draw (axis 0) or one mask of the reference (axis 1) left out."""
        keep = [i for i in range(self.cross.shape[axis]) if i != index]
        if axis == 0:
            return Products(self.draws[keep][:, keep], self.cross[keep], self.truth)
        return Products(self.draws, self.cross[:, keep], self.truth[keep][:, keep])

    def trace(self) -> Tensor:
        """Trace of the draws' covariance."""
        count = self.draws.shape[0]
        return (self.draws.diagonal().sum() - self.draws.sum() / count) / (count - 1)

    def reference_square(self) -> Tensor:
        """|r|^2."""
        return _mean_of_different(self.truth).clamp_min(1e-30)

    def bias_square(self) -> Tensor:
        """|mean g - r|^2 / |r|^2, from products of different draws alone."""
        length = self.reference_square()
        return (_mean_of_different(self.draws) - 2 * self.cross.mean() + length) / length


def _mean_of_different(gram: Tensor) -> Tensor:
    """The mean of the products of different draws: |mean|^2 without what their noise would add."""
    count = gram.shape[0]
    if count < 2:
        return gram.mean()
    return (gram.sum() - gram.diagonal().sum()) / (count * (count - 1))


def _bias_cell(quality: Quality) -> Cell:
    bound = 2 * quality.bias_error
    return quality.bias if quality.bias**2 > bound else f"< {math.sqrt(quality.bias**2 + bound):.2g}"


# ------------------------------------------------------------------------- six gates, by enumeration


def exact_bias(case: Case, settings: Settings) -> tuple[float, float]:
    """Relative bias on six gates and its standard error, 0 where every mask was forced."""
    problem = make_problem(3, 2, settings)
    truth = expected_gradient(problem, settings)
    if case.enumerable:
        found, error = enumerated(problem, case, settings), 0.0
    else:
        many = Settings(**{**vars(settings), "draws": settings.tiny_draws, "row_seconds": 60.0})
        draws = measure(problem, case, many, fixed=True).double()
        found = draws.mean(0)
        error = float(draws.var(0).sum().div(len(draws)).sqrt() / truth.norm())
    return float((found - truth).norm() / truth.norm()), error


def expected_gradient(problem: Problem, settings: Settings) -> Tensor:  # (G,)
    """The gradient of sum_Z q(Z) loss(Z), all masks written out and left to autograd: owes the library nothing."""
    logit = problem.logit.double().requires_grad_()
    state = {key: value.double() for key, value in problem.state.items()}
    x, y = problem.inputs[: settings.batch].double(), problem.targets[: settings.batch]
    values = [1.0, 0.0]
    masks = torch.tensor(list(itertools.product(values, repeat=logit.numel())), device=x.device, dtype=x.dtype)
    masks = masks.view(-1, *logit.shape)  # (M, H, I)
    hidden = torch.relu(torch.einsum("bi,mhi->mbh", x, masks * state["0.weight"]))
    scores = hidden @ state["1.weight"].t() + state["1.bias"]  # (M, B, C)
    losses = -scores.log_softmax(-1)[:, torch.arange(len(y)), y].mean(1)
    pi = torch.sigmoid(logit)
    probabilities = torch.where(masks > 0, pi, 1 - pi).flatten(1).prod(1)
    (gradient,) = torch.autograd.grad((probabilities * losses).sum(), logit)
    return gradient.flatten()


def enumerated(problem: Problem, case: Case, settings: Settings) -> Tensor:  # (G,)
    """The estimator's mean over all masks, or pairs of masks, each weighted with its probability."""
    problem = Problem(problem.inputs.double(), problem.targets, problem.state, problem.logit)
    model = problem.network(case.estimator).double()
    elbo = dcpp.ELBO(model, dcpp.categorical, settings.examples, num_samples=case.num_samples, kl_weight=0.0)
    part = torch.arange(settings.batch)
    torch.manual_seed(settings.seed)
    for _ in range(5 if elbo.moments._buffers else 0):
        elbo(problem.inputs[part], target=problem.targets[part])
    elbo.eval()
    model.train()
    shape = problem.logit.shape
    mean = torch.zeros(shape.numel(), dtype=torch.float64, device=problem.logit.device)
    for masks, probability in _weighted_masks(case, torch.sigmoid(problem.logit.double()).flatten().tolist()):
        model.zero_grad()
        forced = [{"0.weight": torch.tensor(mask).view(shape)} for mask in masks]
        with dcpp.forced_masks(model, forced):
            elbo(problem.inputs[part], target=problem.targets[part]).loss.backward()
        mean += probability * model[0].weight_logit.grad.flatten()
    return mean


def _weighted_masks(case: Case, pi: list[float]) -> Iterator[tuple[list[tuple[bool, ...]], float]]:
    """Each way the masks of one step can come out, with its probability."""
    single = [{(True,): p, (False,): 1 - p} for p in pi]
    if case.estimator == "disarm":  # u < p and 1 - u < p: both on only if p > 1/2, both off only if p < 1/2
        choices = [_antithetic(p) for p in pi]
    elif case.num_samples == 2:
        choices = [{(a, b): one[(a,)] * one[(b,)] for a in (True, False) for b in (True, False)} for one in single]
    else:
        choices = single
    for outcome in itertools.product(*(choice.items() for choice in choices)):
        probability = math.prod(p for _, p in outcome)
        yield [tuple(gate[k] for gate, _ in outcome) for k in range(len(outcome[0][0]))], probability


def _antithetic(p: float) -> dict[tuple[bool, ...], float]:
    rest = abs(1 - 2 * p)
    return {(True, False): min(p, 1 - p), (False, True): min(p, 1 - p), (p > 0.5, p > 0.5): rest}


# ------------------------------------------------------------------------------------------ the run


def size_table(count: int, settings: Settings) -> Table:
    """All estimators at one number of gates."""
    side = math.isqrt(count)
    problem = make_problem(side, side, settings)
    truths = {fixed: reference(problem, settings, fixed=fixed) for fixed in (True, False)}
    rows: list[list[Cell]] = []
    for case in CASES:
        row: list[Cell] = [case.title, case.passes]
        for fixed in (True, False):
            draws = measure(problem, case, settings, fixed=fixed)
            quality = assess(draws, truths[fixed])
            row += [len(draws), quality.variance, quality.snr, quality.cosine]
            if fixed:
                row.append(_bias_cell(quality))
        rows.append(row)
    columns = ["estimator", "passes"]
    columns += ["draws", "variance", "SNR", "cosine", "bias"]
    columns += [f"{name}, minibatch too" for name in ("draws", "variance", "SNR", "cosine")]
    note = (
        f"{side} inputs, {side} hidden units, {CLASSES} classes, minibatches of {settings.batch} of "
        f"{settings.examples} examples; weights trained for {settings.training_steps} steps (accuracy "
        f"{problem.accuracy:.2f} by Eq. (19)). 1 / sqrt(gates) = {count**-0.5:.3g}. The first columns have the "
        "minibatch fixed, the last ones draw it anew with the masks."
    )
    return Table(f"{count:,} gates", columns, rows, note)


def bias_table(settings: Settings) -> Table:
    """Bias without noise, on six gates."""
    rows: list[list[Cell]] = []
    for case in CASES:
        if case.mask == "batch":
            bias, error = exact_bias(case, settings)
            rows.append([case.title, bias, error if error else None, "enumerated" if case.enumerable else "averaged"])
    note = "Relative to the length of the exact gradient, one minibatch. What is below 1e-12 is rounding."
    return Table("Bias on six gates", ["estimator", "bias", "standard error", "how"], rows, note)


def settings_given() -> tuple[Settings, Any]:
    """The command line as settings."""
    default = Settings()
    made = parser(__doc__)
    made.add_argument("--gates", type=int, nargs="*", default=list(default.gates), help="sizes, square numbers")
    made.add_argument("--draws", type=int, default=default.draws, help="most draws of a row (default: %(default)s)")
    made.add_argument("--row-seconds", type=float, default=default.row_seconds, help="time for a row's draws")
    made.add_argument("--reference-masks", type=int, default=default.reference_masks, help="masks of the reference")
    made.add_argument("--batch", type=int, default=default.batch, help="minibatch size (default: %(default)s)")
    made.add_argument("--examples", type=int, default=default.examples, help="size of the data set")
    made.add_argument("--training-steps", type=int, default=default.training_steps, help="before the measurement")
    made.add_argument("--tiny-draws", type=int, default=default.tiny_draws, help="draws on six gates, where averaged")
    made.add_argument(
        "--seed", type=int, default=default.seed, help="of weights, data and draws (default: %(default)s)"
    )
    known = vars(made.parse_args())
    out = known.pop("out")
    return Settings(**{**known, "gates": tuple(known["gates"])}), out


def main() -> None:
    """Print the tables."""
    settings, out = settings_given()
    report = Report("Quality of the gradient by the gates' logits", torch.device(settings.device), settings)
    threads = torch.get_num_threads()
    for count in settings.gates:
        torch.set_num_threads(threads if count > 10**4 else 1)  # small products lose by sharing
        report.add(size_table(count, settings))
    torch.set_num_threads(1)
    report.add(bias_table(settings))
    report.write(out)


if __name__ == "__main__":
    main()
