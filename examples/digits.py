"""The whole library in one minute: train on real digits, predict with uncertainty, prune, deploy.

Run it with `python examples/digits.py`; `--help` lists the options.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import dropconnectpp as dcpp

BATCH = 64


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 handwritten digits of 8x8 pixels, one third held out."""
    data = load_digits()
    split = train_test_split(data.data / 16.0, data.target, test_size=1 / 3, random_state=0, stratify=data.target)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in split)
    return x_train.float(), y_train, x_test.float(), y_test


def network(hidden: int = 256) -> nn.Sequential:
    """A plain classifier, as anybody would write it."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, title: str) -> float:
    """Maximise the ELBO with Adagrad; a model without DropConnect++ layers is fitted plainly."""
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=len(x))
    optimizer = torch.optim.Adagrad(dcpp.parameter_groups(model, lr=0.02, logit_lr=0.1))
    start = time.perf_counter()
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            terms = elbo(x[rows], target=y[rows])
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
        progress(title, epoch + 1, epochs, f"loss {terms.loss.item():.3f}")
    model.eval()
    return time.perf_counter() - start


def progress(title: str, done: int, total: int, note: str) -> None:
    """A bar in a terminal, one line at the end elsewhere."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        print(f"\r{title:<26}[{bar:<30}] {note} ", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        print(f"{title}: {total} epochs, {note}", file=sys.stderr, flush=True)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent right, by one pass in eval mode: Eq. (19)."""
    with torch.no_grad():
        return 100.0 * (model.eval()(x).argmax(1) == y).double().mean().item()


def main() -> None:
    """Print what a user wants to see."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training set (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and masks (default: 0)")
    options = parser.parse_args()
    x_train, y_train, x_test, y_test = digits()

    models: dict[str, nn.Module] = {}
    for title, kind, layer_options in [
        ("no regularisation", None, {}),
        ("DropConnect, rate 1/2", "dropconnect", {}),
        ("DropConnect++, bbvi", "dropconnect++", {"estimator": dcpp.estimators.BBVI(baseline="mean-network")}),
        ("DropConnect++, pathwise", "dropconnect++", {"estimator": "straight-through"}),
    ]:
        torch.manual_seed(options.seed)
        model = network()
        if kind is not None:
            model = dcpp.convert(model, include=["0"], kind=kind, **layer_options)
        train(model, x_train, y_train, options.epochs, title)
        models[title] = model

    print(f"\nTest accuracy on {len(x_test)} digits (one run each: differences under a point say nothing)")
    for title, model in models.items():
        print(f"  {title:<26}{accuracy(model, x_test, y_test):6.2f}%")

    learned = models["DropConnect++, pathwise"]
    print("\nWhat the pathwise posterior learned\n")
    print(dcpp.posterior(learned).summary())

    print("\nAccuracy when the first layer keeps only some of its synapses")
    shares = [1.0, 0.5, 0.25, 0.1, 0.05]
    print(f"  {'kept':<26}" + "".join(f"{share:>8.0%}" for share in shares))
    for score in ("keep_probability", "magnitude", "product"):
        row = [accuracy(dcpp.prune(learned, keep=share, score=score), x_test, y_test) for share in shares]
        print(f"  by {score:<23}" + "".join(f"{value:8.2f}" for value in row))

    found = dcpp.predict(learned, x_test, num_samples=100)
    wrong = found.probabilities.argmax(1) != y_test
    print("\nUncertainty from 100 sampled networks (nats, mean over the test set)")
    for title, rows in [("right predictions", ~wrong), ("wrong predictions", wrong)]:
        if bool(rows.any()):
            entropy, mutual = found.entropy[rows].mean(), found.mutual_information[rows].mean()
            print(f"  {title:<26}entropy {entropy:.3f}   mutual information {mutual:.4f}   n = {int(rows.sum())}")

    dense = dcpp.to_dense(dcpp.prune(learned, keep=0.25)).eval()
    zeros = (dense[0].weight == 0).double().mean().item()
    print(f"\nDeployed: {type(dense[0]).__name__} layers alone, {zeros:.0%} of the first layer's weights are zero,")
    print(f"  accuracy {accuracy(dense, x_test, y_test):.2f}%")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.safetensors"
        dcpp.save(learned, path)
        again = dcpp.load(path, network())
        same = torch.equal(again.eval()(x_test), learned(x_test))
        print(f"  saved and loaded again ({path.stat().st_size / 1024:.0f} KiB): the same predictions: {same}")


if __name__ == "__main__":
    main()
