"""Damaged records are named and left out, whatever the damage; what is shown is what was written. And stores of 0.1."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import Diary
from tiny_cases import EVALUATION, TINY, TWO_LAYERS, tiny

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.report import build, text
from dropconnectpp.lab.runs import database
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.rows import NOTE, PROTOCOL, RUN, seal
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Content, DamagedError, Key, Store

GOLDEN = Path(__file__).parent / "golden"
PROTOCOLS = (paper("cifar10", "dropconnect++"), paper("svhn", "dropout"))
A, B = (protocol.digest for protocol in PROTOCOLS)
FIRST = f"digest = '{A}' AND replica = 0"
RESULTS: dict[str, Any] = {
    "accuracy": 0.75,
    "nll": 0.5,
    "losses": [1.5, 0.5],
    "curve": [{"epoch": 1, "accuracy": 70.0}],
}


def fill(store: Store) -> None:
    """Two experiments of three replicas, one of which runs, and a note each."""
    me = Owner.here()
    for protocol in PROTOCOLS:
        digest = store.add(protocol)
        for key in store.claim([(digest, replica) for replica in range(3)], me, limit=2):
            results = RESULTS | {"accuracy": 0.5 + key.replica / 10, "text": f"{digest} {key.replica} " * 40}
            store.finish(key, me, "done", results=results, seconds=1.5, device="cpu", versions={"torch": "2.13"})
        store.claim([(digest, 2)], me)
        store.write_note(digest, "command", f"dcpp run {digest}")


@pytest.fixture
def filled(path: Path) -> Path:
    with Store.open(path) as store:
        fill(store)
    return path


def change(path: Path, sql: str, values: tuple[object, ...] = ()) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(sql, values)


def content(path: Path) -> Content:
    with Store.open(path, read_only=True) as store:
        return store.content()


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def differences(found: Content, whole: Content) -> list[str]:
    """What is not as it was written and is not named as damaged."""
    rows, finished = {row.key: row for row in found.rows}, {row.key: row for row in whole.finished}
    wrong = [f"row {key} is another" for key, row in rows.items() if key in finished and row != finished[key]]
    wrong += [f"note {place} is another" for place, note in found.notes.items() if whole.notes.get(place) != note]
    wrong += [
        f"protocol {digest} is another"
        for digest, protocol in found.protocols.items()
        if whole.protocols.get(digest) != protocol
    ]
    wrong += [f"row {key} is new" for key, row in rows.items() if row.status != "running" and key not in finished]
    gone = len(finished.keys() - rows.keys()) + len(whole.notes.keys() - found.notes.keys())
    gone += len(whole.protocols.keys() - found.protocols.keys())
    return wrong + ([f"{gone} records are gone and none is named"] if gone and not found.damaged else [])


def test_no_flipped_bit_changes_what_is_shown(filled: Path) -> None:
    draw = random.Random(20)
    good, whole = filled.read_bytes(), content(filled)
    assert len(whole.finished) == 4
    named = refused = 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(draw.choice((1, 1, 1, 20))):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        filled.write_bytes(bad)
        try:
            found = content(filled)
        except StoreError:
            refused += 1
            continue
        assert differences(found, whole) == []
        named += bool(found.damaged)
    assert min(named, refused) > 10


@pytest.mark.parametrize("table", ["run", "note", "protocol"])
def test_no_column_can_change_unnoticed(filled: Path, tmp_path: Path, table: str) -> None:
    whole = content(filled)
    for column in {"run": RUN, "note": NOTE, "protocol": PROTOCOL}[table]:
        for value in ("5", 7, b"\xff\x00", 1e300, math.inf):
            shutil.copy(filled, other := tmp_path / "other")
            with closing(sqlite3.connect(other, isolation_level=None)) as connection:
                connection.execute("PRAGMA ignore_check_constraints = ON")
                connection.execute("PRAGMA foreign_keys = OFF")
                where = FIRST if table == "run" else "rowid = 1"
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
            found = content(other)
            assert found.damaged, (column, value)
            assert differences(found, whole) == [], (column, value)
            with Store.open(other) as store, pytest.raises(DamagedError, match=r"damaged|digest"):
                store.notes() if table == "note" else store.rows()


def test_a_damaged_number_of_the_version_hides_no_digest(filled: Path) -> None:
    whole = content(filled)
    change(filled, "PRAGMA user_version = 1")
    found = content(filled)
    assert [str(one) for one in found.damaged] == ["the file: its version is 1, its tables are of version 2"]
    assert (found.unverified, differences(found, whole)) == (0, [])
    with pytest.raises(StoreError, match=r"its version is 1, its tables are of version 2\. The file is damaged"):
        Store.open(filled)


def test_an_error_that_quotes_a_damaged_table_is_one_short_line(filled: Path) -> None:
    content = filled.read_bytes()
    filled.write_bytes(content.replace(b"CREATE TABLE run (", b"CREATE TABLE run \x1b", 1))
    with pytest.raises(StoreError) as told:
        Store.open(filled, read_only=True)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 700


def test_a_row_of_0_1_that_is_no_text_is_damaged(filled: Path, tmp_path: Path) -> None:
    change(filled, f"UPDATE run SET seal = NULL, results = CAST(X'7b2261223a22f7227d' AS TEXT) WHERE {FIRST}")
    assert [str(one) for one in content(filled).damaged] == [f"replica 0 of {A}: results: no text in UTF-8"]
    with Store.open(tmp_path / "new") as new:
        assert len(new.merge(filled, leave_out_damaged=True).added) == 3


def test_a_digest_that_was_taken_away_or_made_up_is_noticed_or_told(filled: Path) -> None:
    change(filled, f"UPDATE run SET seal = ? WHERE {FIRST}", ("0" * 64,))
    assert len(content(filled).damaged) == 1
    change(filled, f"UPDATE run SET seal = NULL WHERE {FIRST}")
    found = content(filled)
    assert (found.damaged, found.unverified) == ([], 1)
    assert [row.key for row in found.rows if not row.verified] == [Key(A, 0)]


HOSTILE = {
    "results of null": ("results", "null"),
    "results of another kind": ("results", '{"accuracy": "much"}'),
    "results with a list of nothing": ("results", '{"curve": 5}'),
    "results that are no JSON": ("results", '{"accuracy": NaN}'),
    "results too deep": ("results", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "a blob": ("results", b"\x00\x01"),
    "a number of 5,000 digits": ("results", f'{{"accuracy": {"9" * 5000}}}'),
    "an escape": ("device", "cpu\x1b[31m"),
    "infinite seconds": ("seconds", math.inf),
    "no end": ("finished", b""),
}


@pytest.fixture
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store of two experiments of which one row, without a digest, is not what a store takes."""
    column, value = HOSTILE[request.param]
    with Store.open(path := tmp_path / "hostile.sqlite") as store:
        fill(store)
    change(path, f"UPDATE run SET {column} = ?, seal = NULL WHERE {FIRST}", (value,))
    return path


