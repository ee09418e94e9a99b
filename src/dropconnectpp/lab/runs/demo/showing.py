"""The demo from its settings to the store: every network is measured once, and a second call goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.config.notes import DEMO
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.runs.demo import measuring, training
from dropconnectpp.lab.runs.store import Store

PLAIN, POSTERIOR, PLAN, GRADUAL = "plain", "posterior", "plan", "gradual"
Told = Callable[[str, int, int], None]
"""Is told what is being done, how many networks are trained, and of how many."""


@dataclass(frozen=True)
class Settings:
    """How much the demo trains. The rest is fixed: the library's defaults, and what `training` says."""

    seeds: int = 4
    epochs: int = 10
    keep: tuple[float, ...] = (0.05, 0.02, 0.01)

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.keep or not all(0.0 < share < 1.0 for share in self.keep):
            raise ArgumentError(f"keep must be shares between 0 and 1, got {self.keep}.")

    @property
    def networks(self) -> list[tuple[int, str, float]]:
        """Seed, method and share of each network, in the order in which they are trained."""
        methods = [(PLAIN, 1.0), (POSTERIOR, 1.0), *((name, keep) for keep in self.keep for name in (PLAN, GRADUAL))]
        return [(seed, method, keep) for seed in range(self.seeds) for method, keep in methods]


def show(settings: Settings, dataset: Dataset, store: Callable[[], Store], digest: str, told: Told) -> None:
    """Train and measure what the store does not have yet; the note `DEMO` of ``digest`` holds the numbers.

    It takes one thread: the networks are small, and threads that wait for each other would take longer.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _show(settings, dataset, store, digest, told)
    finally:
        torch.set_num_threads(threads)


def _show(settings: Settings, dataset: Dataset, store: Callable[[], Store], digest: str, told: Told) -> None:
    images = training.Images.of(dataset)
    content: dict[str, Any] = {
        "settings": asdict(settings) | {"keep": list(settings.keep)},
        "data": dataset.name,
        "shape": list(dataset.shape),
        "train": len(images.train),
        "test": len(images.test),
        "foreign": len(images.foreign),
        "threads": torch.get_num_threads(),
        "networks": [],
    }
    with store() as opened:
        earlier = opened.notes(digest).get((digest, DEMO))
    if isinstance(earlier, dict) and earlier.get("settings") == content["settings"]:
        content = earlier
    done = {(one["seed"], one["method"], one["keep"]) for one in content["networks"]}
    wanted = settings.networks
    for number, one in enumerate(wanted):
        told(_title(*one), number, len(wanted))
        if one in done:
            continue
        with torch.random.fork_rng(devices=[]):
            content["networks"].append(_measured(images, settings, *one))
        with store() as opened:
            opened.write_note(digest, DEMO, content)
    told("few connections, doubt", len(wanted), len(wanted))


def _title(seed: int, method: str, keep: float) -> str:
    names = {
        PLAIN: "plain network",
        POSTERIOR: "DropConnect++",
        PLAN: f"SparsityPlan to {keep:.3g}",
        GRADUAL: f"gradual pruning to {keep:.3g}",
    }
    return f"{names[method]}, seed {seed}"


def _measured(images: training.Images, settings: Settings, seed: int, method: str, keep: float) -> dict[str, Any]:
    """One network, trained and measured."""
    found: dict[str, Any] = {"seed": seed, "method": method, "keep": keep}
    if method == PLAIN:
        model: Any = training.dense(images, settings.epochs, seed)
        return found | {"accuracy": measuring.accuracy(model, images), "doubt": measuring.doubt(model, images, seed)}
    if method == POSTERIOR:
        model = training.with_posterior(images, settings.epochs, seed)
        return found | {"accuracy": measuring.accuracy(model, images), "doubt": measuring.doubt(model, images, seed)}
    train = training.planned if method == PLAN else training.gradual
    model = train(images, settings.epochs, seed, keep)
    found |= {"accuracy": measuring.accuracy(model, images), "kept": measuring.kept(model)}
    if seed == 0 and keep == min(settings.keep):
        found |= {"connections": measuring.connections(model)}
    if method == PLAN and keep == min(settings.keep):
        found |= {"compact": measuring.sizes(model, training.start(images, seed).eval(), images)}
    return found
