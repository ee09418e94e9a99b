"""The same protocol with fewer training examples, and with epochs enough for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.settings import ProtocolError, require

EXAMPLES = (250, 500, 1000, 2500, 5000, 10_000, 25_000, 0)
"""0 is all of them: 60,000 of Fashion-MNIST."""


@dataclass(frozen=True, kw_only=True)
class SmallData:
    """With how many training examples each method is trained, and for how long at least."""

    examples: tuple[int, ...] = EXAMPLES
    """0: all."""
    least_steps: int = 2000
    """Minibatches: where the protocol's epochs are fewer steps, there are more epochs."""

    def __post_init__(self) -> None:
        require(bool(self.examples), "examples must be one or more numbers; 0 is all.")
        require(len(set(self.examples)) == len(self.examples), f"examples names a number twice: {self.examples}.")
        require(self.least_steps >= 0, f"least_steps must not be negative, got {self.least_steps}.")

    def protocols(self, protocol: Protocol) -> tuple[Protocol, ...]:
        """The protocol for each number of examples. That with all of them is the protocol itself.

        >>> [one.training.epochs for one in SmallData(examples=(250, 5000, 0)).protocols(Protocol())]
        [2000, 100, 100]
        """
        return tuple(self._with(protocol, count) for count in self.examples)

    def _with(self, protocol: Protocol, count: int) -> Protocol:
        if not count:
            return protocol
        training, batch = protocol.training, protocol.training.batch_size
        require(count >= batch, f"examples must be 0 for all, or at least a batch of {batch}, got {count}.")
        epochs = max(training.epochs, math.ceil(self.least_steps / (count // batch)))
        # Evaluations are of the whole test set, however few examples an epoch has.
        every = max(protocol.evaluation.every, math.ceil(epochs / 4))
        return replace(
            protocol,
            training=replace(training, examples=count, epochs=epochs),
            evaluation=replace(protocol.evaluation, every=every),
        )


def given(examples: str | None) -> SmallData:
    """Numbers of examples as the command is given them.

    >>> given("250, 1000, all").examples
    (250, 1000, 0)
    """
    if examples is None:
        return SmallData()
    try:
        numbers = tuple(0 if one.strip() == "all" else int(one) for one in examples.split(",") if one.strip())
    except ValueError:
        raise ProtocolError(
            f"examples must be whole numbers separated by commas, or all, such as 250,1000,all, got {examples!r}."
        ) from None
    return SmallData(examples=numbers)
