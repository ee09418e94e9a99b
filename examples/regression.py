"""Regression with learned noise: intervals, their calibration, and one call that judges them.

A curve with noise, seen on two stretches with a gap between them. The network learns its connections and the noise's
scale; held-out examples calibrate it, others judge it. Run it with `python examples/regression.py`; it takes about ten
seconds. `--figure bands.svg` draws mean and bands, with matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import dropconnectpp as dcpp

NOISE = 0.2


def observe(count: int) -> tuple[Tensor, Tensor]:
    """Noisy values of sin 3x for x in [-1, -0.2] and [0.4, 1]."""
    x = torch.cat(
        [torch.empty(count // 2, 1).uniform_(-1.0, -0.2), torch.empty(count - count // 2, 1).uniform_(0.4, 1.0)]
    )
    return x, torch.sin(3.0 * x) + NOISE * torch.randn_like(x)


def draw(found: dcpp.Prediction, grid: Tensor, x: Tensor, y: Tensor, path: Path) -> None:
    """Mean, the part of the deviation that networks disagree on, and 90% intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    low, high = found.interval(0.9)
    mean, model = found.mean, found.model_deviation
    axes.fill_between(grid.flatten(), low.flatten(), high.flatten(), alpha=0.2, label="90% interval")
    axes.fill_between(grid.flatten(), (mean - model).flatten(), (mean + model).flatten(), alpha=0.4, label="networks")
    axes.plot(grid, mean, label="mean")
    axes.plot(x, y, ".", color="black", markersize=2, label="observed")
    axes.set(xlabel="x", ylabel="y")
    axes.legend(frameon=False)
    figure.savefig(path)
    print(f"The figure: {path}")


def main() -> None:
    """Train, calibrate, judge, and compare the doubt in the gap with that beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="training steps (default: 3000)")
    parser.add_argument("--figure", type=Path, help="where to draw mean and bands")
    options = parser.parse_args()
    torch.manual_seed(0)
    (x, y), held_out, test = observe(200), observe(100), observe(1000)

    # The prior expects 98% of the connections to be kept, and training starts there: with one of half, the default,
    # few examples cannot pay for a network that fits them.
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    model = dcpp.convert(model, alpha=0.98, beta=0.02, keep_probability=0.98)
    noise = dcpp.gaussian()  # without a scale, it is learned
    elbo = dcpp.ELBO(model, noise, num_data=len(x))
    optimizer = torch.optim.Adam(dcpp.parameter_groups(elbo, lr=5e-3, logit_lr=2e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(x), (64,))
        terms = elbo(x[rows], target=y[rows])
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, options.steps // 3) == 0:
            nats = float(terms.elbo) / len(x)
            print(f"step {step:5}  ELBO per example {nats:6.2f} nats, noise {float(noise.scale):.3f}")

    model.eval()
    done = dcpp.calibrate(model, held_out, num_samples=100)
    print(f"\nNoise times {done.factor:.2f}: held-out NLL {done.nll_before:.3f} becomes {done.nll_after:.3f} nats\n")
    print(dcpp.evaluate(model, test, num_samples=100))

    grid = torch.linspace(-1.5, 1.5, 301).unsqueeze(1)
    found = dcpp.predict(model, grid, num_samples=100)
    places = {"where it saw examples": (-0.9, -0.3), "in the gap": (-0.1, 0.3), "beyond": (1.2, 1.5)}
    print("\nHow much the drawn networks disagree, as a standard deviation:")
    for where, (low, high) in places.items():
        inside = (grid >= low) & (grid <= high)
        print(f"  {where:<24}{float(found.model_deviation[inside].mean()):.3f}")
    if options.figure is not None:
        draw(found, grid, x, y, options.figure)


if __name__ == "__main__":
    main()
