"""Stores whose tables are known, filled by hand, and what every page of a report must be."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from dropconnectpp.lab.config.protocol import Protocol, paper
from dropconnectpp.lab.report import paper_values, report_tables
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

EVIDENCE: dict[str, Any] = {
    "seconds": 12.0,
    "device": "Some GPU",
    "versions": {"torch": "2.13.0", "dropconnectpp": "0.1.0"},
    "provenance": {"source": "files of the owner", "verified": True, "files": {"data_batch_1": "c99c"}},
    "commit": "abc1234",
}
ACCURACY = {
    "none": [74.0, 74.5, 75.0, 74.3],
    "dropout": [75.5, 75.9, 75.6, 75.2],
    "dropconnect": [76.0, 76.2, 75.9, 76.3],
    "dropconnect++": [77.0, 77.4, 77.1, 77.3],
}


def chosen(data: str, kind: str, **changes: Any) -> Protocol:
    """The paper's protocol with its choices made."""
    protocol = paper(data, kind)
    method = replace(protocol.method, rate=0.5) if protocol.method.has_rate else protocol.method
    return replace(protocol, method=method, training=replace(protocol.training, step_size=0.01, **changes))


def result(accuracy: float, kind: str, replica: int = 0) -> dict[str, Any]:
    """All that a finished replica may hold, from one number."""
    ours = kind == "dropconnect++"
    scores = ["keep_probability", "product"] * ours + ["magnitude", "random"]
    found: dict[str, Any] = {
        "accuracy": accuracy,
        "nll": 0.7 + 0.01 * replica,
        "brier": 0.35,
        "ece": 0.02 + 0.001 * replica,
        "calibration": {"counts": [0, 40, 60], "confidence": [0.0, 20.0, 54.0], "correct": [0, 18 + replica, 51]},
        "mc": [{"samples": n, "accuracy": accuracy - 2.0 / n, "nll": 0.8} for n in (1, 30, 500)],
        "pruning": [
            {"score": score, "share": share, "accuracy": accuracy - (1 - share) * (5 + 3 * place), "nll": 1.0}
            for place, score in enumerate(scores)
            for share in (1.0, 0.5, 0.1)
        ],
        "uncertainty": {"entropy": 0.6, "mutual_information": 0.1 + 0.01 * replica, "accuracy": accuracy, "nll": 0.7},
        "foreign": {"data": "svhn", "entropy": 1.2, "mutual_information": 0.3 + 0.01 * replica},
        "posterior": None,
        "curve": [
            {
                "epoch": epoch,
                "accuracy": accuracy - 30 / epoch,
                "nll": 1.0 + 0.01 * replica + abs(epoch - 10) / 1000,
                "mc_accuracy": accuracy - 35 / epoch,
                "mc_nll": 1.0 + abs(epoch - 50) / 1000,
            }
            for epoch in (1, 5, 10, 50, 100)
        ],
        "losses": [2.0, 1.0],
    }
    if ours:
        found["posterior"] = {
            "synapses": 1000,
            "histogram": [0] * 10 + [10 * (i + 1) for i in range(10)] + [10] * 30,
            "quantiles": [0.2 + 0.006 * i for i in range(101)],
            "below_0.35": 100 + 100 * (replica % 2),
            "between_0.4_and_0.6": 700 - 100 * (replica % 2),
            "above_0.6": 150,
            "correlation_with_magnitude": 0.25 + 0.01 * replica,
        }
    return found


def fill(
    store: Store,
    protocol: Protocol,
    results: Mapping[int, Mapping[str, Any]],
    *,
    diverged: Sequence[int] = (),
    label: str | None = None,
    **evidence: Any,
) -> str:
    """Store finished replicas through the store's own front door."""
    digest, owner = store.add(protocol, label), Owner.here()
    assert len(store.claim([(digest, replica) for replica in results], owner)) == len(results)
    for replica, found in results.items():
        status = "diverged" if replica in diverged else "done"
        store.finish((digest, replica), owner, status, results=found, **EVIDENCE | evidence)  # type: ignore[arg-type]
    return digest


def fill_set(store: Store, data: str = "cifar10", kinds: Sequence[str] = paper_values.KINDS, n: int = 4) -> list[str]:
    return [
        fill(store, chosen(data, kind), {r: result(ACCURACY[kind][r], kind, r) for r in range(n)}) for kind in kinds
    ]


def fill_with_evil(store: Store, evil: str) -> None:
    """A store in which every text that comes from outside is hostile, as far as the store takes it."""
    line = "".join(character for character in evil if character.isprintable())
    for kind in ("dropout", "dropconnect++"):
        protocol = replace(chosen("cifar10", kind), data=f"folder:/{evil}&$\\frac")
        results = {r: result(ACCURACY[kind][r], kind, r) for r in range(3)}
        for found in results.values():
            found["foreign"]["data"] = evil
            found["pruning"][0]["score"] = evil
        provenance = {"source": evil, "verified": False, "files": {evil: evil}}
        digest = fill(
            store, protocol, results, label=f"{line} $x_$ {kind}", provenance=provenance, device=line, commit=line
        )
        timings = {"seconds_per_epoch": 1.0, "replicas": evil, "device": evil, "prediction": {"mean": 1.0, kind: 1.0}}
        store.write_note(digest, "timings", timings)
        store.write_note(digest, "command", evil)


def tables(store: Store) -> dict[str, list[dict[str, Any]]]:
    return report_tables(store.rows(), store.notes(), store.protocols())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


VOID = {"meta", "br", "link"}


class Checker(HTMLParser):
    """Every element is closed in turn, no id is used twice, nothing is loaded, and one known script is run."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.files: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.words: list[str] = []

    @classmethod
    def check(cls, source: str) -> Checker:
        checker = cls()
        checker.feed(source)
        checker.close()
        assert not checker.open
        assert len(checker.ids) == len(set(checker.ids))
        assert all(link.startswith("#") and link[1:] in checker.ids for link in checker.links)
        assert all(re.fullmatch(r"((figures|tables)/)?[\w.-]+", link) for link in checker.files)
        (script,) = checker.scripts
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert re.findall("script-src ([^;]*)", checker.policy) == [f"'sha256-{digest}'"]
        assert checker.policy.startswith("default-src 'none'; ")
        visible = " ".join(checker.words)
        assert not re.search(r"\b(nan|none\s*%|inf|infinity)\b", visible, re.IGNORECASE)
        assert source.startswith("<!DOCTYPE html>")
        assert not re.search(r"(@import|url\((?!#))", source)
        return checker

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("img", "iframe", "link", "base", "form", "object")
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag == "a" and not (given["href"] or "").startswith("#"):
            self.files.append(given["href"] or "")
            attrs = []
        if tag == "script":
            assert not attrs
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith(("on", "src"))
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href"):
                self.links.append(value or "")
            if name in ("aria-labelledby", "clip-path"):
                self.links += [f"#{part.removeprefix('url(#').removesuffix(')')}" for part in (value or "").split()]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.words.append(data)


def line_of(table: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in table if all(row[name] == value for name, value in wanted.items())]
    return found
