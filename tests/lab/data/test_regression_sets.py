"""UCI regression sets: their form, checked before anything is stored, and opened after comparing a digest."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from uci_cases import ROWS, SPLITS, table, write_set

from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data import placing, regression
from dropconnectpp.lab.data.dataset import DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_set(tmp_path / "given" / "yacht")
    return tmp_path / "given"


def test_what_is_fetched_is_what_the_files_say(source: Path, tmp_path: Path) -> None:
    assert not regression.is_ready("yacht", tmp_path)
    found = regression.fetch("uci:yacht", source, directory=tmp_path)
    assert regression.is_ready("yacht", tmp_path)
    assert found.name == "uci:yacht"
    np.testing.assert_array_equal(found.x, table()[:, :3])
    np.testing.assert_array_equal(found.y, table()[:, 4])
    assert len(found.splits) == SPLITS
    for number, (train, test) in enumerate(found.splits):
        order = np.random.default_rng(number).permutation(ROWS)
        np.testing.assert_array_equal(train, order[:48])
        np.testing.assert_array_equal(test, order[48:])
    assert found.describe() == "uci:yacht: 60 examples of 3 inputs, 3 splits into 48 to train on and 12 to test on"


@pytest.mark.parametrize("inner", ["yacht", "yacht/data", "."])
def test_folders_are_found_in_any_of_their_forms(inner: str, tmp_path: Path) -> None:
    write_set(tmp_path / "given" / inner)
    assert len(regression.fetch("yacht", tmp_path / "given", directory=tmp_path).y) == ROWS


def test_it_stays_until_it_is_forced(source: Path, tmp_path: Path) -> None:
    first = regression.fetch("yacht", source, directory=tmp_path)
    write_set(source / "yacht", seed=1)
    assert regression.fetch("yacht", None, directory=tmp_path).content == first.content
    assert regression.fetch("yacht", source, directory=tmp_path, force=True).content != first.content


def test_names(tmp_path: Path) -> None:
    assert regression.names_of("boston") == ["uci:bostonHousing"]
    assert len(regression.names_of("uci")) == 9
    with pytest.raises(ProtocolError, match=r"no UCI set 'uci:boson'\. Choose from uci:yacht"):
        regression.names_of("uci:boson")
    with pytest.raises(DataError, match=re.escape("dcpp data fetch uci --from UCI_Datasets")):
        regression.load("yacht", directory=tmp_path)
    with pytest.raises(DataError, match="is not downloaded by this command"):
        regression.fetch("yacht", None, directory=tmp_path)


def test_another_sets_folder_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is the folder of uci:yacht, not of uci:energy"):
        regression.fetch("energy", source / "yacht", directory=tmp_path)
    with pytest.raises(DataError, match=r"holds neither data.txt nor energy/data.txt"):
        regression.fetch("energy", source, directory=tmp_path)


def spoil(name: str, text: str):
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("data.txt", ""), "is no table of numbers"),
        (spoil("data.txt", "1 2\n3\n"), "is no table of numbers"),
        (spoil("data.txt", "1 2 3 4 nan\n"), "values that are not finite"),
        (spoil("index_features.txt", "0 1 9"), "expected numbers of columns from 0 to 4"),
        (spoil("index_features.txt", "0 0"), "names a column twice"),
        (spoil("index_target.txt", "0"), "one target column that is no feature"),
        (spoil("index_target.txt", "3 4"), "one target column that is no feature"),
        (spoil("index_train_1.txt", "0 1 2"), "split 1 does not have each of the 60 rows exactly once"),
        (spoil("index_test_2.txt", "1.5"), "expected numbers of rows from 0 to 59"),
        (lambda folder: (folder / "index_test_0.txt").unlink(), "there is no such file"),
        (lambda folder: (folder / "index_train_1.txt").unlink(), r"found \[0, 2\]"),
    ],
)
def test_what_is_damaged_is_named_and_nothing_is_stored(change, message: str, source: Path, tmp_path: Path) -> None:
    change(source / "yacht")
    with pytest.raises(DataError, match=message):
        regression.fetch("yacht", source, directory=tmp_path)
    assert not regression.is_ready("yacht", tmp_path)


@pytest.mark.parametrize("part", [placing.NEW, placing.OLD])
def test_a_set_that_was_being_replaced_when_its_process_was_killed_is_put_back(
    part: str, source: Path, tmp_path: Path
) -> None:
    content = regression.fetch("yacht", source, directory=tmp_path).content
    place = regression.where("yacht", tmp_path)
    (left := tmp_path / f".{place.name}.killed.work").mkdir()
    place.rename(left / part)
    assert regression.is_ready("yacht", tmp_path)
    assert regression.load("yacht", directory=tmp_path).content == content
    assert not left.exists()


@pytest.mark.parametrize("header", [b"{" * 118, b"(" * 118, b"\xff" * 118])
def test_a_damaged_header_is_an_error_of_ours(header: bytes, source: Path, tmp_path: Path) -> None:
    regression.fetch("yacht", source, directory=tmp_path)
    path = regression.where("yacht", tmp_path) / "x.npy"
    content = path.read_bytes()
    path.write_bytes(content[:10] + header + content[128:])
    with pytest.raises(DataError, match="Fetch it again: dcpp data fetch uci:yacht --force"):
        regression.load("yacht", directory=tmp_path)


def test_splits_of_another_size_are_refused(source: Path, tmp_path: Path) -> None:
    order = np.arange(ROWS)
    np.savetxt(source / "yacht" / "index_train_2.txt", order[:40])
    np.savetxt(source / "yacht" / "index_test_2.txt", order[40:])
    with pytest.raises(DataError, match="split 2 has a test half of another length"):
        regression.fetch("yacht", source, directory=tmp_path)


@pytest.mark.parametrize("name", ["x.npy", "test.npy", "description.json"])
def test_a_changed_file_is_noticed(name: str, source: Path, tmp_path: Path) -> None:
    regression.fetch("yacht", source, directory=tmp_path)
    path = regression.where("yacht", tmp_path) / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"dcpp data fetch uci:yacht --force"):
        regression.load("yacht", directory=tmp_path)
