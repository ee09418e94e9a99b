"""The UCI regression benchmark as plain data: each method on each set, and DropConnect++ against each other method."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from dropconnectpp.lab.config.uci import BENCHMARK, KINDS, LABELS, PREFIX, SETS
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.published_uci import UCI
from dropconnectpp.lab.report.statistics import SampleError, holm, resampled
from dropconnectpp.lab.report.tables.rows import OURS, Table, statistic
from dropconnectpp.lab.runs.store import Row

Measure = Literal["log_likelihood", "rmse"]
MEASURES: tuple[Measure, ...] = ("log_likelihood", "rmse")
SPLITS = {f"{PREFIX}protein-tertiary-structure": 5}
"""How many splits are published, where it is not 20."""


def uci_tables(rows: Iterable[Row]) -> dict[str, Table]:
    """The tables of this module, by name; empty where the benchmark was not run."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        settings = row.protocol.settings
        if settings.get("benchmark") == BENCHMARK and settings.get("kind") in KINDS:
            groups[row.key.digest, str(settings.get("data"))].append(row)
    ordered = sorted(groups.items(), key=lambda item: _place(item[1][0]))
    members = [rows for _, rows in ordered]
    results = [_result(one) for one in members]
    return {"uci": results, "uci_tests": _tests(members), "uci_published": _published(results)}


def _place(row: Row) -> tuple[Any, ...]:
    settings = row.protocol.settings
    names = list(SETS)
    bare = str(settings.get("data")).removeprefix(PREFIX)
    return names.index(bare) if bare in names else len(names), bare, KINDS.index(settings["kind"]), row.key.digest


def _identity(row: Row) -> dict[str, Any]:
    settings = row.protocol.settings
    data = str(settings.get("data"))
    bare = data.removeprefix(PREFIX)
    return {
        "data": data,
        "title": SETS.get(bare, bare),
        "method": LABELS[settings["kind"]],
        "kind": settings["kind"],
        "digest": row.key.digest,
        "seed": settings.get("root_seed"),
    }


def values(rows: Sequence[Row], name: str) -> dict[int, float]:
    """A result by split, of those that are done."""
    found = {row.key.replica: finite(row.results.get(name)) for row in rows if row.status == "done"}
    return {split: value for split, value in found.items() if value is not None}


def _measured(numbers: Mapping[int, float]) -> dict[str, Any]:
    """A sample's statistics, with the standard error over splits that the field reports."""
    found = statistic(numbers.values())
    spread = found["standard_deviation"]
    return found | {"standard_error": None if spread is None else spread / math.sqrt(found["n"])}


def _result(rows: Sequence[Row]) -> dict[str, Any]:
    settings = rows[0].protocol.settings
    likelihood = values(rows, "log_likelihood")
    wanted = SPLITS.get(str(settings.get("data")), 20)
    tried = settings.get("settings")
    return {
        **_identity(rows[0]),
        "n": len(likelihood),
        "splits": wanted,
        "complete": len(likelihood) == wanted,
        "diverged": sorted(row.key.replica for row in rows if row.status == "diverged"),
        **{name: _measured(values(rows, name)) for name in (*MEASURES, "coverage", "factor", "keep_probability")},
        "rates": dict(sorted(Counter(values(rows, "rate").values()).items())),
        "settings": len(tried) if isinstance(tried, list) else None,
        "train": _first(rows, "train"),
        "test": _first(rows, "test"),
    }


def _first(rows: Sequence[Row], name: str) -> float | None:
    return next(iter(values(rows, name).values()), None)


def _tests(groups: Sequence[Sequence[Row]]) -> Table:
    """DropConnect++ against each other method, split by split; p adjusted by Holm over all pairs of a measure."""
    table: Table = []
    for ours in groups:
        if ours[0].protocol.settings["kind"] != OURS:
            continue
        here = _identity(ours[0])
        for theirs in groups:
            other = _identity(theirs[0])
            alike = all(other[name] == here[name] for name in ("data", "seed")) and _same_training(ours[0], theirs[0])
            if other["kind"] == OURS or not alike:
                continue
            row: dict[str, Any] = {**here, "other": other["method"], "other_kind": other["kind"]}
            row |= {name: _compared(ours, theirs, name) for name in MEASURES}
            table.append(row | {"other_digest": other["digest"]})
    for name in MEASURES:
        tested = [row for row in table if row[name] is not None]
        for row, p in zip(tested, holm([row[name]["p"] for row in tested]), strict=True):
            row[name]["adjusted_p"] = p
    return table


def _same_training(a: Row, b: Row) -> bool:
    return bool(a.protocol.settings.get("training") == b.protocol.settings.get("training"))


def _compared(ours: Sequence[Row], theirs: Sequence[Row], name: Measure) -> dict[str, Any] | None:
    """The difference over the splits that both have, with a variance that counts what training sets share."""
    train, test = _first(ours, "train"), _first(ours, "test")
    if not train or not test:
        return None
    try:
        found = resampled(values(ours, name), values(theirs, name), test / train)
    except SampleError:
        return None
    return {"difference": found.difference, "interval": found.interval, "p": found.p, "n": found.n_a}


def _published(results: Table) -> Table:
    """Published values on the sets that were run."""
    return [
        {"data": f"{PREFIX}{bare}", "title": SETS[bare], "method": one.method, "source": one.source}
        | {"rmse": one.rmse, "log_likelihood": one.log_likelihood}
        for bare in SETS
        if any(row["data"] == f"{PREFIX}{bare}" for row in results)
        for one in UCI
        if one.data == SETS[bare]
    ]
