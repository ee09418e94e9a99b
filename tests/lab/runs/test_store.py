"""The store: exact rules, real processes that race and are killed, and random histories against a small model."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropconnectpp.errors import ArgumentError, DropConnectError
from dropconnectpp.lab.config.protocol import Protocol, paper
from dropconnectpp.lab.config.settings import from_dict
from dropconnectpp.lab.runs import database, flat_rows
from dropconnectpp.lab.runs import owner as owner_module
from dropconnectpp.lab.runs.database import APPLICATION_ID, StoreError
from dropconnectpp.lab.runs.flat_rows import to_table, write_csv, write_json
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import ClaimLostError, DamagedError, FinishedError, Key, Merged, Store

PROTOCOL = paper("cifar10", "dropconnect++")
OTHER = paper("svhn", "dropout")
A = PROTOCOL.digest
CONTENT: dict[str, Any] = {
    "results": {"accuracy": 0.75, "curve": [1.0, 0.5]},
    "seconds": 2.5,
    "device": "cpu",
    "versions": {"torch": "2.10"},
    "provenance": {"verified": True},
    "commit": "abc123",
}


@pytest.fixture
def store(store: Store) -> Store:
    store.add(PROTOCOL)
    return store


def other_machine() -> Owner:
    return replace(Owner.here(), host="elsewhere", pid=1, start="1")


def dead_owner() -> Owner:
    """An owner with this process's pid and another start time: the pid was recycled."""
    return replace(Owner.here(), start="1")


def keys(*replicas: int) -> list[Key]:
    return [Key(A, replica) for replica in replicas]


def finished(store: Store, replica: int, **changes: Any) -> None:
    (key,) = store.claim([(A, replica)], me := Owner.here())
    store.finish(key, me, changes.pop("status", "done"), **(CONTENT | changes))


def raw(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(sql).fetchall()


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def spawn(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate()[0]


# ------------------------------------------------------------------------------ what is kept


def test_importing_the_store_does_not_import_torch() -> None:
    program = "import sys, dropconnectpp.lab.runs.store; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_finished_row_comes_back_whole(store: Store, path: Path) -> None:
    before = datetime.now(UTC)
    finished(store, 3)
    with Store.open(path, read_only=True) as reader:
        (row,) = reader.rows()
    assert row.key == (A, 3)
    assert row.protocol.label == "DropConnect++"
    assert row.status == "done"
    assert row.owner is None
    assert {name: getattr(row, name) for name in CONTENT} == CONTENT
    assert row.finished is not None
    started, ended = (datetime.fromisoformat(text) for text in (row.started, row.finished))
    assert started.utcoffset() == ended.utcoffset() == before.utcoffset()
    assert started <= ended


def test_a_running_row_names_its_owner_and_a_finished_file_names_no_machine(store: Store, path: Path) -> None:
    me = replace(Owner.here(), host="secret-host-name")
    store.claim(keys(0), me)
    (row,) = store.rows(status="running")
    assert row.owner == me
    assert (row.finished, row.seconds, row.device, row.results, row.versions) == (None, None, "", {}, {})
    store.finish((A, 0), me, "done", **CONTENT)
    assert "secret-host-name" not in "".join(dump(path))


def test_protocols_come_back_as_they_were(store: Store) -> None:
    assert store.add(OTHER, label="mine") == OTHER.digest
    store.add(OTHER, label="a later label is not taken")
    found = store.protocols()
    assert [one.digest for one in found] == sorted([A, OTHER.digest])
    assert {one.label for one in found} == {"DropConnect++", "mine"}
    assert {from_dict(Protocol, one.settings) for one in found} == {PROTOCOL, OTHER}


def test_rows_come_in_one_order_and_are_filtered(store: Store) -> None:
    store.add(OTHER)
    for replica in (10, 2, 1):
        finished(store, replica, status="diverged" if replica == 2 else "done")
    store.claim([(OTHER.digest, 0)], Owner.here())
    everything = [row.key for row in store.rows()]
    assert everything == sorted([*keys(1, 2, 10), Key(OTHER.digest, 0)])
    assert [row.key for row in store.rows(digest=A)] == keys(1, 2, 10)
    assert [row.key for row in store.rows(status="diverged")] == keys(2)
    assert [row.key for row in store.rows(digest=A, status="running")] == []
    with pytest.raises(ArgumentError, match="status must be one of 'running', 'done'"):
        store.rows(status="finished")  # type: ignore[arg-type]


def test_numbers_that_are_not_finite_survive_as_words_that_json_allows(store: Store, path: Path) -> None:
    finished(store, 0, status="diverged", results={"nll": [math.nan, math.inf, -math.inf, 0.1]})
    ((text,),) = raw(path, "SELECT results FROM run")
    assert text == '{"nll":["NaN","Infinity","-Infinity",0.1]}'
    nan, *others = store.rows()[0].results["nll"]
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf, 0.1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(0.5), r"results.a\[1\] must be a plain number, .*, got float32 .* Arrays and tensors have tolist"),
        (np.zeros(2), r"results.a\[1\] .* got ndarray"),
        ({1: 2}, r"results.a\[1\] .* mapping with text keys, got dict \{1: 2\}"),
        ("NaN", r"a number that is not finite must be a float, not a text"),
        ({0.5}, "got set"),
    ],
)
def test_values_that_json_cannot_hold_are_refused_by_place(store: Store, value: object, message: str) -> None:
    store.claim(keys(0), me := Owner.here())
    with pytest.raises(ArgumentError, match=message):
        store.finish((A, 0), me, "done", **(CONTENT | {"results": {"a": [1, value]}}))
    assert store.rows()[0].status == "running"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results": [1]}, "results must be a mapping from names to values, got list"),
        ({"seconds": math.nan}, "seconds must be a finite number of at least 0, got nan"),
        ({"seconds": -1.0}, "seconds must be a finite number of at least 0, got -1.0"),
        ({"device": None}, "device must be one line of text, got None"),
        ({"commit": "\udc80"}, "commit must be one line of text, got "),
        ({"status": "running"}, "status must be one of 'done', 'diverged', 'failed'; got 'running'"),
    ],
)
def test_arguments_are_checked(store: Store, changes: dict[str, Any], message: str) -> None:
    store.claim(keys(0), me := Owner.here())
    with pytest.raises(ArgumentError, match=message):
        store.finish((A, 0), me, **({"status": "done"} | CONTENT | changes))


