"""What the demo measures of its networks, as plain numbers."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab.runs.demo.training import Images

DRAWN = 20
"""Networks drawn from a posterior."""
ROUNDS = 15
"""How often each model is timed."""


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Percent right, by one pass in eval mode."""
    right: Tensor = model(images.test).argmax(1) == images.test_labels
    return 100.0 * right.double().mean().item()


def dense_weights(model: nn.Module) -> list[Tensor]:
    """The weights of the linear layers as deployed."""
    plain = dcpp.to_dense(model, mode="map")
    return [layer.weight.detach() for layer in plain.modules() if isinstance(layer, nn.Linear)]


def kept(model: nn.Module) -> dict[str, Any]:
    """The share of weights that are not zero, by layer and of all; connections of each pixel."""
    weights = dense_weights(model)
    left = [int((weight != 0).sum()) for weight in weights]
    return {
        "share": sum(left) / sum(weight.numel() for weight in weights),
        "layers": [one / weight.numel() for one, weight in zip(left, weights, strict=True)],
        "pixels": (weights[0] != 0).sum(0).tolist(),
    }


def connections(model: nn.Module) -> list[list[list[int]]]:
    """Which unit reads which unit, [from, to], for each linear layer but the first: that one reads pixels."""
    return [weight.t().nonzero().tolist() for weight in dense_weights(model)[1:]]


def doubt(model: nn.Module, images: Images, seed: int) -> dict[str, float]:
    """Mean entropy in nats on test images and on foreign ones, and how well doubt tells them apart (AUROC).

    A model without gates is one network: it has an entropy and no mutual information.
    """
    own, foreign = (
        dcpp.predict(
            model,
            part,
            num_samples=DRAWN,
            likelihood=dcpp.categorical,
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )
        for part in (images.test, images.foreign)
    )
    assert own.entropy is not None
    assert foreign.entropy is not None
    found = {
        "entropy": float(own.entropy.mean()),
        "foreign_entropy": float(foreign.entropy.mean()),
        "auroc": auroc(own.entropy, foreign.entropy),
    }
    if own.mutual_information is not None and foreign.mutual_information is not None:
        found["auroc_of_mutual_information"] = auroc(own.mutual_information, foreign.mutual_information)
    return found


def auroc(low: Tensor, high: Tensor) -> float:
    """The chance that a value of ``high`` is larger than one of ``low``; equal ones count half.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high, right=False) + torch.searchsorted(ordered, high, right=True)
    return float(below.double().mean() / (2.0 * len(low)))


def sizes(model: nn.Module, plain: nn.Module, images: Images) -> dict[str, Any]:
    """A network with few connections before and after `compact`: file, parameters, time, and whether it is the same.

    Before is the plain dense network of the same architecture, as a file of torch; after is what `save` writes.
    """
    small = dcpp.compact(model)
    compaction: Any = small.compaction
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "plain.pt"), Path(folder, "small.safetensors")
        torch.save(plain.state_dict(), before)
        dcpp.save(small, after)
        files = [path.stat().st_size for path in (before, after)]
    with torch.no_grad():
        apart = float((small(images.test) - model(images.test)).abs().max())
    return {
        "bytes": files,
        "parameters": list(compaction.parameters),
        "ms": [1e3 * seconds for seconds in median_seconds((plain, small), images.test)],
        "apart": apart,
        "accuracy": accuracy(small, images),
    }


@torch.no_grad()
def median_seconds(models: tuple[nn.Module, ...], x: Tensor, rounds: int = ROUNDS) -> list[float]:
    """Median seconds of a pass of each model, timed in turn so that what else the machine does hits all alike."""
    found: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 2):
        for times, model in zip(found, models, strict=True):
            begin = time.perf_counter()
            model(x)
            if number >= 2:  # the first ones warm up
                times.append(time.perf_counter() - begin)
    medians = [sorted(times)[len(times) // 2] for times in found]
    assert all(math.isfinite(one) for one in medians)
    return medians
