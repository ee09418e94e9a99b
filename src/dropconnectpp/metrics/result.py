"""`Evaluation`: one table, one figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dropconnectpp.errors import ArgumentError, MissingPackageError
from dropconnectpp.likelihoods.memory import describe
from dropconnectpp.metrics.drawing import draw
from dropconnectpp.metrics.parts import Figure, Panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

TITLES = {
    "accuracy": "accuracy",
    "nll": "negative log-likelihood",
    "brier": "Brier score",
    "ece": "calibration error",
    "adaptive_ece": "calibration error, equal counts",
    "aurc": "error averaged over coverage (AURC)",
    "rmse": "root mean squared error",
    "crps": "CRPS",
    "coverage": "inside the {level:.0%} interval",
    "sharpness": "width of the {level:.0%} interval",
}


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation(Mapping[str, float]):
    """What `evaluate` measured: a mapping of numbers, a table (`str`), a figure (`plot`).

    Percentages are numbers up to 100, NLL is in nats, everything else in the target's own unit.
    """

    figures: Mapping[str, Figure]
    """Of the examples with targets, with standard errors."""
    foreign: Mapping[str, Mapping[str, Figure]]
    """Of foreign examples, by the name of their set: "auroc, entropy" and so on."""
    counts: Mapping[str, int]
    """How many examples: of the loader, "", and of each foreign set."""
    num_samples: int
    """How many networks predicted."""
    likelihood: Any
    level: float
    """Of intervals."""
    panels: Panels

    def __getitem__(self, name: str) -> float:
        key, _, where = name.partition(" of ")
        lines = self.foreign.get(where, {}) if where else self.figures
        if key not in lines:
            raise KeyError(f"{name!r}; there are {', '.join(self)}")
        return lines[key].value

    def __iter__(self) -> Any:
        yield from self.figures
        for where, lines in self.foreign.items():
            yield from (f"{name} of {where}" for name in lines)

    def __len__(self) -> int:
        return len(self.figures) + sum(map(len, self.foreign.values()))

    def __str__(self) -> str:
        lines = [(TITLES[name].format(level=self.level), str(figure)) for name, figure in self.figures.items()]
        kind = (describe(self.likelihood) or {}).get("name", "a likelihood of your own")
        networks = "1 network" if self.num_samples == 1 else f"{self.num_samples} networks"
        told = [f"{self.counts['']:,} examples, {networks}, {kind}", *_table(lines)]
        for where, found in self.foreign.items():
            rows = [(name.replace("auroc", "AUROC").replace("fpr95", "FPR95"), str(one)) for name, one in found.items()]
            told += [f"{where}: {self.counts[where]:,} foreign examples", *_table(rows)]
        return "\n".join(told)

    __repr__ = __str__

    def plot(self) -> Drawing:
        """A matplotlib figure: reliability and risk of classes, calibration of values, doubts of foreign examples.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            raise MissingPackageError("plot needs matplotlib. Install it with: pip install matplotlib") from None
        panels = self.panels
        if panels.reliability is None and panels.pit is None and not panels.doubts:
            raise ArgumentError("plot has nothing to draw for a likelihood of your own; str(result) has its number.")
        return draw(panels, self, ["known", *self.foreign])


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(title) for title, _ in rows), default=0)
    return [f"  {title:<{width}}  {value}" for title, value in rows]