def test_keys_are_checked(store: Store) -> None:
    for replica in (-1, True, 0.5):
        with pytest.raises(ArgumentError, match="replica must be a whole number of at least 0"):
            store.claim([(A, replica)], Owner.here())  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"digest must be that of a protocol in the store, got 'f00'. First add"):
        store.claim([(A, 0), ("f00", 0)], Owner.here())
    assert store.rows() == []
    with pytest.raises(ArgumentError, match="First add"):
        store.write_note("f00", "step", 1)


def test_notes_are_replaced_whole(store: Store) -> None:
    store.write_note(A, "step size", {"chosen": 0.01, "losses": [0.5, math.inf]})
    store.write_note(A, "a", None)
    store.write_note(A, "step size", {"chosen": 0.05})
    assert list(store.notes().items()) == [((A, "a"), None), ((A, "step size"), {"chosen": 0.05})]
    assert store.notes(OTHER.digest) == {}
    with pytest.raises(ArgumentError, match="note 'bad' must be a plain number"):
        store.write_note(A, "bad", object())


# ------------------------------------------------------------------------------ the rules of work


@pytest.mark.parametrize("status", ["done", "diverged"])
def test_a_finished_row_never_changes(store: Store, path: Path, status: Any) -> None:
    store.claim(keys(0), me := Owner.here())
    store.finish((A, 0), me, status, **CONTENT)
    before = dump(path)
    store.finish((A, 0), me, status, **CONTENT)
    store.finish((A, 0), Owner.here(), status, **CONTENT)
    others: list[dict[str, Any]] = [
        {"seconds": 3.0},
        {"results": {}},
        {"commit": ""},
        {"device": "x"},
        {"versions": {}},
    ]
    for change in others:
        with pytest.raises(FinishedError, match=rf"replica 0 of {A} is finished \({status}\) with other content"):
            store.finish((A, 0), me, status, **(CONTENT | change))
    with pytest.raises(FinishedError):
        store.finish((A, 0), me, "failed", **CONTENT)
    assert store.claim(keys(0), me) == []
    store.release(keys(0), me)
    assert dump(path) == before


def test_a_failed_row_may_be_tried_again(store: Store) -> None:
    store.claim(keys(0), me := Owner.here())
    store.finish((A, 0), me, "failed", **(CONTENT | {"results": {"error": "out of memory"}}))
    assert store.rows(status="failed")[0].results == {"error": "out of memory"}
    with pytest.raises(ClaimLostError, match="which is failed"):
        store.finish((A, 0), me, "done", **CONTENT)
    you = Owner.here()
    assert store.claim(keys(0), you) == keys(0)
    store.finish((A, 0), you, "done", **CONTENT)
    assert [row.status for row in store.rows()] == ["done"]


