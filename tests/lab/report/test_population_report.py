"""Populations in a report: the table, its notes, the history beside it, and the figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import EVIDENCE, chosen, result

from dropconnectpp.lab.config.by_epoch import from_path
from dropconnectpp.lab.config.notes import POPULATION
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.report import build, report_tables, text
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

LINE = {"step_size": [0.01, 0.01, 0.02, 0.02], "rate": [0.5, 0.5, 0.6, 0.6]}
NOTE: dict[str, Any] = {
    "members": 2,
    "every": 2,
    "epochs": 4,
    "keep": None,
    "score": 70.25,
    "seconds": 90.0,
    "line": LINE,
    "paths": [{"step_size": [0.04] * 4, "rate": [0.2, 0.2, 0.6, 0.6]}, LINE],
    "scores": [[60.0, 69.0], [65.0, 70.25]],
    "parents": [[1, 0], [1, 1]],
}


def replay(name: str = "found by a population of 2", kind: str = "dropconnect") -> Protocol:
    base = chosen("cifar10", kind)
    bare = replace(base, method=replace(base.method, rate=None), training=replace(base.training, step_size=None))
    schedule = from_path(LINE if kind == "dropconnect" else {"step_size": LINE["step_size"]}, name)
    return replace(bare, by_epoch=schedule)


def fill(path: Path, protocol: Protocol, note: Any = NOTE, accuracies: tuple[float, ...] = (76.0, 77.0)) -> Path:
    with Store.open(path) as store:
        digest, me = store.add(protocol), Owner.here()
        for place, key in enumerate(store.claim([(digest, replica) for replica in range(len(accuracies))], me)):
            row = result(accuracies[place], protocol.method.kind, key.replica)
            store.finish(key, me, "done", results=row, **{**EVIDENCE, "seconds": 30.0})
        store.write_note(digest, POPULATION, note)
    return path


def tables_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    with Store.open(path, read_only=True) as store:
        content = store.content()
    return report_tables(content.rows, content.notes, content.protocols.values())


def test_the_table_has_what_was_found_what_it_gave_and_what_it_cost(path):
    (row,) = tables_of(fill(path, replay()))["population"]
    assert row["method"] == "DropConnect, found by a population of 2"
    assert (row["members"], row["held_out"], row["mean"], row["n"]) == (2, 70.25, 76.5, 2)
    assert (row["population_s"], row["replay_s"]) == (90.0, 60.0)
    assert (row["first"], row["last"]) == ({"step_size": 0.01, "rate": 0.5}, {"step_size": 0.02, "rate": 0.6})
    shown = text(path, ["population"])
    assert "step size 0.01 to 0.02, rate 0.5 to 0.6" in " ".join(shown.split())
    assert "1.5" in shown
    assert "Few connections" not in shown


def test_the_judge_of_few_connections_has_a_column(path):
    protocol = replay(kind="dropconnect++")
    note = NOTE | {"keep": 0.1, "line": {"step_size": LINE["step_size"]}, "paths": []}
    (row,) = tables_of(fill(path, protocol, note))["population"]
    expected = [item["accuracy"] for item in result(76.0, "dropconnect++")["pruning"]]
    assert row["kept"]["n"] == 2
    assert row["kept"]["mean"] == pytest.approx(expected[5] + 0.5)
    shown = text(path, ["population"])
    assert "Few connections" in shown
    assert "10% of the weights, by π̃ |W|, is what the judge saw." in shown


def test_the_history_has_each_change_of_each_member_and_each_score(path):
    history = tables_of(fill(path, replay()))["population_history"]
    rates = [(row["member"], row["epoch"], row["value"]) for row in history if row["setting"] == "rate"]
    found = [("found", 0, 0.5), ("found", 2, 0.6), ("found", 3, 0.6)]
    assert rates == [(0, 0, 0.2), (0, 2, 0.6), (0, 3, 0.6), (1, 0, 0.5), (1, 2, 0.6), (1, 3, 0.6), *found]
    scores = [
        (row["member"], row["epoch"], row["value"], row["parent"]) for row in history if row["setting"] == "score"
    ]
    assert scores == [(0, 2, 60.0, 1), (0, 4, 69.0, 0), (1, 2, 65.0, 1), (1, 4, 70.25, 1)]


def test_the_report_draws_it_and_keeps_its_numbers(path, tmp_path):
    page = build(fill(path, replay()), tmp_path / "report").read_text()
    assert '<section id="population">' in page
    assert "The schedule goes from 0.5 to 0.6." in page
    assert "The best member has 70.25% after epoch 4." in page
    drawn = {one.name for one in (tmp_path / "report" / "figures").iterdir()}
    assert "population-cifar10-dropconnect-found-by-a-population-of-2.svg" in drawn
    assert (tmp_path / "report" / "tables" / "population_history.csv").exists()


def test_what_was_found_is_compared_with_other_methods_under_its_name(path):
    fill(path, replay())
    with Store.open(path) as store:
        plain, me = chosen("cifar10", "dropconnect"), Owner.here()
        for key in store.claim([(store.add(plain), replica) for replica in range(2)], me):
            store.finish(key, me, "done", results=result(70.0 + key.replica, "dropconnect", key.replica), **EVIDENCE)
    found = tables_of(path)
    names = ["DropConnect", "DropConnect, found by a population of 2"]
    assert [row["method"] for row in found["accuracy"]] == names
    assert {row["variant"] for row in found["accuracy"]} == {""}
    (pair,) = found["population_tests"]
    assert (pair["method"], pair["other"], pair["n"], pair["other_n"]) == (*reversed(names), 2, 2)
    assert pair["test"]["difference"] == pytest.approx(6.0)
    assert pair["test"]["adjusted_p"] == pair["test"]["p"]
    assert "+6.00" in text(path, ["population_tests"])


@pytest.mark.parametrize(
    "note",
    ["text", {}, {"line": 3, "paths": "x", "scores": [None, ["x"]], "parents": 1}, {"line": {"rate": [None, "x"]}}],
)
def test_a_note_of_another_program_breaks_no_report(path, tmp_path, note):
    fill(path, replay(), note)
    assert build(path, tmp_path / "report", figures=False).exists()