@pytest.mark.parametrize("hostile", HOSTILE, indirect=True)
def test_what_no_store_takes_is_not_merged_and_harms_no_report(store: Store, path: Path, hostile: Path) -> None:
    before = dump(path)
    with pytest.raises(DamagedError, match=rf"1 record is damaged: replica 0 of {A}: .*Nothing was merged"):
        store.merge(hostile)
    assert dump(path) == before
    merged = store.merge(hostile, leave_out_damaged=True)
    assert [damage.what for damage in merged.left_out] == [f"replica 0 of {A}"]
    assert len(merged.added) == 3
    assert store.content().damaged == []
    page = build(hostile, path.parent / "page", figures=False).read_text()
    assert f"Left out: 1 record is damaged: replica 0 of {A}" in page
    assert f"replica 0 of {A}" in text(hostile)


def test_settings_that_do_not_hash_to_their_digest_take_their_rows_with_them(store: Store, filled: Path) -> None:
    store.close()
    settings = json.dumps(PROTOCOLS[1].to_dict() | {"root_seed": 9}, sort_keys=True, separators=(",", ":"))
    change(
        filled, "UPDATE protocol SET settings = ?, seal = ? WHERE digest = ?", (settings, seal((B, settings, "x")), B)
    )
    change(filled, "UPDATE protocol SET label = 'x' WHERE digest = ?", (B,))
    found = content(filled)
    assert {row.key.digest for row in found.rows} == {A}
    assert {str(one) for one in found.damaged} >= {
        f"protocol {B}: its settings do not have the digest {B}",
        f"replica 0 of {B}: its protocol is damaged or missing",
    }