def test_claims_keep_the_order_skip_what_is_taken_and_stop_at_the_limit(store: Store) -> None:
    me, you = Owner.here(), Owner.here()
    assert me != you
    assert store.claim(keys(5, 1, 5), me) == keys(5, 1)
    assert store.claim(keys(1, 2, 3, 4), you, limit=2) == keys(2, 3)
    assert store.claim(keys(1, 2, 3, 4, 5), me) == keys(1, 4, 5)
    assert store.heartbeat(me) == keys(1, 4, 5)
    assert store.claim(keys(9), me, limit=0) == []


def test_release_gives_back_only_ones_own(store: Store) -> None:
    me, you = Owner.here(), Owner.here()
    store.claim(keys(0, 1), me)
    store.claim(keys(2), you)
    store.release(keys(0, 2, 7), me)
    assert [row.key for row in store.rows()] == keys(1, 2)
    assert store.claim(keys(0), you) == keys(0)
    with pytest.raises(
        ClaimLostError, match=rf"process {os.getpid()} on .* does not own replica 0 .*, owned by process"
    ):
        store.finish((A, 0), me, "done", **CONTENT)
    with pytest.raises(ClaimLostError, match=r"which is claimed by no process\. Its result was not stored"):
        store.finish((A, 8), me, "done", **CONTENT)


def test_a_recycled_pid_is_not_taken_for_the_owner(store: Store) -> None:
    gone, me = dead_owner(), Owner.here()
    store.claim(keys(0), gone)
    assert store.claim(keys(0), me) == keys(0)
    assert store.heartbeat(gone) == []
    with pytest.raises(ClaimLostError, match="owned by process"):
        store.finish((A, 0), gone, "done", **CONTENT)
    store.finish((A, 0), me, "done", **CONTENT)


def test_an_owner_on_another_machine_lives_by_its_heartbeat(store: Store, path: Path) -> None:
    far = other_machine()
    store.claim(keys(0), far)
    age = "UPDATE owner SET heartbeat = heartbeat - 599"
    raw(path, age)
    assert store.claim(keys(0), Owner.here()) == []
    assert store.heartbeat(far) == keys(0)
    raw(path, age)
    assert store.claim(keys(0), Owner.here()) == []
    raw(path, age)
    assert store.claim(keys(0), Owner.here(), lease_s=3600) == []
    assert store.claim(keys(0), Owner.here()) == keys(0)
    assert store.heartbeat(far) == []


def test_an_owner_of_this_machine_needs_no_heartbeat(store: Store, path: Path) -> None:
    if not Owner.here().start:
        pytest.skip("the system tells no start times")
    store.claim(keys(0), Owner.here())
    raw(path, "UPDATE owner SET heartbeat = 0")
    assert store.claim(keys(0), Owner.here()) == []


def test_a_container_with_the_same_host_name_is_another_machine(store: Store, path: Path) -> None:
    store.claim(keys(0), replace(dead_owner(), system="another boot or namespace"))
    assert store.claim(keys(0), Owner.here()) == []
    raw(path, "UPDATE owner SET heartbeat = 0")
    assert store.claim(keys(0), Owner.here()) == keys(0)


def test_without_start_times_a_living_pid_is_believed_for_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = replace(Owner.here(), start="")
    assert not unknown.is_dead(silent_s=1, lease_s=10)
    assert unknown.is_dead(silent_s=11, lease_s=10)
    monkeypatch.setattr(owner_module, "Path", lambda _: Path("/nowhere/to/be/found"))
    assert owner_module._process_start(os.getpid()) == ""
    process = spawn("")
    process.communicate()
    assert owner_module._process_start(process.pid) is None

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)  # a process of another user
    assert owner_module._process_start(process.pid) == ""


def test_a_process_that_ended_but_was_not_collected_is_dead() -> None:
    process = spawn("import time; print('ready', flush=True); time.sleep(60)")
    line(process)
    assert owner_module._process_start(process.pid) is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is now a zombie
    assert owner_module._process_start(process.pid) is None
    process.communicate()


# ------------------------------------------------------------------------------ real processes

