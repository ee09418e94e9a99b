"""What `dcpp demo` found, as plain data: accuracy by share, pixels, doubt about foreign images, sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dropconnectpp.lab.config.notes import DEMO
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import Notes
from dropconnectpp.lab.report.statistics import Comparison, holm, paired
from dropconnectpp.lab.report.tables.rows import ByReplica, Table, compared, plain, statistic

PLAIN, POSTERIOR, PLAN, GRADUAL = "plain", "posterior", "plan", "gradual"
METHODS = {
    PLAIN: "Plain network",
    POSTERIOR: "DropConnect++, straight-through",
    PLAN: "DropConnect++ with SparsityPlan",
    GRADUAL: "Gradual magnitude pruning",
}
LARGEST_UNIT = 100_000
"""Units with larger numbers are not drawn: no demo has them."""


@dataclass(frozen=True)
class Shown:
    """One demo's note, which anybody may have written: what is not a number is left out."""

    digest: str
    content: Mapping[str, Any]

    @property
    def networks(self) -> list[Mapping[str, Any]]:
        """The networks that were measured."""
        found = self.content.get("networks")
        return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []

    @property
    def places(self) -> list[tuple[str, float]]:
        """Methods and the shares that they were to keep, largest first."""
        found = {(str(one.get("method")), finite(one.get("keep"))) for one in self.networks}
        known = [(method, keep) for method, keep in found if method in METHODS and keep is not None]
        return sorted(known, key=lambda place: (-place[1], list(METHODS).index(place[0])))

    def values(self, method: str, keep: float, *path: str | int) -> dict[int, float]:
        """A number by seed."""
        found = {}
        for one in self.networks:
            value: Any = one if (one.get("method"), one.get("keep")) == (method, keep) else None
            for name in path:
                value = _inside(value, name)
            number, seed = finite(value), one.get("seed")
            if number is not None and isinstance(seed, int):
                found[seed] = number
        return found

    def number(self, name: str) -> float | None:
        """A number of the demo as a whole."""
        return finite(self.content.get(name))

    def identity(self, method: str, keep: float) -> dict[str, Any]:
        """The columns that say what a row is about."""
        settings = self.content.get("settings")
        return {
            "data": str(self.content.get("data", "")),
            "title": str(self.content.get("data", "")),
            "method": METHODS[method],
            "kind": method,
            "digest": self.digest,
            "asked": keep,
            "train": self.number("train"),
            "test": self.number("test"),
            "epochs": finite(settings.get("epochs")) if isinstance(settings, Mapping) else None,
        }