def test_sound_rows_of_a_copy_mend_damaged_ones(filled: Path, tmp_path: Path) -> None:
    shutil.copy(filled, copy := tmp_path / "copy")
    whole = content(filled)
    change(filled, f"UPDATE run SET results = '{{}}' WHERE {FIRST}")
    change(filled, "UPDATE protocol SET label = 'y' WHERE digest = ?", (B,))
    change(filled, "UPDATE note SET value = '1' WHERE rowid = 1")
    with Store.open(filled) as store:
        merged = store.merge(copy)
    assert (merged.mended, merged.added, merged.conflicts) == ((Key(A, 0),), (), ())
    assert merged.notes_added == ((A, "command"),)
    found = content(filled)
    assert (found.damaged, differences(found, whole)) == ([], [])
    assert len(found.finished) == len(whole.finished)


def test_the_command_that_made_them_mends_a_protocol_and_makes_removed_rows_again(filled: Path) -> None:
    change(filled, "UPDATE protocol SET label = 'y' WHERE digest = ?", (B,))
    change(filled, f"UPDATE run SET results = '{{}}' WHERE {FIRST}")
    with Store.open(filled) as store:
        store.add(PROTOCOLS[1])
        assert [one.what for one in store.content().damaged] == [f"replica 0 of {A}"]
        assert store.protocols()[0].label
        store.remove(store.content().damaged)
        assert store.content().damaged == []
        assert store.claim([(A, 0)], Owner.here()) == [(A, 0)]


def test_removing_a_protocol_removes_what_belongs_to_it(filled: Path) -> None:
    change(filled, "UPDATE protocol SET settings = '{}' WHERE digest = ?", (B,))
    with Store.open(filled) as store:
        store.remove(store.content().damaged)
        found = store.content()
    assert (found.damaged, {row.key.digest for row in found.rows}, [*found.protocols]) == ([], {A}, [A])