RACER = """
import os, random, sys, time
from pathlib import Path
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
path, digest, count, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draw = random.Random(number)
print("ready", flush=True)
while not Path(path + ".go").exists():
    time.sleep(0.001)
with Store.open(path) as store:
    me = Owner.here()
    while len(store.rows(status="done")) < count:
        keys = [(digest, replica) for replica in range(count)]
        draw.shuffle(keys)
        for key in store.claim(keys, me, limit=draw.randint(1, 3)):
            marker = f"{path}.{key.replica}"
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))   # fails if another owns it now
            os.unlink(marker)
            if draw.random() < 0.2:
                store.release([key], me)
            else:
                store.finish(key, me, "done", results={"by": number}, seconds=0, device="cpu")
                print(key.replica, flush=True)
"""


def test_processes_that_race_never_own_one_key_together(path: Path) -> None:
    count, racers = 60, []
    with Store.open(path) as store:
        store.add(PROTOCOL)
    for number in range(4):
        racers.append(spawn(RACER, path, A, count, number))
    for racer in racers:
        line(racer)
    Path(f"{path}.go").touch()
    outputs = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * len(racers)
    assert sorted(int(replica) for output in outputs for replica in output) == list(range(count))
    with Store.open(path, read_only=True) as store:
        by = {row.key.replica: row.results["by"] for row in store.rows(status="done")}
    assert by == {int(replica): number for number, output in enumerate(outputs) for replica in output}


def test_processes_may_make_one_store_together(path: Path) -> None:
    program = "import sys; from dropconnectpp.lab.runs.store import Store; input(); Store.open(sys.argv[1]).close()"
    makers = [subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE) for _ in range(6)]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write(b"\n")
        maker.stdin.flush()
    for maker in makers:
        maker.communicate()
    assert [maker.returncode for maker in makers] == [0] * len(makers)
    assert raw(path, "PRAGMA user_version") == [(len(database.MIGRATIONS),)]


HOLDER = """
import sys
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
with Store.open(sys.argv[1]) as store:
    print(len(store.claim([(sys.argv[2], replica) for replica in range(3)], Owner.here())), flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_owned_is_taken_over(store: Store, path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path, A], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert line(holder) == "3"
    me = Owner.here()
    assert store.claim(keys(0, 1, 2, 3), me) == keys(3)
    (gone,) = {row.owner for row in store.rows(status="running") if row.owner != me}
    assert gone is not None
    assert gone.pid == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert store.claim(keys(0, 1, 2, 3), me) == keys(0, 1, 2, 3)
    with pytest.raises(ClaimLostError):
        store.finish((A, 0), gone, "done", **CONTENT)


FINISHER = """
import sys
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
with Store.open(sys.argv[1]) as store:
    me = Owner.here()
    for replica in range(10**6):
        for key in store.claim([(sys.argv[2], replica)], me):
            results = {"all": [replica] * 3000}
            store.finish(key, me, "done", results=results, seconds=replica, device=str(replica))
            print(replica, flush=True)
"""


def test_killing_writers_at_random_moments_loses_nothing_and_leaves_whole_rows(store: Store, path: Path) -> None:
    draw, told = random.Random(7), set()
    for _ in range(10):
        process = spawn(FINISHER, path, A)
        seen = [line(process) for _ in range(draw.randint(1, 5))]
        threading.Event().wait(draw.uniform(0, 0.02))  # some moment inside a claim or a finish
        seen += end(process).split()
        told |= set(map(int, seen))
        assert raw(path, "PRAGMA integrity_check") == [("ok",)]
        rows = store.rows()
        done = [row for row in rows if row.status == "done"]
        assert told <= {row.key.replica for row in done}
        assert len(rows) - len(done) <= 1
        for row in done:
            replica = row.key.replica
            assert row.results == {"all": [replica] * 3000}
            assert (row.seconds, row.device) == (replica, str(replica))
    assert sorted(row.key.replica for row in store.rows()) == list(range(len(store.rows())))


TORN = """
import os, signal, sys
from dropconnectpp.lab.runs.store import Store
store = Store.open(sys.argv[1])
store._connection.execute("PRAGMA cache_size = 1")
with store._writing() as connection:
    connection.execute("UPDATE note SET value = '\\"' || hex(zeroblob(200000)) || '\\"'")
    connection.execute("DELETE FROM run")
    connection.execute("INSERT INTO note SELECT digest, 'more', value, seal FROM note")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("read_only", [True, False])
