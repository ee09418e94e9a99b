"""The smallest things that can be trained: pictures of noise, networks, a protocol, and their part of a TOML file."""

from __future__ import annotations

import numpy as np

from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split

ONE_LAYER = Architecture(maps=(2,), pooled=(True,), filter_size=3, padding=1, hidden=3)
TWO_LAYERS = Architecture(maps=(2, 3), pooled=(True, False), filter_size=3, padding=1, hidden=4)
"""By how many layers convolve before the dense one."""
EVALUATION = Evaluation(every=2, curve_samples=2, samples=(1, 2), shares=(1.0, 0.5), predictive_samples=2)
TINY = Protocol(data="tiny", architecture=ONE_LAYER, training=Training(step_size=0.05, batch_size=16, epochs=2))
ONE_LAYER_TOML = """
[protocol.architecture]
maps = [2]
pooled = [true]
filter_size = 3
padding = 1
hidden = 3
"""


def tiny(
    name: str = "tiny", *, train: int = 64, test: int = 30, channels: int = 1, side: int = 8, seed: int = 0
) -> Dataset:
    """Noise of three classes."""
    random = np.random.default_rng(seed)

    def split(count: int) -> Split:
        images = random.integers(0, 256, (count, channels, side, side), dtype=np.uint8)
        return Split(images, np.arange(count) % 3)

    return Dataset(name, split(train), split(test), ("a", "b", "c"), "", "", Provenance("made up", verified=False))