def test_a_row_that_vanished_from_an_index_is_noticed(filled: Path) -> None:
    whole = content(filled)
    with closing(sqlite3.connect(filled, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        ((name, page),) = connection.execute(
            "SELECT name, rootpage FROM sqlite_master WHERE type = 'index' AND tbl_name = 'run'"
        ).fetchall()
        assert name == "sqlite_autoindex_run_1"
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    bad = bytearray(filled.read_bytes())
    start = (page - 1) * size
    cells = int.from_bytes(bad[start + 3 : start + 5], "big")
    bad[start + 3 : start + 5] = (cells - 1).to_bytes(2, "big")  # the last entry of the index is forgotten
    filled.write_bytes(bad)
    found = content(filled)
    assert any(one.what == "the file" for one in found.damaged)
    assert differences(found, whole) == []


def test_what_a_process_holds_is_listed_and_freed(store: Store, path: Path) -> None:
    digest = store.add(PROTOCOLS[0])
    far = replace(Owner.here(), host="elsewhere", pid=1, start="1")
    store.claim([(digest, 0), (digest, 1)], far)
    store.claim([(digest, 2)], me := Owner.here())
    change(path, "UPDATE owner SET heartbeat = heartbeat + 1e6 WHERE name = ?", (far.name,))
    assert store.claim([(digest, 0)], me) == []
    ahead, ours = sorted(store.holders(), key=lambda one: one.host != "elsewhere")
    assert (ahead.host, ahead.rows, ahead.ahead, ahead.is_dead()) == ("elsewhere", 2, True, False)
    assert (ours.rows, ours.ahead, ours.is_dead()) == (1, False, False)
    assert store.free([ahead]) == 2
    assert store.claim([(digest, 0), (digest, 1)], me) == [(digest, 0), (digest, 1)]
    change(path, "INSERT OR IGNORE INTO owner VALUES ('nobody', 0)")
    change(path, "UPDATE run SET owner = 'nobody' WHERE replica = 1")
    (damaged,) = [one for one in store.holders() if not one.host]
    assert str(damaged) == "a process whose name is damaged"
    assert store.free([damaged]) == 1


# ------------------------------------------------------------------------------ version 0.1

LONGER = replace(TINY, architecture=TWO_LAYERS, training=replace(TINY.training, epochs=4), evaluation=EVALUATION)
UNITS = [
    Unit(replace(LONGER, method=method), replica)
    for method in (Method(kind="none"), Method(kind="dropconnect", rate=0.5), Method())
    for replica in range(2)
]
READING = """
import os, sys
from dropconnectpp.lab.runs.store import Store
if os.geteuid() == 0:
    os.seteuid(65534)   # root may write anything
for read_only in (True, False):
    with Store.open(sys.argv[1], read_only=read_only) as store:
        content = store.content()
        print(len(content.rows), len(store.rows()), content.unverified, len(content.damaged))
"""


def raw_results(path: Path) -> dict[tuple[str, int], Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return {
            (digest, replica): json.loads(results)
            for digest, replica, results in connection.execute("SELECT digest, replica, results FROM run")
        }


def test_a_store_of_version_0_1_is_read_as_it_is(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "finished-0.1.0.sqlite", path := tmp_path / "results.sqlite")
    before = path.read_bytes()
    found = content(path)
    assert {row.key: row.results for row in found.rows} == raw_results(path)
    assert {row.key for row in found.rows} == {unit.key for unit in UNITS}
    assert {row.protocol.label for row in found.rows} == {"No regularization", "DropConnect", "DropConnect++"}
    assert (found.damaged, found.unverified, len(found.notes)) == ([], 6, 1)
    page = build(path, tmp_path / "page", figures=False).read_text()
    assert "6 of 6 finished networks were stored without a digest" in page
    assert "2 of 2, by version 0.1" in page
    assert path.read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="needs permissions of files")
def test_a_store_of_version_0_1_is_read_in_a_folder_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:  # nobody else may enter pytest's own folders
        folder = Path(name)
        shutil.copy(GOLDEN / "finished-0.1.0.sqlite", path := folder / "results.sqlite")
        before = path.read_bytes()
        path.chmod(0o444)
        folder.chmod(0o555)
        command = [sys.executable, "-c", READING, str(path)]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False)
            after = path.read_bytes()
        finally:
            folder.chmod(0o755)
    assert found.stdout.splitlines()[:1] == ["6 6 6 0"]
    assert found.returncode == 1  # it cannot be brought to the new version there
    assert "It can be read but not written" in found.stderr
    assert after == before


def test_a_store_of_version_0_1_goes_on_and_its_rows_stay_unverified(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "finished-0.1.0.sqlite", path := tmp_path / "results.sqlite")
    with Store.open(path) as store:
        assert store.content().unverified == 6
        (key,) = store.claim([(UNITS[0].key[0], 7)], me := Owner.here())
        store.finish(key, me, "done", results=RESULTS, seconds=1.0, device="cpu")
        found = store.content()
    assert (found.unverified, len(found.finished)) == (6, 7)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchall() == [(len(database.MIGRATIONS),)]
    change(path, "UPDATE run SET results = '{\"accuracy\": []}' WHERE replica = 1 AND digest = ?", (UNITS[0].key[0],))
    assert [one.what for one in content(path).damaged] == [f"replica 1 of {UNITS[0].key[0]}"]


def test_a_store_of_version_0_1_merges_into_a_new_one(store: Store) -> None:
    merged = store.merge(GOLDEN / "finished-0.1.0.sqlite")
    assert (len(merged.added), merged.left_out) == (6, ())
    assert store.content().unverified == 6


def test_a_checkpoint_of_version_0_1_is_gone_on_with(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "unfinished-0.1.0", folder := tmp_path / "run")
    runner = Runner(folder, torch.device("cpu"), tiny, display := Diary())
    assert runner.run(UNITS).finished == 6
    assert display.groups == [(6, 2)]
    golden = raw_results(GOLDEN / "finished-0.1.0.sqlite")
    for key, results in raw_results(folder / "results.sqlite").items():
        assert results["losses"][:2] == golden[key]["losses"][:2]
        assert results["losses"] == pytest.approx(golden[key]["losses"], rel=1e-3)
        assert results["nll"] == pytest.approx(golden[key]["nll"], rel=1e-3)


# ------------------------------------------------------------------------------ a run over damage


def test_a_run_names_damaged_rows_and_trains_the_rest(tmp_path: Path) -> None:
    def run() -> Diary:
        Runner(tmp_path, torch.device("cpu"), tiny, display := Diary()).run(units)
        return display

    units = UNITS[:2]
    run()
    path = tmp_path / "results.sqlite"
    whole = raw_results(path)
    change(path, "UPDATE run SET results = '{}' WHERE replica = 1")
    units = UNITS[:4]
    (said,) = [note for note in run().notes if "damaged" in note]
    assert f"replica 1 of {UNITS[1].key[0]}" in said
    assert "dcpp store verify --remove" in said
    with Store.open(path) as store:
        assert len(store.content().rows) == 3
        store.remove(store.content().damaged)
    assert run().notes == []
    assert {key: raw_results(path)[key] for key in whole} == whole