def test_a_half_written_file_is_put_back_by_whoever_opens_it_next(store: Store, path: Path, read_only: bool) -> None:
    finished(store, 0)
    store.write_note(A, "big", list(range(5000)))
    before = dump(path)
    bytes_before = path.read_bytes()
    assert subprocess.run([sys.executable, "-c", TORN, path], check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() != bytes_before
    assert Path(f"{path}-journal").stat().st_size > 0
    with Store.open(path, read_only=read_only) as reader:
        assert reader.notes() == {(A, "big"): list(range(5000))}
        assert [row.results for row in reader.rows()] == [CONTENT["results"]]
    assert dump(path) == before


# ------------------------------------------------------------------------------ files


def test_a_missing_folder_or_file_is_told_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no/store: its folder does not exist. Make the folder"):
        Store.open(tmp_path / "no" / "store")
    with pytest.raises(StoreError, match=r"there is no store to read. Check the path"):
        Store.open(tmp_path / "store", read_only=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match=r"unable to open database file. Check the path"):
        Store.open(tmp_path)


def test_errors_are_caught_as_ours_and_as_oserror() -> None:
    assert issubclass(StoreError, DropConnectError)
    assert issubclass(StoreError, OSError)
    assert issubclass(ClaimLostError, StoreError)
    assert issubclass(FinishedError, StoreError)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_file_that_is_not_sqlite_is_left_alone(path: Path, read_only: bool) -> None:
    content = b"accuracy,0.5\n" * 1000
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"file is not a database. It is no store of results and was left alone"):
        Store.open(path, read_only=read_only)
    assert path.read_bytes() == content


@pytest.mark.parametrize("sql", ["CREATE TABLE run (x)", "PRAGMA user_version = 1", "PRAGMA application_id = 7"])
def test_an_sqlite_file_of_another_program_is_left_alone(path: Path, sql: str) -> None:
    raw(path, sql)
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"an SQLite file of another program. It was left alone"):
        Store.open(path)
    assert path.read_bytes() == content


def test_a_newer_version_is_left_alone(store: Store, path: Path) -> None:
    assert raw(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    raw(path, "PRAGMA user_version = 3")
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"its version is 3, this program knows up to 2. Update dropconnectpp"):
            Store.open(path, read_only=read_only)


def test_an_older_version_is_migrated_by_a_writer(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(store, 0)
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, "CREATE TABLE extra (x)"))
    before = path.read_bytes()
    with Store.open(path, read_only=True) as reader:
        assert [row.key for row in reader.rows()] == keys(0)
    assert path.read_bytes() == before
    with Store.open(path) as newer:
        assert [row.key for row in newer.rows()] == keys(0)
    assert raw(path, "PRAGMA user_version") == [(3,)]
    assert raw(path, "SELECT * FROM extra") == []


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    with pytest.raises(StoreError, match="it is empty"):
        Store.open(path, read_only=True)
    assert path.stat().st_size == 0
    with Store.open(path) as store:
        assert store.rows() == []


def test_strange_names_of_files_work(tmp_path: Path) -> None:
    path = tmp_path / "a?mode=ro#100%é.sqlite"
    with Store.open(path) as store:
        store.add(PROTOCOL)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_store_opened_for_reading_refuses_every_change(store: Store, path: Path) -> None:
    finished(store, 0)
    before, me = path.read_bytes(), Owner.here()
    with Store.open(path, read_only=True) as reader:
        for change in (
            lambda: reader.add(OTHER),
            lambda: reader.claim(keys(1), me),
            lambda: reader.finish((A, 0), me, "done", **CONTENT),
            lambda: reader.release(keys(0), me),
            lambda: reader.heartbeat(me),
            lambda: reader.write_note(A, "x", 1),
            lambda: reader.merge(path.with_name("other")),
        ):
            with pytest.raises(
                StoreError, match=r"opened for reading only. Open it with read_only=False|no store to read"
            ):
                change()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._connection.execute("DELETE FROM run")
    assert path.read_bytes() == before


WITHOUT_RIGHTS = """
import os, sys
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.store import Store
if os.geteuid() == 0:
    os.seteuid(65534)   # root may write anything
with Store.open(sys.argv[1]) as store:
    print(len(store.rows()))
    try:
        store.add(paper("norb", "none"))
    except StoreError as error:
        print(error)
try:
    Store.open(sys.argv[1] + ".new")
except StoreError as error:
    print(error)
"""


