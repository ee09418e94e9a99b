"""The disk that fails: every call counts, the one that is named fails, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from injection import SUPPORTED, Fault, Faulty, How
from injection_cases import replace_file, write_array
from power_loss import Disk, calls_in, losses

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs Linux and a C compiler")
CALLS = ["create /new", "write /new", "fsync /new", "rename /file", "fsync ", "unlink /other"]


@pytest.fixture(scope="module")
def faulty() -> Iterator[Faulty]:
    with Faulty(["injection_cases"]) as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/other").write_text("x")
    return tmp_path / "here"


def test_every_call_under_the_root_counts_and_others_do_not(faulty: Faulty, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert faulty.run(replace_file, folder, root=tmp_path / "elsewhere").calls == 0
    (folder / "other").write_text("x")
    end = faulty.run(replace_file, folder, root=folder)
    assert (end.calls, end.value, end.well) == (len(CALLS), "written", True)


@pytest.mark.parametrize("at", range(1, len(CALLS) + 1))
@pytest.mark.parametrize("how", ["error", "full", "half"])
def test_the_call_that_is_named_fails(faulty: Faulty, folder: Path, how: How, at: int) -> None:
    end = faulty.run(replace_file, folder, root=folder, fault=Fault(at, how))
    assert end.failed == CALLS[at - 1]
    assert end.error.startswith("OSError: [Errno 28]" if at <= 2 else "OSError: [Errno 5]")
    assert not end.ours
    assert (folder / "file").exists() == (at > 4)
    if at == 2:
        assert (folder / "new").read_bytes() == (b"01234" if how == "half" else b"")


@pytest.mark.parametrize("at", range(1, len(CALLS) + 1))
def test_a_process_can_be_killed_at_a_call(faulty: Faulty, folder: Path, at: int) -> None:
    assert faulty.run(replace_file, folder, root=folder, fault=Fault(at, "kill")).killed
    assert (folder / "new").exists() == (1 < at <= 4)
    assert (folder / "other").exists()


def test_the_log_holds_what_was_written(faulty: Faulty, folder: Path, tmp_path: Path) -> None:
    faulty.run(replace_file, folder, root=folder, log=tmp_path / "log")
    logged = (tmp_path / "log").read_bytes()
    assert b"\t0\t10\t" in logged
    assert b"0123456789fsync\t" in logged


def test_what_numpy_writes_counts_and_fails(faulty: Faulty, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert faulty.run(write_array, folder, root=folder, log=log).calls == 3
    assert [call.name for call in calls_in(log, folder)] == ["create", "write", "write"]
    np.testing.assert_array_equal(np.load(folder / "array.npy"), np.arange(100))
    assert calls_in(log, folder)[-1].data == np.arange(100).tobytes()
    (folder / "array.npy").unlink()
    end = faulty.run(write_array, folder, root=folder, fault=Fault(3, "half"))
    assert (end.failed, end.error[:7]) == ("write /array.npy", "OSError")
    assert (folder / "array.npy").stat().st_size == 128 + 400


def test_the_log_tells_what_a_power_loss_may_leave(faulty: Faulty, folder: Path, tmp_path: Path) -> None:
    disk, log = Disk(folder), tmp_path / "log"
    faulty.run(replace_file, folder, root=folder, log=log)
    found: dict[int, dict[str, dict[str, bytes]]] = {}
    for at, loss, left in losses(disk, calls_in(log, folder), tmp_path):
        found.setdefault(at, {})[loss] = {path.name: path.read_bytes() for path in left.iterdir()}
    whole, other = b"0123456789", {"other": b"x"}
    assert [found[at]["dropped"] for at in range(7)] == [other] * 5 + [other | {"file": whole}] * 2
    assert [found[at]["empty"] for at in (1, 2, 3)] == [other | {"new": b""}] * 2 + [other | {"new": whole}]
    assert found[4]["empty"] == found[5]["empty"] == other | {"file": whole}
    assert found[6]["empty"] == {"file": whole}
    assert all(found[at]["torn"].get("file", whole) == whole for at in range(7))
