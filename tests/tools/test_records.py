"""The records: every table and figure is what its rows give, byte for byte, and nothing there is of unknown origin."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import matplotlib
import pytest

from dropconnectpp.lab.report.render import drawing
from scripts import ROOT, call

sys.path.insert(0, str(ROOT / "tools"))
tool, record = (importlib.import_module(name) for name in ("rebuild_records", "record"))
sys.path.pop(0)

RECORDS = ROOT / "records"
PLAN = tool.plan()


@pytest.fixture(autouse=True, scope="module")
def _read_and_drawn_once() -> Iterator[None]:
    """Rows are read once for the tables of a folder, and figures drawn in the one form that the records keep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "read", lru_cache(maxsize=4)(record.read))
        patch.setattr(drawing, "METADATA", {"svg": drawing.METADATA["svg"]})
        yield


@pytest.mark.parametrize("command", PLAN.commands, ids=lambda command: f"{command.folder}/{command.files[0]}")
def test_the_rows_give_what_is_published(command: tool.Command, tmp_path: Path) -> None:
    assert tool.differing(command, PLAN, tmp_path) == []


def test_every_file_of_the_records_is_accounted_for() -> None:
    made = {f"{command.folder}/{file}" for command in PLAN.commands for file in command.files}
    read = {word.removeprefix("records/") for command in PLAN.commands for word in command.words}
    there = {path.relative_to(RECORDS).as_posix() for path in RECORDS.rglob("*") if path.is_file()}
    rows = {word for word in read if word.endswith(".jsonl.xz")} | (read & there)
    assert made | rows | set(PLAN.measured) <= there
    assert not made & set(PLAN.measured)
    others = there - made - rows - set(PLAN.measured)
    readme = {f"{folder.name}/README.md" for folder in RECORDS.iterdir() if folder.is_dir()}
    assert readme <= others, "each folder says what is in it"
    settings = {one for one in others if one.endswith((".toml", ".json"))}
    assert others - readme - settings == {"README.md"}
    for one in settings - {"tables.toml"}:
        assert Path(one).name in (RECORDS / one).with_name("README.md").read_text(), one


def test_the_records_are_light() -> None:
    sizes = {folder: sum(path.stat().st_size for path in folder.rglob("*")) for folder in RECORDS.iterdir()}
    assert max(sizes.values()) < 2_000_000
    assert sum(sizes.values()) < 8_000_000


def test_a_file_that_its_rows_do_not_give_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(tool, "RECORDS", tmp_path)
    (tmp_path / "tables.toml").write_text((ROOT / "records" / "tables.toml").read_text())
    kept = (ROOT / "records" / "kernels" / "precisions_cuda.md").read_text()
    file = tmp_path / "kernels" / "precisions_cuda.md"
    file.write_text(kept.replace("0.84", "0.85"))
    found = call("tools/rebuild_records.py", "--only", "precisions_cuda.md")
    assert found.stdout == "differs  kernels/precisions_cuda.md\n"
    assert found.stderr == "1 files are not what their rows give.\n"
    assert found.returncode == 1
    call("tools/rebuild_records.py", "--only", "precisions_cuda.md", "--write")
    assert file.read_text() == kept
    found = call("tools/rebuild_records.py", "--only", "precisions_cuda.md")
    assert (found.returncode, found.stdout) == (0, "same     kernels/precisions_cuda.md\n")
    file.unlink()
    assert call("tools/rebuild_records.py", "--only", "precisions_cuda.md").returncode == 1


def test_a_drawing_of_another_matplotlib_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = (one for one in PLAN.commands if "svhn_pruning.svg" in one.files)
    monkeypatch.setattr(tool, "content", lambda path: b"" if path.is_relative_to(RECORDS) else b"another")
    monkeypatch.setattr(tool.Command, "run", lambda *_: None)
    assert set(tool.differing(command, PLAN, tmp_path)) == {
        file for file in command.files if not file.endswith(".svg") or matplotlib.__version__ == PLAN.matplotlib
    }
    monkeypatch.setattr(matplotlib, "__version__", "0.1")
    assert not any(file.endswith(".svg") for file in tool.differing(command, PLAN, tmp_path))


def test_the_commands_are_shown_as_a_shell_takes_them() -> None:
    found = call("tools/rebuild_records.py", "replicas", "--show")
    assert found.stdout == (
        "python tools/compare_groups.py records/replicas/pilot_seed0.jsonl.xz records/replicas/pilot_seed1.jsonl.xz "
        "--out records/replicas/groups_cuda.md\n"
    )
    assert "nothing in masks is made from rows" in call("tools/rebuild_records.py", "masks").stderr
    assert "x.md: made from rows by no command" in call("tools/rebuild_records.py", "--only", "x.md").stderr


def test_accuracy_does_not_move_with_the_kernels() -> None:
    for name in ("precisions_cuda", "precisions_torch_loss_cuda"):
        recorded = (RECORDS / "kernels" / f"{name}.md").read_text()
        lines = [line.split(" | ") for line in recorded.splitlines() if "accuracy, %" in line]
        assert len(lines) == 2
        for line in lines:
            low, high = map(float, line[5].split(" to "))
            assert low < 0.0 < high


@pytest.mark.parametrize("name", ["svhn", "cifar100"])
def test_a_record_of_rebuilt_images_says_so_in_every_table(name: str) -> None:
    tables = list((RECORDS / name).glob(f"{name}_*.md"))
    assert tables
    for path in tables:
        assert "† The files of this data set do not have the official checksums" in path.read_text()