def test_a_file_without_the_right_to_write_opens_for_reading() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.sqlite"
        with Store.open(path) as store:
            store.add(PROTOCOL)
            finished(store, 0)
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        try:
            output = subprocess.check_output([sys.executable, "-c", WITHOUT_RIGHTS, path], text=True).splitlines()
        finally:
            Path(folder).chmod(0o755)
    assert output[0] == "1"
    assert output[1].endswith("It can be read but not written; check the permissions of file and folder, or copy it.")
    assert output[2].endswith("Check the path, and the permissions of file and folder.")


def test_a_full_disk_is_told_and_harms_nothing(store: Store, path: Path) -> None:
    store.claim(keys(0), me := Owner.here())
    before = dump(path)
    store._connection.execute(f"PRAGMA max_page_count = {raw(path, 'PRAGMA page_count')[0][0] + 1}")
    with pytest.raises(
        StoreError, match=r"database or disk is full. Nothing was changed; free some space and try again"
    ):
        store.finish((A, 0), me, "done", **(CONTENT | {"results": {"big": [0.123456] * 10_000}}))
    assert dump(path) == before
    store.finish((A, 0), me, "done", **CONTENT)
    assert raw(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_damaged_file_is_told(store: Store, path: Path) -> None:
    finished(store, 0, results={"big": [0.5] * 20_000})
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="The file is damaged; use a copy"):
        Store.open(path)
    assert path.read_bytes() == bytes(content)


def test_a_damaged_value_is_told(store: Store, path: Path) -> None:
    finished(store, 0)
    raw(path, "UPDATE run SET results = '{\"accuracy\": 0.'")
    with pytest.raises(
        DamagedError, match=rf"1 record is damaged: replica 0 of {A}: its content does not have the digest"
    ):
        store.rows()


def test_the_file_itself_refuses_half_a_row(store: Store, path: Path) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        raw(path, f"INSERT INTO run (digest, replica, status, started) VALUES ('{A}', 0, 'done', '')")


def test_a_busy_file_is_waited_for_and_then_told(store: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store._connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, lambda: other.execute("ROLLBACK"))
        timer.start()
        assert store.claim(keys(0), Owner.here()) == keys(0)
        timer.join()
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(database, "PATIENCE_S", 0.05)
        for call in (store.rows, lambda: store.claim(keys(1), Owner.here())):
            with pytest.raises(StoreError, match=r"database is locked. Another process keeps it busy; try again"):
                call()
        other.execute("ROLLBACK")
    assert [row.key for row in store.rows()] == keys(0)


def test_a_reader_that_holds_up_a_commit_is_waited_for(store: Store, path: Path) -> None:
    store._connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM run").fetchall()
        timer = threading.Timer(0.2, lambda: other.execute("COMMIT"))
        timer.start()
        assert store.claim(keys(0), Owner.here()) == keys(0)
        timer.join()


def test_a_file_that_another_tool_put_in_wal_mode_is_put_back(store: Store, path: Path) -> None:
    store.close()
    assert raw(path, "PRAGMA journal_mode = WAL") == [("wal",)]
    Store.open(path).close()
    assert raw(path, "PRAGMA journal_mode") == [("delete",)]


def test_a_store_serves_one_thread_of_one_process(store: Store, path: Path) -> None:
    caught: list[BaseException] = []

    def use() -> None:
        try:
            store.rows()
        except StoreError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert "one Store serves one thread" in str(caught[0])
    store._pid += 1
    with pytest.raises(StoreError, match=r"opened by process \d+. Open the store anew in this one"):
        store.rows()
    store._pid -= 1
    store.close()
    with pytest.raises(StoreError, match=r"closed database. Open the store anew"):
        store.rows()


# ------------------------------------------------------------------------------ merging


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "second.sqlite") as store:
        store.add(PROTOCOL)
        yield store


