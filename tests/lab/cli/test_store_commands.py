"""`dcpp store verify`, `release` and `merge` over damage, as a user types them; `results` and `report` beside them."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import fill, rows

from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

GOLDEN = Path(__file__).parents[1] / "runs" / "golden" / "finished-0.1.0.sqlite"


def change(folder: str, sql: str) -> None:
    with closing(sqlite3.connect(Path(folder) / "results.sqlite", isolation_level=None)) as connection:
        connection.execute(sql)


@pytest.fixture
def damaged() -> str:
    """The name of one of four rows, which is damaged."""
    fill("o")
    first = "rowid = (SELECT min(rowid) FROM run WHERE replica = 0)"
    change("o", f"UPDATE run SET results = replace(results, '50.0', '90.0') WHERE {first}")
    with Store.open("o/results.sqlite", read_only=True) as store:
        (one,) = {damage.what for damage in store.content().damaged}
    return one


def test_a_sound_store_is_verified(dcpp):
    fill("o")
    assert dcpp("store", "verify", "o") == (0, "o: 4 rows, 0 notes, 2 protocols sound, 0 records damaged\n", "")


def test_damage_is_named_removed_and_made_again(dcpp, damaged):
    code, out, err = dcpp("store", "verify", "o")
    assert (code, out) == (1, "o: 3 rows, 0 notes, 2 protocols sound, 1 record damaged\n")
    assert f"o: damaged: {damaged}: its content does not have the digest that was written with it" in err
    assert "dcpp store verify --remove" in err
    code, out, _ = dcpp("store", "verify", "o", "--remove")
    assert (code, out.splitlines()[-1]) == (0, "o: 1 record removed")
    assert dcpp("store", "verify", "o/results.sqlite")[0] == 0
    assert len(rows("o")) == 3


@pytest.mark.parametrize("format", ["csv", "json", "table"])
def test_results_name_what_they_leave_out(dcpp, damaged, format):
    code, out, err = dcpp("results", "--out", "o", "--format", format)
    assert code == 1
    assert "90.0" not in out
    assert "51" in out
    assert f"1 record is damaged: {damaged}" in err


def test_a_report_names_what_it_leaves_out(dcpp, damaged):
    code, out, _ = dcpp("report", "--out", "o")
    assert code == 0
    assert f"Left out: 1 record is damaged: {damaged}" in out
    for page in ("index.html", "tables.md"):
        assert damaged in Path("o", page).read_text()


def test_a_merge_refuses_damage_before_it_writes_or_leaves_it_out(dcpp, damaged):
    code, out, err = dcpp("store", "merge", "all", "o")
    assert (code, out) == (1, "")
    assert f"1 record is damaged: {damaged}" in err
    assert "Nothing was merged" in err
    assert rows("all") == []
    code, out, err = dcpp("store", "merge", "all", "o", "--leave-out-damaged")
    assert (code, out) == (0, "o: 3 rows added, 0 already there, 0 in conflict (ours kept), 1 damaged left out\n")
    assert damaged in err
    assert dcpp("store", "verify", "all")[0] == 0


def test_a_damaged_file_is_saved_into_a_new_one(dcpp):
    fill("o", replicas=tuple(range(40)))
    path = Path("o/results.sqlite")
    content = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        ((page,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'run'").fetchall()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    start = (page - 1) * size
    content[start + 12 : start + 14] = b"\xff" * 2  # where the first of its pages is
    path.write_bytes(content)
    assert dcpp("store", "verify", "o")[0] == 1
    code, out, err = dcpp("store", "merge", "saved", "o", "--leave-out-damaged")
    assert code == 0, err
    assert "damaged left out" in out
    assert dcpp("store", "verify", "saved")[0] == 0
    found = {row.key: row.results["accuracy"] for row in rows("saved")}
    assert 0 < len(found) < 80
    assert all(accuracy == 50.0 + key.replica for key, accuracy in found.items())


def test_rows_without_a_digest_are_shown_as_unverified(dcpp):
    Path("o").mkdir()
    shutil.copy(GOLDEN, "o/results.sqlite")
    code, out, _ = dcpp("store", "verify", "o")
    assert (code, out.rstrip().rpartition("; ")[2]) == (0, "10 records without a digest, unverified")
    assert dcpp("results", "--out", "o")[1].count("unverified") == 6
    found = csv.DictReader(io.StringIO(dcpp("results", "--out", "o", "--format", "csv")[1]))
    assert [row["has_digest"] for row in found] == ["False"] * 6
    assert [row["has_digest"] for row in json.loads(dcpp("results", "--out", "o", "--format", "json")[1])] == [
        False
    ] * 6
    assert "6 of 6 finished networks were stored without a digest" in dcpp("report", "--out", "o")[1]


def test_work_of_a_machine_whose_clock_ran_ahead_is_released(dcpp):
    fill("o", replicas=(0,))
    far = replace(Owner.here(), host="worker\x1b[31m", pid=7, start="1")
    with Store.open("o/results.sqlite") as store:
        digest = store.protocols()[0].digest
        store.claim([(digest, 5), (digest, 6)], far)
    change("o", "UPDATE owner SET heartbeat = heartbeat + 1e6")
    code, out, _ = dcpp("store", "release", "o")
    assert code == 0
    assert out.startswith("process 7 on worker\\x1b[31m: 2 rows, its clock is ")
    assert out.endswith("Free it with --host NAME or --all.\n")
    assert len(rows("o")) == 4
    code, _, err = dcpp("store", "release", "o", "--host", "another")
    assert code == 1
    assert "--host another: no process of this machine holds work" in err
    code, out, _ = dcpp("store", "release", "o", "--host", "worker\x1b[31m")
    assert (code, out.splitlines()[-1]) == (0, "2 rows freed")
    assert dcpp("store", "release", "o", "--all")[1] == "o: no process holds work\n"
    assert dcpp("store", "release", "o", "--all", "--host", "x")[0] == 1


def test_escapes_of_a_strange_store_do_not_reach_the_terminal(dcpp):
    fill("o", replicas=(0,))
    evil = "a\x1b]0;b\x07"
    with Store.open("o/results.sqlite") as store:
        protocol = store.protocols()[0]
        me = Owner.here()
        (key,) = store.claim([(protocol.digest, 9)], me)
        results = {"accuracy": 1.0, "nll": evil, "what": evil, "mc": [{"samples": evil}]}
        store.finish(key, me, "done", results=results, seconds=1.0, device="cpu")
        store.write_note(protocol.digest, "command", evil)
    for command in (("results",), ("results", "--format", "csv"), ("results", "--format", "json"), ("report",)):
        code, out, err = dcpp(*command[:1], "--out", "o", *command[1:])
        assert code == 0
        assert not {"\x1b", "\x07"} & set(out + err)
    change("o", f"UPDATE protocol SET label = '{evil}', seal = NULL")
    for command in (("results", "--out"), ("report", "--out"), ("store", "verify"), ("store", "merge", "all")):
        code, out, err = dcpp(*command, "o")
        assert not {"\x1b", "\x07"} & set(out + err)
