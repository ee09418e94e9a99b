"""`dcpp results`, `report` and `store merge` as a user types them."""

from __future__ import annotations

import csv
import html
import io
import json
from pathlib import Path

import pytest
from cli_cases import fill, rows

from dropconnectpp.lab import data
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store


def test_results_are_written_as_csv(dcpp):
    fill("o")
    code, out, _ = dcpp("results", "--out", "o", "--format", "csv")
    found = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert sorted((row["label"], row["replica"], row["accuracy"]) for row in found) == [
        ("Dropout", "0", "50.0"),
        ("Dropout", "1", "51.0"),
        ("No regularization", "0", "50.0"),
        ("No regularization", "1", "51.0"),
    ]


def test_results_are_written_as_json(dcpp):
    fill("o")
    code, out, _ = dcpp("results", "--out", "o", "--format", "json")
    assert code == 0
    assert {(row["data"], row["status"], row["seconds"]) for row in json.loads(out)} == {("fashion-mini", "done", 1.0)}


@pytest.mark.parametrize("columns", ["60", "200"])
def test_results_are_shown_as_a_table_that_cuts_nothing(dcpp, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    fill("o")
    code, out, _ = dcpp("results", "--out", "o")
    assert code == 0
    assert "Results in o" in out
    assert out.count("No regularization") == 2
    assert all(row.key.digest in out for row in rows("o"))


def test_running_work_is_no_result(dcpp):
    fill("o", replicas=(0,))
    with Store.open("o/results.sqlite") as store:
        store.claim([(store.protocols()[0].digest, 7)], Owner.here())
    assert len(json.loads(dcpp("results", "--out", "o", "--format", "json")[1])) == 2


def test_a_report_is_built_from_the_store_alone(dcpp, monkeypatch):
    fill("o")
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("data was loaded"))
    code, out, err = dcpp("report", "--out", "o")
    assert (code, err) == (0, "")
    assert "No regularization" in out
    assert "4 networks trained to the end" in Path("o/index.html").read_text()


@pytest.mark.parametrize("options", [(), ("--watch",), ("--to", "elsewhere", "--open")], ids=str)
def test_a_report_of_nothing_is_a_mistake_and_writes_nothing(dcpp, options):
    code, out, err = dcpp("report", "--out", "nothing", *options)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert "nothing/results.sqlite: there is no store to read." in err
    assert not Path("nothing").exists()
    assert not Path("elsewhere").exists()


def test_a_merge_adds_what_is_new_and_doubles_nothing(dcpp):
    fill("one", replicas=(0, 1))
    fill("two", replicas=(1, 2))
    code, out, _ = dcpp("store", "merge", "all", "one", "two/results.sqlite")
    assert (code, out.splitlines()) == (
        0,
        [
            "one: 4 rows added, 0 already there, 0 in conflict (ours kept)",
            "two/results.sqlite: 2 rows added, 2 already there, 0 in conflict (ours kept)",
        ],
    )
    code, out, _ = dcpp("store", "merge", "all", "one", "two")
    assert code == 0
    assert [line.split(": ")[1][:12] for line in out.splitlines()] == ["0 rows added"] * 2
    assert len(rows("all")) == 6


def test_a_merge_takes_a_store_file_to_receive(dcpp):
    fill("one", replicas=(0,))
    fill("two", replicas=(1,))
    assert dcpp("store", "merge", "one/results.sqlite", "two")[0] == 0
    assert len(rows("one")) == 4


def test_a_merge_with_a_conflict_keeps_ours_and_gives_exit_code_1(dcpp):
    fill("one", accuracy=50.0)
    fill("two", accuracy=60.0)
    code, out, err = dcpp("store", "merge", "one", "two")
    assert (code, err) == (1, "")
    assert out == "two: 0 rows added, 0 already there, 4 in conflict (ours kept)\n"
    assert {row.results["accuracy"] for row in rows("one")} == {50.0, 51.0}


def test_results_of_two_machines_make_one_report(dcpp):
    for machine in ("one", "two"):
        dcpp("run", "mine.toml", "--out", machine)
    dcpp("store", "merge", "all", "one", "two")
    assert dcpp("report", "--out", "all")[0] == 0
    page = html.unescape(Path("all/index.html").read_text())
    assert "dcpp run mine.toml --out one" in page