def test_merging_joins_rows_once_and_reports_conflicts(store: Store, second: Store) -> None:
    second.add(OTHER, label="theirs")
    me = Owner.here()
    finished(store, 0)  # equal in both
    finished(store, 1)  # different
    finished(store, 2, status="failed")  # theirs is finished
    store.claim(keys(3), me)  # theirs is finished
    finished(store, 4)  # ours alone
    elsewhere: dict[int, dict[str, Any]] = {0: {}, 1: {"seconds": 9.0}, 2: {}, 3: {"status": "diverged"}, 5: {}}
    for replica, changes in elsewhere.items():
        finished(second, replica, **changes)
    second.claim(keys(4, 6), other_machine())  # running there
    finished(second, 7, status="failed")
    ours = {row.key: row for row in store.rows()}

    first = store.merge(second.path)
    assert (first.added, first.already_there, first.conflicts) == (tuple(keys(2, 3, 5)), tuple(keys(0)), tuple(keys(1)))
    rows = {row.key: row for row in store.rows()}
    assert [key.replica for key in rows] == [0, 1, 2, 3, 4, 5]
    theirs = {row.key: row for row in second.rows()}
    for replica, source in enumerate((ours, ours, theirs, theirs, ours, theirs)):
        assert rows[Key(A, replica)] == source[Key(A, replica)]
    assert {one.label for one in store.protocols()} == {"DropConnect++", "theirs"}
    with pytest.raises(FinishedError):
        store.finish((A, 3), me, "done", **CONTENT)

    before = dump(store.path)
    again = store.merge(second.path)
    assert (again.added, again.already_there) == ((), tuple(keys(0, 2, 3, 5)))
    assert again.conflicts == tuple(keys(1))
    assert dump(store.path) == before


def test_merging_copies_notes_that_are_missing(store: Store, second: Store) -> None:
    for one, notes in ((store, {"same": 1, "other": 1}), (second, {"same": 1, "other": 2, "new": 3})):
        for name, value in notes.items():
            one.write_note(A, name, value)
    merged = store.merge(second.path)
    assert merged == Merged(
        added=(), already_there=(), conflicts=(), notes_added=((A, "new"),), note_conflicts=((A, "other"),)
    )
    assert store.notes() == {(A, "new"): 3, (A, "other"): 1, (A, "same"): 1}


def test_merging_with_itself_or_with_nothing_is_an_error(store: Store, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for same in (path, str(path), link):
        with pytest.raises(StoreError, match="a store cannot be merged into itself"):
            store.merge(same)
    with pytest.raises(StoreError, match="there is no store to read"):
        store.merge(tmp_path / "none")


def test_a_merge_happens_whole_or_not_at_all(store: Store, second: Store, path: Path) -> None:
    finished(second, 0)
    finished(second, 1, results={"big": [0.123456] * 10_000})
    before = dump(path)
    store._connection.execute(f"PRAGMA max_page_count = {raw(path, 'PRAGMA page_count')[0][0] + 1}")
    with pytest.raises(StoreError, match="disk is full"):
        store.merge(second.path)
    assert dump(path) == before


def test_one_digest_with_two_meanings_is_refused(store: Store, second: Store, path: Path) -> None:
    finished(second, 0)
    raw(second.path, "UPDATE protocol SET settings = '{}', seal = NULL")
    before = dump(path)
    with pytest.raises(DamagedError, match=f"protocol {A}: its settings do not have the digest {A}; replica 0"):
        store.merge(second.path)
    assert dump(path) == before


# ------------------------------------------------------------------------------ random histories

REPLICAS = range(3)
STEP = st.one_of(
    st.tuples(st.just("claim"), st.integers(0, 1), st.integers(0, 2), st.sets(st.sampled_from(REPLICAS), min_size=1)),
    st.tuples(
        st.sampled_from(["done", "diverged", "failed"]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.sampled_from(REPLICAS),
        st.integers(0, 1),
    ),
    st.tuples(st.just("release"), st.integers(0, 1), st.integers(0, 2), st.sampled_from(REPLICAS)),
    st.tuples(st.just("merge"), st.integers(0, 1)),
)
Model = dict[int, tuple[str, Any]]
"""What a store should hold: replica -> (status, owner's number if running, else its result)."""


def step_model(models: list[Model], step: tuple[Any, ...]) -> Any:
    """The rules once more, in the plainest words: what the call should return, or the error it should raise."""
    kind, model = step[0], models[step[1]]
    if kind == "merge":
        groups: dict[str, list[int]] = {"added": [], "already_there": [], "conflicts": []}
        for replica, row in sorted(models[1 - step[1]].items()):
            if row[0] not in ("done", "diverged"):
                continue
            ours = model.get(replica)
            final = ours is not None and ours[0] in ("done", "diverged")
            groups["added" if not final else "already_there" if ours == row else "conflicts"].append(replica)
            if not final:
                model[replica] = row
        return groups
    owner = step[2]
    if kind == "claim":
        free = (None, ("running", 2), ("running", owner))  # owner 2 is dead
        taken = [r for r in sorted(step[3]) if model.get(r) in free or model[r][0] == "failed"]
        model.update(dict.fromkeys(taken, ("running", owner)))
        return taken
    replica = step[3]
    if kind == "release":
        if model.get(replica) == ("running", owner):
            del model[replica]
        return None
    row = (kind, step[4])
    if model.get(replica) == row:
        return None
    if model.get(replica, ("",))[0] in ("done", "diverged"):
        return FinishedError
    if model.get(replica) != ("running", owner):
        return ClaimLostError
    model[replica] = row
    return None


def step_store(stores: list[Store], owners: list[Owner], step: tuple[Any, ...]) -> Any:
    kind, store = step[0], stores[step[1]]
    if kind == "merge":
        merged = store.merge(stores[1 - step[1]].path)
        return {
            name: [key.replica for key in getattr(merged, name)] for name in ("added", "already_there", "conflicts")
        }
    owner = owners[step[2]]
    if kind == "claim":
        return [key.replica for key in store.claim(keys(*sorted(step[3])), owner)]
    if kind == "release":
        return store.release(keys(step[3]), owner)
    try:
        store.finish((A, step[3]), owner, kind, results={"value": step[4]}, seconds=0, device="cpu")
    except (FinishedError, ClaimLostError) as error:
        return type(error)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEP, max_size=15))