def _inside(value: Any, name: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    return value[name] if isinstance(value, list) and isinstance(name, int) and name < len(value) else None


def demo_tables(notes: Notes) -> dict[str, Table]:
    """The tables of this module, by name; empty where there was no demo."""
    shown = [
        Shown(digest, note) for (digest, name), note in notes.items() if name == DEMO and isinstance(note, Mapping)
    ]
    return {
        "demo": [row for one in shown for row in accuracies(one)],
        "demo_doubt": [row for one in shown for row in doubts(one)],
        "demo_sizes": [row for one in shown for row in sizes(one)],
        "demo_pixels": [row for one in shown for row in pixels(one)],
        "demo_connections": [row for one in shown for row in connections(one)],
    }


def accuracies(shown: Shown) -> Table:
    """Accuracy by share kept, compared seed by seed with the plain network and with gradual pruning."""
    table: Table = []
    tests: list[tuple[dict[str, Any], str, Comparison]] = []
    for method, keep in shown.places:
        values = shown.values(method, keep, "accuracy")
        row: dict[str, Any] = {
            **shown.identity(method, keep),
            **statistic(values.values()),
            "kept": statistic(shown.values(method, keep, "kept", "share").values()),
            "read": statistic(_read(shown, method, keep)),
            "pixels": _pixel_count(shown, method, keep),
        }
        for name, other in (("against_plain", (PLAIN, 1.0)), ("against_gradual", (GRADUAL, keep))):
            test = None
            if (method, name) in ((PLAN, "against_plain"), (PLAN, "against_gradual"), (GRADUAL, "against_plain")):
                test = compared(paired, values, shown.values(*other, "accuracy"))
            row[name] = None if test is None else plain(test)
            if test is not None:
                tests.append((row, name, test))
        table.append(row)
    _adjust(tests)
    return table


def _read(shown: Shown, method: str, keep: float) -> Iterator[float]:
    """How many pixels still have a connection, for each seed."""
    for one in shown.networks:
        counts = _inside(_inside(one, "kept"), "pixels")
        if (one.get("method"), one.get("keep")) == (method, keep) and isinstance(counts, list):
            yield float(sum(bool(finite(count)) for count in counts))


def _pixel_count(shown: Shown, method: str, keep: float) -> int | None:
    for one in shown.networks:
        counts = _inside(_inside(one, "kept"), "pixels")
        if (one.get("method"), one.get("keep")) == (method, keep) and isinstance(counts, list):
            return len(counts)
    return None


def _adjust(tests: list[tuple[dict[str, Any], str, Comparison]]) -> None:
    """Holm's adjustment over all tests of one table, in place."""
    for (row, name, _), p in zip(tests, holm([test.p for _, _, test in tests]), strict=True):
        row[name] |= {"adjusted_p": p}


def doubts(shown: Shown) -> Table:
    """Doubt about the data's own images and about foreign ones."""
    table: Table = []
    tests: list[tuple[dict[str, Any], str, Comparison]] = []
    for method in (PLAIN, POSTERIOR):
        auroc = shown.values(method, 1.0, "doubt", "auroc")
        if not auroc:
            continue
        test = compared(paired, auroc, shown.values(PLAIN, 1.0, "doubt", "auroc")) if method == POSTERIOR else None
        accuracy = shown.values(method, 1.0, "accuracy")
        other = compared(paired, accuracy, shown.values(PLAIN, 1.0, "accuracy")) if method == POSTERIOR else None
        row: dict[str, Any] = {
            **shown.identity(method, 1.0),
            "foreign": shown.number("foreign"),
            **statistic(auroc.values()),
            "entropy": statistic(shown.values(method, 1.0, "doubt", "entropy").values()),
            "foreign_entropy": statistic(shown.values(method, 1.0, "doubt", "foreign_entropy").values()),
            "against_plain": None if test is None else plain(test),
            "accuracy": statistic(accuracy.values()),
            "accuracy_against_plain": None if other is None else plain(other),
        }
        tests += [(row, name, one) for name, one in (("against_plain", test), ("accuracy_against_plain", other)) if one]
        table.append(row)
    _adjust(tests)
    return table


def sizes(shown: Shown) -> Table:
    """The smallest planned network before and after `compact`: bytes, parameters, milliseconds."""
    table: Table = []
    for method, keep in shown.places:
        ways = ("bytes", "parameters", "ms")
        pairs = {name: [shown.values(method, keep, "compact", name, i) for i in (0, 1)] for name in ways}
        if not all(pairs["bytes"]):
            continue
        table.append(
            {
                **shown.identity(method, keep),
                **{
                    f"{name}_{when}": statistic(values.values())
                    for name, both in pairs.items()
                    for when, values in zip(("before", "after"), both, strict=True)
                },
                "speed": speed(*pairs["ms"]),
                "apart": max(shown.values(method, keep, "compact", "apart").values(), default=None),
                "threads": shown.number("threads"),
            }
        )
    return table


def speed(before: ByReplica, after: ByReplica) -> dict[str, Any] | None:
    """How many times as fast, with the 95% interval of the mean of its logarithm; None where no test is possible."""
    logs = [{key: math.log(value) for key, value in one.items() if value > 0} for one in (before, after)]
    test = compared(paired, logs[0], logs[1])
    if test is None:
        return None
    return {
        "times": math.exp(test.difference),
        "interval": (math.exp(test.interval[0]), math.exp(test.interval[1])),
        "p": test.p,
        "n": test.n_a,
    }


def pixels(shown: Shown) -> Table:
    """Connections of each pixel at the smallest share, averaged over seeds; an image's first channel."""
    shape = shown.content.get("shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)):
        return []
    _, height, width = shape
    smallest = min((keep for _, keep in shown.places), default=1.0)
    table: Table = []
    for method in (PLAN, GRADUAL):
        for place in range(height * width):
            found = shown.values(method, smallest, "kept", "pixels", place)
            if not found:
                break
            mean = sum(found.values()) / len(found)
            row, column = divmod(place, width)
            table.append({**shown.identity(method, smallest), "row": row, "column": column, "connections": mean})
    return table


def connections(shown: Shown) -> Table:
    """Which unit reads which unit behind the first layer, of the first network of each method at the smallest share."""
    smallest = min((keep for _, keep in shown.places), default=1.0)
    table: Table = []
    for method in (PLAN, GRADUAL):
        for one in shown.networks:
            layers = one.get("connections")
            if (one.get("method"), one.get("keep")) != (method, smallest) or not isinstance(layers, list):
                continue
            pairs = [(place, pair) for place, layer in enumerate(layers, 2) for pair in _pairs(layer)]
            table += [
                {**shown.identity(method, smallest), "seed": one.get("seed"), "layer": place, "from": a, "to": b}
                for place, (a, b) in pairs
            ]
    return table


def _pairs(layer: Any) -> list[tuple[int, int]]:
    pairs = layer if isinstance(layer, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n < LARGEST_UNIT for n in pair)
    ]
