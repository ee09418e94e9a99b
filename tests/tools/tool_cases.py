"""What the tests of tools share: an experiment that trains at once, and the cells of a table."""

from __future__ import annotations

from dataclasses import replace

from tiny_cases import ONE_LAYER_TOML

from dropconnectpp.lab import data
from dropconnectpp.lab.data.dataset import Dataset, Split

TRAINED = f"""
[protocol]
data = "fashion-mini"
{ONE_LAYER_TOML}
[protocol.training]
batch_size = 50
epochs = 1

[protocol.evaluation]
curve_samples = 0
samples = [1]
shares = [1.0]
predictive_samples = 0

[selection]
step_sizes = [0.01, 0.05]
step_replicas = 2
rates = [0.2, 0.5]
rate_replicas = 1
logit_steps = [1, 30]
"""
"""A file of an experiment, up to its methods."""


def few(name: str) -> Dataset:
    """The first examples of a data set."""
    whole = data.load(name)
    train, test = (Split(part.images[:100], part.labels[:100]) for part in (whole.train, whole.test))
    return replace(whole, train=train, test=test)


def lines(section: str) -> list[list[str]]:
    """The cells of a table's body."""
    plain = section.replace("\\", "").splitlines()
    body = [line.strip("| ").split(" | ") for line in plain if line.startswith("|")]
    return body[2:]
