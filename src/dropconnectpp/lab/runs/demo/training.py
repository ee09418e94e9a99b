"""The demo's networks: dense, with a `SparsityPlan`, by gradual magnitude pruning, and with a posterior to draw from.

All start from the same weights and see the same minibatches where the seed is the same. Their step sizes were chosen on
MNIST, which the demo does not show: `tools/choose_demo.py` tries as many for each method. The rest is the library's
defaults; gradual pruning has the plan's last step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import dropconnectpp as dcpp
from dropconnectpp.lab.data.dataset import Dataset, Split
from dropconnectpp.lab.data.normalisation import standardise

BATCH = 64
DENSE_LR, POSTERIOR_LR, PLANNED_LR, GRADUAL_LR = 4e-3, 8e-3, 8e-3, 4e-3
"""Adam's step sizes of the weights, as chosen on MNIST among 1e-3, 2e-3, 4e-3 and 8e-3."""
LOGIT_LR = 10.0
"""The step size of the log-odds of the network with a posterior, in those of its weights; a plan chooses its own."""
PRUNED_FROM, PRUNED_UNTIL = 0.1, 0.8
"""Between these shares of the steps gradual magnitude pruning removes weights."""
RANKED_EVERY = 20
"""Steps between two rankings by magnitude."""
HIDDEN = (300, 100)


@dataclass(frozen=True)
class Images:
    """Standardised images as vectors, (N, pixels), with labels where they have any."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    foreign: Tensor
    """Images of something else: handwritten digits."""
    classes: int

    @classmethod
    def of(cls, dataset: Dataset) -> Images:
        """Those of a data set, beside scikit-learn's digits at the same size."""

        def flat(split: Split) -> Tensor:
            return standardise(torch.from_numpy(split.images.copy())).flatten(1)

        labels = [torch.from_numpy(split.labels.copy()) for split in (dataset.train, dataset.test)]
        return cls(
            flat(dataset.train),
            labels[0],
            flat(dataset.test),
            labels[1],
            standardise(_digits(dataset.shape)).flatten(1),
            len(dataset.classes),
        )


def _digits(shape: tuple[int, int, int]) -> Tensor:
    """scikit-learn's 1,797 handwritten digits, enlarged."""
    from sklearn.datasets import load_digits

    small = torch.as_tensor(load_digits().images).float().unsqueeze(1) * (255.0 / 16.0)
    large = interpolate(small, size=shape[1:], mode="bilinear", align_corners=False)
    return large.round().clamp(0, 255).to(torch.uint8).expand(-1, shape[0], -1, -1)


def network(pixels: int, classes: int) -> nn.Sequential:
    """A plain classifier, as anybody would write it."""
    wide, narrow = HIDDEN
    return nn.Sequential(
        nn.Linear(pixels, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU(), nn.Linear(narrow, classes)
    )


def fit(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    images: Images,
    epochs: int,
    seed: int,
    lr: float,
    after: Callable[[int, int], None] = lambda step, steps: None,
) -> None:
    """Adam, with a step size that falls to 0 over the second half; ``after`` is told each step and their number."""
    ours = [p for name, p in model.named_parameters() if name.endswith("_logit")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("_logit")]
    optimizer = torch.optim.Adam([{"params": weights, "lr": lr}, {"params": ours, "lr": LOGIT_LR * lr}])
    per_epoch = len(images.train) // BATCH
    steps = epochs * per_epoch
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2.0 * (1.0 - step / steps)))
    order = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(epochs):
        shuffled = torch.randperm(len(images.train), generator=order)[: per_epoch * BATCH]
        for number, rows in enumerate(shuffled.split(BATCH), epoch * per_epoch + 1):
            optimizer.zero_grad()
            loss(images.train[rows], images.train_labels[rows]).backward()
            optimizer.step()
            falling.step()
            after(number, steps)
    model.eval()


def start(images: Images, seed: int) -> nn.Sequential:
    """The network of a seed, before it is trained."""
    torch.manual_seed(seed)
    return network(images.train.shape[1], images.classes)


def dense(images: Images, epochs: int, seed: int, lr: float = DENSE_LR) -> nn.Sequential:
    """The plain network."""
    model = start(images, seed)
    fit(model, lambda x, y: cross_entropy(model(x), y), images, epochs, seed, lr)
    return model


def planned(images: Images, epochs: int, seed: int, keep: float, lr: float = PLANNED_LR) -> nn.Module:
    """The preset "sparse" with a `SparsityPlan`, as the how-to has it."""
    model = dcpp.convert(start(images, seed), preset="sparse")
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=len(images.train))
    plan = dcpp.SparsityPlan(elbo, epochs * (len(images.train) // BATCH), keep=keep)
    with warnings.catch_warnings():  # a share that was not met is in the table
        warnings.filterwarnings("ignore", message=r"SparsityPlan: keep=")
        fit(model, lambda x, y: elbo(x, target=y).loss, images, epochs, seed, lr, lambda step, steps: plan.step())
    return model


def with_posterior(images: Images, epochs: int, seed: int, lr: float = POSTERIOR_LR) -> nn.Module:
    """DropConnect++ by straight-through on every layer, whose networks can be drawn."""
    model = dcpp.convert(start(images, seed), estimator="straight-through")
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=len(images.train))
    fit(model, lambda x, y: elbo(x, target=y).loss, images, epochs, seed, lr)
    return model


def gradual(images: Images, epochs: int, seed: int, keep: float, lr: float = GRADUAL_LR) -> nn.Sequential:
    """Gradual magnitude pruning (Zhu and Gupta, 2017): one ranking of all weights, a share that falls by a cubic."""
    model = start(images, seed)
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    masks = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]

    @torch.no_grad()
    def prune(step: int, steps: int) -> None:
        if step % RANKED_EVERY == 0 or step == steps:
            sizes = torch.cat([weight.abs().flatten() for weight in weights])
            kept = torch.zeros_like(sizes, dtype=torch.bool)
            kept[sizes.topk(round(share_after(step / steps, keep) * len(sizes))).indices] = True
            for mask, found in zip(masks, kept.split([mask.numel() for mask in masks]), strict=True):
                mask.copy_(found.view_as(mask))
        for weight, mask in zip(weights, masks, strict=True):
            weight.mul_(mask)

    fit(model, lambda x, y: cross_entropy(model(x), y), images, epochs, seed, lr, prune)
    return model


def share_after(done: float, keep: float) -> float:
    """The share of weights that gradual pruning keeps once a share ``done`` of the steps is over.

    >>> share_after(0.1, 0.02), round(share_after(0.45, 0.02), 4), share_after(0.9, 0.02)
    (1.0, 0.1425, 0.02)
    """
    progress = min(max((done - PRUNED_FROM) / (PRUNED_UNTIL - PRUNED_FROM), 0.0), 1.0)
    return keep + (1.0 - keep) * (1.0 - progress) ** 3