def test_random_histories_agree_with_the_rules(steps: list[tuple[Any, ...]]) -> None:
    owners = [Owner.here(), Owner.here(), dead_owner()]
    models: list[Model] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        stores = [Store.open(Path(folder) / str(number)) for number in range(2)]
        try:
            for store in stores:
                store._connection.execute("PRAGMA synchronous = OFF")  # nothing is killed here
                store.add(PROTOCOL)
            for step in steps:
                assert step_store(stores, owners, step) == step_model(models, step), step
                for store, model in zip(stores, models, strict=True):
                    found = {
                        row.key.replica: (row.status, owners.index(row.owner) if row.owner else row.results["value"])
                        for row in store.rows()
                    }
                    assert found == model, step
        finally:
            for store in stores:
                store.close()


# ------------------------------------------------------------------------------ tables


@pytest.fixture
def table_store(store: Store) -> Store:
    finished(store, 0, results={"accuracy": 0.75, "curve": [1], "device": 7, "deep": {"a": 1}})
    finished(store, 1, status="diverged", results={"nll": math.nan, "low": -math.inf, "why": "=1+1"}, device="@x")
    store.claim(keys(2), Owner.here())
    return store


def test_a_table_has_the_same_columns_in_every_row(table_store: Store) -> None:
    table = to_table(table_store.rows())
    who, found = "digest label data replica status", "accuracy low nll results.device why"
    evidence = "seconds device commit started finished versions provenance"
    assert {tuple(row) for row in table} == {tuple(f"{who} {found} {evidence}".split())}
    first, second, third = table
    assert (first["accuracy"], first["nll"], first["results.device"], first["device"]) == (0.75, None, 7, "cpu")
    assert (first["label"], first["data"], first["digest"]) == ("DropConnect++", "cifar10", A)
    assert (first["versions"], first["provenance"]) == ('{"torch":"2.10"}', '{"verified":true}')
    assert math.isnan(second["nll"])
    assert (third["status"], third["seconds"], third["finished"]) == ("running", None, None)
    assert to_table([]) == []


def test_csv_keeps_numbers_and_disarms_formulas(table_store: Store) -> None:
    stream = io.StringIO(newline="")
    write_csv(table_store.rows(), stream)
    first, second, third = csv.DictReader(io.StringIO(stream.getvalue(), newline=""))
    assert (first["accuracy"], first["nll"], first["seconds"]) == ("0.75", "", "2.5")
    assert (second["nll"], second["low"], second["why"], second["device"]) == ("NaN", "-Infinity", "'=1+1", "'@x")
    assert third["replica"] == "2"
    for text, expected in {"+1": "'+1", "-1": "'-1", "a=1": "a=1", "": ""}.items():
        assert flat_rows._cell(text) == expected
    assert flat_rows._cell(-1.5) == -1.5
    empty = io.StringIO()
    write_csv([], empty)
    assert empty.getvalue() == ""


def test_json_is_strict_json(table_store: Store) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    stream = io.StringIO()
    write_json(table_store.rows(), stream)
    table = json.loads(stream.getvalue(), parse_constant=refuse)
    assert [row["nll"] for row in table] == [None, "NaN", None]
    assert [row["low"] for row in table] == [None, "-Infinity", None]
    assert list(table[0]) == list(to_table(table_store.rows())[0])
