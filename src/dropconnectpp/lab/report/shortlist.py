"""Many methods as a terminal shows them: the best few, and what differs between them. The page has all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.rows import Table

MOST = 6
"""Methods of one data set that are all shown."""
BEST = 5
"""Methods that are shown where there are more."""
SETTINGS = re.compile(r"(?P<name>.*?) \((?P<settings>\w+=.*)\)", re.DOTALL)


def shortened(found: Mapping[str, Table]) -> tuple[dict[str, Table], tuple[str, ...]]:
    """The tables with the best methods of each data set that has many, and a line for each on what was left out.

    Significance keeps the pairs among them that differ. A method's label keeps the settings in which it differs from
    the others of its kind that are shown.
    """
    names: dict[str, str] = {}
    dropped: set[str] = set()
    lines = []
    for title, group in groupby(found["accuracy"], lambda row: str(row["title"])):
        rows = list(group)
        if len(rows) <= MOST:
            continue
        ranked = sorted(rows, key=lambda row: -float("inf") if row["mean"] is None else row["mean"], reverse=True)
        best = ranked[:BEST]
        labels, common = without_common([str(row["method"]) for row in best])
        names |= {row["digest"]: label for row, label in zip(best, labels, strict=True)}
        dropped |= {row["digest"] for row in ranked[BEST:]}
        lines.append(_line(title, len(rows), common, found["significance"], {row["digest"] for row in best}))
    if not names:
        return dict(found), ()
    tables = {
        name: [_renamed(row, names) for row in table if row.get("digest") not in dropped]
        for name, table in found.items()
    }
    tables["accuracy"] = _ranked(tables["accuracy"], names)
    tables["significance"] = [row for row in tables["significance"] if _shown(row, names, dropped)]
    return tables, tuple(lines)


def without_common(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Labels without the settings that all labels of the same name have, and these settings.

    >>> without_common(["A (alpha=1, beta=9)", "A (alpha=1, beta=4)", "B"])
    (['A (beta=9)', 'A (beta=4)', 'B'], ['A: alpha=1'])
    """
    parts = [SETTINGS.fullmatch(label) for label in labels]
    named = [
        (label, []) if part is None else (part["name"], part["settings"].split(", "))
        for label, part in zip(labels, parts, strict=True)
    ]
    short, common = [], {}
    for name, settings in named:
        alike = [other for same, other in named if same == name]
        shared = [one for one in settings if len(alike) > 1 and all(one in other for other in alike)]
        own = [one for one in settings if one not in shared]
        short.append(f"{name} ({', '.join(own)})" if own else name)
        if shared:
            common[name] = f"{name}: {', '.join(shared)}"
    return short, list(common.values())


def _line(title: str, count: int, common: Sequence[str], significance: Table, best: set[str]) -> str:
    pairs = [row for row in significance if {row["digest"], row["other_digest"]} <= best]
    equal = sum(not _differs(row) for row in pairs)
    text = f"{title}: the best {BEST} of {count} methods by mean accuracy."
    text += f" They share, of {'; of '.join(common)}." if common else ""
    text += f" {equal} of {len(pairs)} tested pairs among them are not distinguishable and left out." if equal else ""
    return f"{text} The page has every method and pair."


def _differs(row: Mapping[str, Any]) -> bool:
    return row["welch"] is not None and row["welch"]["adjusted_p"] < SIGNIFICANCE


def _shown(row: Mapping[str, Any], names: Mapping[str, str], dropped: set[str]) -> bool:
    """Whether a pair is listed: all of data sets with few methods, of others those that differ."""
    if row["other_digest"] in dropped:
        return False
    return row["digest"] not in names or _differs(row)


def _ranked(accuracy: Table, names: Mapping[str, str]) -> Table:
    """The best first, where only the best are shown."""
    table: Table = []
    for _, group in groupby(accuracy, lambda row: str(row["title"])):
        rows = list(group)
        if any(row["digest"] in names for row in rows):
            rows.sort(key=lambda row: -float("inf") if row["mean"] is None else row["mean"], reverse=True)
        table += rows
    return table


def _renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A row under the short labels, in its sentence too."""
    new = dict(row)
    for label, digest in (("method", "digest"), ("other", "other_digest")):
        if row.get(digest) in names:
            new[label] = names[row[digest]]
            if row.get("sentence"):
                new["sentence"] = new["sentence"].replace(str(row[label]), new[label])
    return new
