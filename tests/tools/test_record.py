"""A store as a small text file: what is read from it, and what comes back, is what the store held."""

from __future__ import annotations

import lzma
import math
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
from scripts import ROOT, call

RESULTS: dict[str, Any] = {
    "accuracy": 72.38000000000001,
    "losses": [1.5669389963150024, math.nan, 0.0, -math.inf, 9.99994610111476e-41],
    "posterior": {"quantiles": [0.4831608533859253, 1.0], "mean": 0.1, "histogram": [0, 10**12]},
    "curve": [{"epoch": 5, "nll": 0.5}, {"epoch": 10, "nll": 0.1 + 0.2}],
    "pruning": None,
    "text": "π̃ – ½",
}
"""Single precision, double precision, both at one place, and what is no number."""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return __import__("record")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Protocols with notes, and three finished runs of one of them."""
    path, me = tmp_path / "results.sqlite", Owner.here()
    with Store.open(path) as opened:
        digest = opened.add(paper("cifar10", "dropconnect++"))
        other = opened.add(replace(paper("svhn", Method(alpha=2.0))), label="own label")
        opened.write_note(digest, "trial", True)
        opened.write_note(other, "timings", {"seconds": math.nan, "list": [1, 1.0, None]})
        done, diverged, failed = opened.claim([(digest, replica) for replica in range(3)], me)
        evidence = {"seconds": 1.5, "device": "none", "commit": "c0ffee", "versions": {"torch": "2"}}
        opened.finish(done, me, "done", results=RESULTS, **evidence, provenance={"files": {"a": "md5:b"}})
        opened.finish(diverged, me, "diverged", results={"losses": [0.25]}, **evidence)
        opened.finish(failed, me, "failed", results={}, seconds=0.0, device="")
    return path


def tables(path: Path) -> list[list[tuple[Any, ...]]]:
    """All that a store holds, as it is written there."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert set(names) == {"protocol", "owner", "note", "run"}
        return [connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in sorted(names)]


def packed(store: Path) -> Path:
    file = store.with_name("results.jsonl.xz")
    found = call("tools/record.py", "pack", str(store), str(file))
    assert found.returncode == 0, found.stderr
    return file


def test_a_store_comes_back_with_every_digit(store: Path, tmp_path: Path) -> None:
    file = packed(store)
    assert call("tools/record.py", "unpack", str(file), str(tmp_path / "again.sqlite")).returncode == 0
    assert tables(tmp_path / "again.sqlite") == tables(store)
    again = tmp_path / "other.jsonl.xz"
    assert call("tools/record.py", "pack", str(store), str(again)).returncode == 0
    assert again.read_bytes() == file.read_bytes()


def test_a_packed_store_is_read_as_the_store_is(record: Any, store: Path) -> None:
    ours, theirs = record.read(packed(store)), record.read(store)
    assert repr(ours) == repr(theirs), "as text: nan is not equal to nan"
    assert [row.status for row in ours.rows] == ["done", "diverged", "failed"]
    found = ours.rows[0].results
    assert found["posterior"] == RESULTS["posterior"], "with every digit"
    assert repr(found["losses"]) == repr(RESULTS["losses"])
    assert record.name(Path("a/mixed.jsonl.xz")) == record.name(Path("a/mixed.sqlite")) == "mixed"


def test_single_precision_has_few_digits_where_all_numbers_of_a_place_have_it(store: Path) -> None:
    head, *lines = lzma.decompress(packed(store).read_bytes()).decode().splitlines()
    assert '"single precision":["losses","posterior.quantiles"]' in head
    (run,) = (line for line in lines if '"replica":0' in line)
    assert '"losses":[1.566939,"NaN",0.0,"-Infinity",1e-40]' in run
    assert '"quantiles":[0.48316085,1.0]' in run
    assert '"nll":0.30000000000000004' in run
    assert '"nll":0.5' in run


def test_what_cannot_be_packed_or_unpacked_says_so(record: Any, store: Path, tmp_path: Path) -> None:
    file = packed(store)
    again = call("tools/record.py", "unpack", str(file), str(store))
    assert again.returncode == 1
    assert "is there already" in again.stderr
    (tmp_path / "no.jsonl.xz").write_bytes(lzma.compress(b'{"format": "another"}\n'))
    other = call("tools/record.py", "unpack", str(tmp_path / "no.jsonl.xz"), str(tmp_path / "no.sqlite"))
    assert "is no record of this format: it says 'another'" in other.stderr
    assert "must end with .jsonl.xz" in call("tools/record.py", "pack", str(store), str(tmp_path / "rows.txt")).stderr
    with Store.open(store) as opened:
        opened.claim([(opened.protocols()[0].digest, 7)], Owner.here())
    running = call("tools/record.py", "pack", str(store), str(tmp_path / "running.jsonl.xz"))
    assert "1 runs are not finished" in running.stderr
    assert not (tmp_path / "running.jsonl.xz").exists()
    missing = call("tools/record.py", "pack", str(tmp_path / "missing.sqlite"), str(tmp_path / "m.jsonl.xz"))
    assert "there is no store to read" in missing.stderr


def test_a_damaged_store_is_not_packed_and_one_without_digests_is(store: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute("UPDATE run SET results = '{}' WHERE replica = 0")
    found = call("tools/record.py", "pack", str(store), str(tmp_path / "damaged.jsonl.xz"))
    assert found.returncode == 1
    assert "1 record is damaged: replica 0 of" in found.stderr
    assert not (tmp_path / "damaged.jsonl.xz").exists()
    old, file = ROOT / "tests/lab/runs/golden/finished-0.1.0.sqlite", tmp_path / "old.jsonl.xz"
    assert call("tools/record.py", "pack", str(old), str(file)).returncode == 0
    assert call("tools/record.py", "unpack", str(file), str(tmp_path / "again.sqlite")).returncode == 0
    with Store.open(tmp_path / "again.sqlite", read_only=True) as opened:
        content = opened.content()
    assert (len(content.finished), content.unverified, content.damaged) == (6, 6, [])


def test_no_file_is_left_that_says_anything_else(
    record: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_shortest", lambda value: round(value, 3))
    found = call("tools/record.py", "pack", str(store), str(tmp_path / "rounded.jsonl.xz"))
    assert found.returncode == 1
    assert "holds something that" in found.stderr
    assert not (tmp_path / "rounded.jsonl.xz").exists()
    assert sys.modules["record"] is record
