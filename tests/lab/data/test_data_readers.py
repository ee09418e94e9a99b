"""The readers of image data sets on well-formed files, byte for byte, and every message about malformed ones."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import data_writers as w
import numpy as np
import pytest
import scipy.io
from PIL import Image

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.formats import cifar, folder, idx, norb, svhn

TEN = tuple("abcdefghij")
HUNDRED = tuple(f"class {i}" for i in range(100))
FIVE = tuple("abcde")


def check_cifar10(arrays: Arrays, count: int = 2) -> None:
    batches = w.cifar10_batches(count)
    *train, test = batches.values()
    np.testing.assert_array_equal(arrays.train.images, np.concatenate([images for images, _ in train]))
    np.testing.assert_array_equal(arrays.train.labels, [label for _, labels in train for label in labels])
    np.testing.assert_array_equal(arrays.test.images, test[0])
    np.testing.assert_array_equal(arrays.test.labels, test[1])
    for split in (arrays.train, arrays.test):
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64
    assert arrays.classes == TEN


# -------------------------------------------------------------------------------------------- CIFAR


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar10_archive(tmp_path: Path, kind: str, zipped: bool) -> None:
    path = tmp_path / "archive"
    path.write_bytes(w.cifar_archive(w.cifar10_files(kind), zipped=zipped))
    check_cifar10(cifar.read(path, cifar.CIFAR10, TEN))
    assert cifar.find(path, cifar.CIFAR10) == {"archive": path}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_cifar10_archive_made_by_tarfile(tmp_path: Path, form: int) -> None:
    source = w.write_files(tmp_path / "cifar-10-batches-py", w.cifar10_files())
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", format=form) as archive:
        archive.add(source, "cifar-10-batches-py")  # PAX_FORMAT writes an extended header for each file's time
    check_cifar10(cifar.read(path, cifar.CIFAR10, TEN))


@pytest.mark.parametrize("kind", ["python", "binary"])
@pytest.mark.parametrize("inside", [".", "cifar-10-batches"])
def test_cifar10_folder_and_its_parent(tmp_path: Path, kind: str, inside: str) -> None:
    files = w.cifar10_files(kind)
    w.write_files(tmp_path / inside, files)
    check_cifar10(cifar.read(tmp_path, cifar.CIFAR10, TEN))
    assert cifar.find(tmp_path, cifar.CIFAR10) == {name: tmp_path / inside / name for name in files}


def test_cifar10_files_of_two_folders_are_not_mixed(tmp_path: Path) -> None:
    w.write_files(tmp_path / "a", {"data_batch_1": b"incomplete"})
    w.write_files(tmp_path / "b", w.cifar10_files("binary"))
    check_cifar10(cifar.read(tmp_path, cifar.CIFAR10, TEN))


def test_cifar10_counts_over_the_batches_of_a_pickled_list(tmp_path: Path) -> None:
    w.write_files(tmp_path, w.cifar10_files(count=1001))
    check_cifar10(cifar.read(tmp_path, cifar.CIFAR10, TEN), 1001)


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar100_takes_the_fine_labels(tmp_path: Path, kind: str) -> None:
    files, expected = {}, []
    for seed, name in enumerate(("train", "test")):
        images, fine, coarse = w.random_images(3, 3, 32, 32, seed=seed), [7, 99, seed], [19, 0, 5]
        expected.append((images, fine))
        if kind == "python":
            files[name] = w.cifar_pickle(images, {"fine_labels": fine, "coarse_labels": coarse})
        else:
            files[f"{name}.bin"] = w.cifar_binary(images, coarse, fine)
    path = tmp_path / "cifar-100.tar.gz"
    path.write_bytes(w.cifar_archive(files, "cifar-100-python"))
    arrays = cifar.read(path, cifar.CIFAR100, HUNDRED)
    for split, (images, fine) in zip((arrays.train, arrays.test), expected, strict=True):
        np.testing.assert_array_equal(split.images, images)
        np.testing.assert_array_equal(split.labels, fine)


def test_the_writer_of_old_pickles_agrees_with_pythons_own_unpickler() -> None:
    images = w.random_images(2, 3, 32, 32)
    batch = pickle.loads(w.cifar_pickle(images, {"labels": [300, 70_000]}), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], images.reshape(2, 3072))
    assert batch[b"labels"] == [300, 70_000]
    assert batch[b"filenames"] == [b"image_s_000000.png", b"image_s_000001.png"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
@pytest.mark.parametrize("module", [b"numpy._core", b"numpy.core"])
def test_cifar10_modern_pickles(tmp_path: Path, protocol: int, key: Any, module: bytes) -> None:
    for name, (images, labels) in w.cifar10_batches().items():
        batch = {key("data"): images.reshape(2, 3072), key("labels"): labels, key("batch_label"): key("of 5")}
        data = pickle.dumps(batch, protocol)
        if protocol < 4:  # later ones count the bytes of the name
            data = data.replace(b"numpy._core", module)
        (tmp_path / name).write_bytes(data)
    check_cifar10(cifar.read(tmp_path, cifar.CIFAR10, TEN))


def batch_with(**changes: Any) -> bytes:
    images = w.random_images(2, 3, 32, 32)
    return pickle.dumps({"data": images.reshape(2, 3072), "labels": [1, 2], **changes}, 4)


BROKEN_PICKLES = {
    "has no 'data' and 'labels'. Is it a file of another": pickle.dumps({"data": 1}, 2),
    "has no 'data' and 'labels'": batch_with(labels=(1, 2)),
    "its labels are not whole numbers": batch_with(labels=[1, True]),
    "its labels are not whole numbers.*again": batch_with(labels=[1, -1]),
    "3 labels for 2 images": batch_with(labels=[1, 2, 3]),
    "not plain uint8 of two axes": batch_with(data=w.random_images(2, 3, 1024)),
    "not plain uint8 of two axes.": batch_with(data=np.zeros((2, 3072), np.int8)),
    "not plain uint8 of two axes..": batch_with(data=np.asfortranarray(w.random_images(2, 3072))),
    r"images of shape \(2, 5\), expected \(N, 3072\)": batch_with(data=w.random_images(2, 5)),
    "holds a list, expected a dictionary": pickle.dumps([], 2),
    "damaged pickle.*exhausted": b"",
    "damaged pickle.*exhausted before seeing STOP": b"\x80\x02}",
    "damaged pickle.*IndexError": b"\x80\x02u.",
    "instruction FLOAT": b"F1.5\n.",
    "instruction BINFLOAT": batch_with(labels=[1.5]),
    "asks for 'collections.OrderedDict', which no CIFAR file contains": (b"ccollections\nOrderedDict\n)R."),
    "asks for 'builtins.eval'.*may be malicious and was not run": b"\x8c\x08builtins\x8c\x04eval\x93.",
    "asks for 'something nameless'": b"]]\x93.",
    "has a call that no CIFAR file has": b"})R.",
    "has a call that no CIFAR file has: it may": b"cnumpy\ndtype\n]R.",
    "sets the state of what has none": b"}}b.",
    "appends to what is no list": b"}(K\x01e.",
    "sets items of what is no dictionary": b"](K\x01K\x02u.",
    "has a key that is no short string": b"})K\x01s.",
    "encoding that no CIFAR file has": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
    "its array is damaged": b"}U\x06labels]sU\x04datacnumpy\nndarray\n)Rs.",
    "its array is text": bytes(w.cifar_pickle(w.random_images(2, 3, 32, 32), {"labels": [1, 2]})).replace(
        b"T" + struct.pack("<I", 6144) + w.random_images(2, 3, 32, 32).tobytes(), b"X\x03\x00\x00\x00\xe2\x82\xac"
    ),
    "promises 2 x 3072 = 6,144 bytes, and 3 follow": w.cifar_pickle(
        w.random_images(2, 3, 32, 32), {"labels": [1, 2]}
    ).replace(b"T" + struct.pack("<I", 6144) + w.random_images(2, 3, 32, 32).tobytes(), b"U\x03abc"),
}


@pytest.mark.parametrize("message", BROKEN_PICKLES)
def test_cifar10_broken_pickles(tmp_path: Path, message: str) -> None:
    w.write_files(tmp_path, {**w.cifar10_files(), "data_batch_3": BROKEN_PICKLES[message]})
    with pytest.raises(DataError, match=f"data_batch_3: .*{message}"):
        cifar.read(tmp_path, cifar.CIFAR10, TEN)


def test_cifar10_pickle_of_too_many_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "INSTRUCTION_LIMIT", 20)
    w.write_files(tmp_path, w.cifar10_files())
    with pytest.raises(DataError, match="has more than 20 instructions"):
        cifar.read(tmp_path, cifar.CIFAR10, TEN)


def test_cifar10_incomplete(tmp_path: Path) -> None:
    files = w.cifar10_files()
    del files["data_batch_2"], files["test_batch"]
    w.write_files(tmp_path, files)
    path = tmp_path / "archive"
    path.write_bytes(w.cifar_archive(files))
    for source in (tmp_path, path):
        with pytest.raises(DataError, match=r": data_batch_2, test_batch missing. Get the whole archive again"):
            cifar.read(source, cifar.CIFAR10, TEN)


def test_cifar10_of_another_data_set(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(w.cifar_archive(w.cifar10_files()))
    with pytest.raises(
        DataError, match=r"holds none of train, test, train.bin, test.bin. Is it the archive of another"
    ):
        cifar.read(path, cifar.CIFAR100, HUNDRED)
    with pytest.raises(DataError, match=r"holds none of train, test, .*Is it the folder of another"):
        cifar.read(tmp_path, cifar.CIFAR100, HUNDRED)


def test_cifar10_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: there is no such file or folder"):
        cifar.find(tmp_path / "nowhere", cifar.CIFAR10)
    with pytest.raises(DataError, match=r"nowhere: there is no such file"):
        cifar.read(tmp_path / "nowhere", cifar.CIFAR10, TEN)


def test_cifar10_twice_in_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    batch = w.cifar10_files()["test_batch"]
    path.write_bytes(w.tar_of([w.tar_member(b"a/test_batch", batch), w.tar_member(b"b/test_batch", batch)]))
    with pytest.raises(DataError, match="archive: holds test_batch twice"):
        cifar.read(path, cifar.CIFAR10, TEN)


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_cifar10_binary_of_a_broken_size(tmp_path: Path, size: int) -> None:
    w.write_files(tmp_path, {**w.cifar10_files("binary"), "test_batch.bin": bytes(size)})
    with pytest.raises(DataError, match=rf"test_batch.bin: {size:,} bytes are not a whole number of 3073-byte records"):
        cifar.read(tmp_path, cifar.CIFAR10, TEN)


def test_cifar10_labels_out_of_range(tmp_path: Path) -> None:
    w.write_files(tmp_path, {**w.cifar10_files("binary"), "test_batch.bin": b"\x0a" + bytes(3072)})
    with pytest.raises(DataError, match="test labels run from 10 to 10, expected 0 to 9"):
        cifar.read(tmp_path, cifar.CIFAR10, TEN)


def test_archives_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = w.cifar_archive(w.cifar10_files(), zipped=False)
    path = tmp_path / "archive"
    cases = {
        "damaged, cut short or not a tar archive": [b"", b"\0", b"nothing of the kind" * 99, good[:700], good[100:]],
        "damaged, cut short or not readable": [b"\x1f\x8b", b"\x1f\x8bnothing", gzip.compress(good)[:-5]],
        "a file in it is cut short: 24 bytes are missing. Get the archive again": [
            w.tar_member(b"test_batch", b"", size=1000) + bytes(1000)[:976]
        ],
        "holds none of data_batch_1": [bytes(1024)],
    }
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(DataError, match=f"archive: {message}"):
                cifar.read(path, cifar.CIFAR10, TEN)
    path.write_bytes(good)
    monkeypatch.setattr(cifar, "FILE_LIMIT", 1000)
    with pytest.raises(DataError, match=r"data_batch_1 claims 6,\d\d\d bytes, expected at most 1,000"):
        cifar.read(path, cifar.CIFAR10, TEN)
    monkeypatch.setattr(cifar, "TOTAL_LIMIT", 5000)
    with pytest.raises(DataError, match="unpacks to more than 5,000 bytes"):
        cifar.read(path, cifar.CIFAR10, TEN)
    w.write_files(tmp_path, w.cifar10_files())
    with pytest.raises(DataError, match="data_batch_1: holds more than 1,000 bytes"):
        cifar.read(tmp_path, cifar.CIFAR10, TEN)


# --------------------------------------------------------------------------------------------- SVHN


def check_svhn(arrays: Arrays, counts: tuple[int, int] = (3, 2)) -> None:
    for seed, (split, count) in enumerate(zip((arrays.train, arrays.test), counts, strict=True)):
        stored = w.random_images(count, 3, 32, 32, seed=seed)  # MATLAB's first axis, the height, varies fastest
        np.testing.assert_array_equal(split.images, stored.transpose(0, 1, 3, 2))
        np.testing.assert_array_equal(split.labels, [(1 + (seed + 4 * i) % 10) % 10 for i in range(count)])
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn(tmp_path: Path, compressed: bool) -> None:
    files = {"train_32x32.mat": w.svhn_mat(3, 0, compressed), "test_32x32.mat": w.svhn_mat(2, 1, compressed)}
    w.write_files(tmp_path, files)
    check_svhn(svhn.read(tmp_path, TEN))
    assert svhn.find(tmp_path) == {name: tmp_path / name for name in files}


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", [np.float64, np.uint8, np.float32, np.int16])
def test_svhn_written_by_scipy(tmp_path: Path, compressed: bool, kind: type) -> None:
    for seed, (name, count) in enumerate({"train": 3, "test": 2}.items()):
        x = w.random_images(count, 3, 32, 32, seed=seed).transpose(3, 2, 1, 0)
        y: Any = np.array([[1 + (seed + 4 * i) % 10] for i in range(count)], dtype=kind)
        scipy.io.savemat(tmp_path / f"{name}_32x32.mat", {"X": x, "y": y}, do_compression=compressed)
    check_svhn(svhn.read(tmp_path, TEN))


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_agrees_with_scipys_reader(tmp_path: Path, compressed: bool) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}_32x32.mat").write_bytes(w.svhn_mat(12, 5, compressed))
    oracle = scipy.io.loadmat(tmp_path / "train_32x32.mat")
    train = svhn.read(tmp_path, TEN).train
    np.testing.assert_array_equal(train.images, np.moveaxis(oracle["X"], 3, 0).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(train.labels, oracle["y"][:, 0] % 10)


def mat(*elements: bytes) -> bytes:
    return w.MATLAB_HEADER + b"".join(elements)


X1 = w.mat_matrix(b"X", (32, 32, 3, 1), bytes(3072))
Y1 = w.mat_matrix(b"y", (1, 1), b"\x01", matlab_class=6)


def y_of(*numbers: float) -> bytes:
    content = struct.pack(f"<{len(numbers)}d", *numbers)
    return w.mat_matrix(b"y", (len(numbers), 1), content, kind=9, matlab_class=6)


BROKEN_MATS = {
    "not a little-endian MATLAB 5 file": b"",
    "not a little-endian MATLAB 5 file.": w.MATLAB_HEADER[:124] + b"\x01\x00MI" + X1 + Y1,
    "not a little-endian MATLAB 5 file. ": w.MATLAB_HEADER[:124] + b"\x00\x02IM" + X1 + Y1,
    "holds nothing, expected X and y": mat(),
    "holds 'X', expected X and y": mat(X1),
    r"holds 'X', 'y\\x1b\[', expected X and y": mat(X1, w.mat_matrix(b"y\x1b[", (1, 1), b"\x01")),
    "holds 'X' twice": mat(X1, X1, Y1),
    r"X has shape \(32, 3, 32, 1\) of uint8, expected": mat(w.mat_matrix(b"X", (32, 3, 32, 1), bytes(3072)), Y1),
    r"X has shape \(32, 32, 3\) of uint8, expected": mat(w.mat_matrix(b"X", (32, 32, 3), bytes(3072)), Y1),
    r"of int8, expected": mat(w.mat_matrix(b"X", (32, 32, 3, 1), bytes(3072), kind=1, matlab_class=8), Y1),
    "2 labels for 1 images": mat(X1, y_of(1, 2)),
    "y must hold the whole numbers 1 to 10": mat(X1, y_of(0)),
    "y must hold the whole numbers 1 to 10,": mat(X1, y_of(11)),
    "y must hold the whole numbers 1 to 10, 10": mat(X1, y_of(1.5)),
    "y must hold the whole numbers 1 to 10, 10 standing": mat(X1, y_of(float("nan"))),
    "y must hold the whole numbers 1 to 10, 10 standing for": mat(X1, y_of(float("inf"))),
    "y must hold the whole numbers 1 to 10, 10 standing for the": mat(X1, y_of(1e300)),
    "an element's tag is damaged": mat(struct.pack("<HH4s", 1, 5, b"")),
    "an element promises 4,294,967,295 bytes and 3,128 follow": mat(struct.pack("<II", 14, 2**32 - 1) + X1[8:]),
    "an element has type 5, expected 14, a matrix": mat(w.mat_element(5, b"")),
    "an element has type 15, expected 14": mat(w.mat_compressed(w.mat_compressed(X1))),
    "an element has type 0, expected 14": mat(w.mat_compressed(b"")),
    "damaged compression": mat(w.mat_element(15, b"nothing")),
    "a compressed element is cut short": mat(w.mat_element(15, w.mat_compressed(X1)[8:-6])),
    "holds more than 16 elements": mat(*[w.mat_matrix(b"a%02d" % i, (1, 1), b"\x01") for i in range(17)]),
    "does not have the 4 parts flags, shape, name and numbers": mat(w.mat_element(14, b"")),
    "does not have the 4 parts": mat(w.mat_element(14, X1[8:] + w.mat_element(2, b""))),
    "a kind of matrix that no SVHN file has": mat(w.mat_matrix(b"X", (1, 1), bytes(8), kind=12)),
    "a kind of matrix that no SVHN file has.": mat(w.mat_matrix(b"X", (1, 1), b"\x01", flags=8)),
    "a kind of matrix that no SVHN file has. ": mat(w.mat_matrix(b"X", (1, 1), b"\x01", matlab_class=4)),
    "a kind of matrix that no SVHN file has. G": mat(w.mat_matrix(b"X" * 64, (1, 1), b"\x01")),
    "a kind of matrix that no SVHN file has. Ge": mat(w.mat_matrix(b"X", (1,), b"\x01")),
    "a kind of matrix that no SVHN file has. Get": mat(w.mat_matrix(b"X", (1,) * 5, b"\x01")),
    "a matrix of 32 x 32 x 3 x 2 uint8 needs 6,144 bytes, and 3,072 are": mat(
        w.mat_matrix(b"X", (32, 32, 3, 2), bytes(3072))
    ),
    "a matrix of 0 x 2147483647 uint8 needs 0 bytes, and 0 are": mat(w.mat_matrix(b"X", (0, 2**31 - 1), b"")),
    "a matrix of -1 x -8 uint8 needs 8 bytes": mat(w.mat_matrix(b"X", (-1, -8), bytes(8))),
}


@pytest.mark.parametrize("message", BROKEN_MATS)
def test_svhn_broken_files(tmp_path: Path, message: str) -> None:
    w.write_files(tmp_path, {"train_32x32.mat": w.svhn_mat(), "test_32x32.mat": BROKEN_MATS[message]})
    with pytest.raises(DataError, match=f"test_32x32.mat: .*{message}"):
        svhn.read(tmp_path, TEN)


def test_svhn_missing(tmp_path: Path) -> None:
    w.write_files(tmp_path, {"train_32x32.mat": w.svhn_mat()})
    with pytest.raises(DataError, match=r": test_32x32.mat missing. Give the folder that holds train_32x32.mat and"):
        svhn.read(tmp_path, TEN)


# --------------------------------------------------------------------------------------------- NORB


def slowly_shrunk(image: Any) -> Any:
    small = np.zeros((32, 32), dtype=np.uint8)
    for row in range(32):
        for column in range(32):
            square = [int(image[3 * row + i, 3 * column + j]) for i in range(3) for j in range(3)]
            small[row, column] = round(sum(square) / 9)
    return small


@pytest.mark.parametrize("zipped", [True, False])
def test_norb(tmp_path: Path, zipped: bool) -> None:
    files = w.norb_files()
    w.write_files(tmp_path, files, zipped)
    arrays = norb.read(tmp_path, FIVE)
    for seed, split in enumerate((arrays.train, arrays.test)):
        big = w.random_images(2, 2, 96, 96, seed=seed)
        for pair in range(2):
            for camera in range(2):
                np.testing.assert_array_equal(split.images[pair, camera], slowly_shrunk(big[pair, camera]))
        assert split.images.shape == (2, 2, 32, 32)
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64
        assert split.labels.tolist() == [seed, seed + 2]
    ending = ".gz" if zipped else ""
    assert norb.find(tmp_path) == {name: tmp_path / f"{name}{ending}" for name in files}


def test_norb_shrinks_more_than_a_thousand_pairs_and_rounds_to_nearest() -> None:
    pairs = np.zeros((1002, 2, 96, 96), dtype=np.uint8)
    pairs[0, 0, 0, :3] = (1, 1, 2)  # 4 / 9
    pairs[1001, 1, 93:, 93:] = 255
    pairs[1001, 1, 0, :3] = (1, 2, 2)  # 5 / 9
    small = norb.shrink(pairs)
    assert small[0].sum() == 0
    assert small[1001, 1, 0, 0] == 1
    assert small[1001, 1, 31, 31] == 255
    assert int(small.sum()) == 256


def norb_header(magic: int, *numbers: int) -> bytes:
    return struct.pack(f"<I{len(numbers)}i", magic, *numbers)


CAT, INFO, DAT = (f"{w.NORB_STEMS[1]}-{part}.mat" for part in ("cat", "info", "dat"))
BROKEN_NORB = {
    f"{CAT}: 7 bytes are not a NORB matrix": {CAT: bytes(7)},
    f"{DAT}: magic number 0x1e3d4c56 with 4 axes, expected 0x1e3d4c55 or": {
        DAT: norb_header(0x1E3D4C56, 4, 1, 1, 1, 1)
    },
    f"{DAT}: magic number 0x1e3d4c55 with 5 axes": {DAT: norb_header(0x1E3D4C55, 5, 1, 1, 1, 1, 1)},
    f"{DAT}: magic number 0x1e3d4c55 with -1 axes": {DAT: norb_header(0x1E3D4C55, -1, 1, 1, 1, 1, 1)},
    f"{DAT}: its header is cut short": {DAT: norb_header(0x1E3D4C55, 4, 1, 1, 1)},
    f"{CAT}: its header is cut short": {CAT: norb_header(0x1E3D4C54, 1, 1, 1)},
    f"{CAT}: its header promises 2 x 4 = 8 bytes, and 4 follow": {CAT: norb_header(0x1E3D4C54, 1, 2, 1, 1, 0)},
    f"{DAT}: its header promises 0 x 2147483647": {DAT: norb_header(0x1E3D4C55, 4, 0, *[2**31 - 1] * 3)},
    f"{DAT}: its header promises -1 x -1 x 1 x 1 = 1 bytes": {DAT: norb_header(0x1E3D4C55, 4, -1, -1, 1, 1) + b"0"},
    rf"{INFO}: has shape \(2, 3\) for {CAT} of shape \(2,\), expected": {
        INFO: w.norb_matrix(np.zeros((2, 3), np.int32))
    },
    rf"{INFO}: has shape \(3, 4\) for {CAT} of shape \(2,\), expected": {
        INFO: w.norb_matrix(np.zeros((3, 4), np.int32))
    },
    rf"{INFO}: has shape \(2, 4\) for {CAT} of shape \(2, 1\)": {CAT: w.norb_matrix(np.zeros((2, 1), np.int32))},
    rf"{DAT}: has shape \(2, 1, 96, 96\) of uint8, expected": {DAT: w.norb_matrix(w.random_images(2, 1, 96, 96))},
    rf"{DAT}: has shape \(1, 2, 96, 96\) of int32, expected": {DAT: w.norb_matrix(np.zeros((1, 2, 96, 96), np.int32))},
    "the test split has 2 labels for images of shape": {DAT: w.norb_matrix(w.random_images(1, 2, 96, 96))},
    "test labels run from -3 to 1, expected 0 to 4": {CAT: w.norb_matrix(np.array([-3, 1], np.int32))},
}


@pytest.mark.parametrize("message", BROKEN_NORB)
def test_norb_broken_files(tmp_path: Path, message: str) -> None:
    w.write_files(tmp_path, {**w.norb_files(), **BROKEN_NORB[message]})
    with pytest.raises(DataError, match=message):
        norb.read(tmp_path, FIVE)


def test_norb_missing(tmp_path: Path) -> None:
    files = w.norb_files()
    del files[INFO]
    w.write_files(tmp_path, files)
    with pytest.raises(DataError, match=f"{INFO} missing, plain or .gz. All 6 files are needed"):
        norb.read(tmp_path, FIVE)


# ---------------------------------------------------------------------------------------------- idx


@pytest.mark.parametrize("zipped", [True, False])
def test_idx(tmp_path: Path, zipped: bool) -> None:
    w.write_files(tmp_path, w.idx_files(), zipped)
    arrays = idx.read(tmp_path, TEN)
    for seed, split in enumerate((arrays.train, arrays.test)):
        assert split.images.shape == (2, 1, 32, 32)
        assert split.images.dtype == np.uint8
        np.testing.assert_array_equal(split.images[:, 0, 2:30, 2:30], w.random_images(2, 28, 28, seed=seed))
        assert split.images.sum() == w.random_images(2, 28, 28, seed=seed).sum()
        assert split.labels.tolist() == [seed, seed + 1]
        assert split.labels.dtype == np.int64
    ending = ".gz" if zipped else ""
    assert idx.find(tmp_path) == {name: tmp_path / f"{name}{ending}" for name in w.IDX_NAMES}


IMAGES, LABELS = w.IDX_NAMES[2:]
BROKEN_IDX = {
    f"{IMAGES}: begins with nothing, expected 00000803": {IMAGES: b""},
    f"{IMAGES}: begins with 00000801, expected 00000803": {IMAGES: w.idx_files()[LABELS].ljust(99)},
    f"{LABELS}: begins with 00000803, expected 00000801": {LABELS: w.idx_files()[IMAGES]},
    f"{LABELS}: begins with 0000080[1]": {LABELS: b"\0\0\x08\x01\0\0\0"},
    f"{IMAGES}: its header promises 2 x 28 x 28 = 1,568 bytes, and 1,567 follow": {IMAGES: w.idx_files()[IMAGES][:-1]},
    f"{LABELS}: its header promises 2 = 2 bytes, and 3 follow": {LABELS: w.idx_files()[LABELS] + b"\0"},
    f"{IMAGES}: its header promises 0 x 4294967295": {IMAGES: struct.pack(">IIII", 0x803, 0, 2**32 - 1, 2**32 - 1)},
    "images of 28 x 32, expected 28 x 28": {IMAGES: w.idx(w.random_images(2, 28, 32))},
    "the test split has 2 labels for images of shape": {IMAGES: w.idx(w.random_images(3, 28, 28))},
    "test labels run from 0 to 10, expected 0 to 9": {LABELS: w.idx(np.array([10, 0], np.uint8))},
}


@pytest.mark.parametrize("message", BROKEN_IDX)
def test_idx_broken_files(tmp_path: Path, message: str) -> None:
    w.write_files(tmp_path, {**w.idx_files(), **BROKEN_IDX[message]})
    with pytest.raises(DataError, match=message):
        idx.read(tmp_path, TEN)


def test_idx_damaged_compression(tmp_path: Path) -> None:
    packed = gzip.compress(w.idx_files()[LABELS], mtime=0)
    for bad in (packed[:-1], packed[:12], packed[:-8] + bytes(8), packed[:10] + b"\xff" * 9, packed + b"more"):
        w.write_files(tmp_path, {**w.idx_files(), LABELS: bad})
        with pytest.raises(DataError, match=rf"{LABELS}: damaged or cut short .*Get the file again"):
            idx.read(tmp_path, TEN)


def test_idx_missing(tmp_path: Path) -> None:
    w.write_files(tmp_path, {LABELS: b""})
    with pytest.raises(DataError, match=f"{IMAGES} missing, plain or .gz. All 4 files are needed"):
        idx.read(tmp_path, TEN)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="a: is a folder, expected a file"):
        idx.read_idx(tmp_path / "a", 1)
    with pytest.raises(DataError, match="b: there is no such file"):
        idx.read_idx(tmp_path / "b", 1)


# ------------------------------------------------------------------------------------------- folder


def test_folder_with_two_splits(tmp_path: Path) -> None:
    one, two, three = (w.random_images(32, 32, 3, seed=seed) for seed in range(3))
    files = {
        "train/cat/1.png": w.png(one),
        "train/dog/2.PNG": w.png(two),
        "test/dog/3.webp": b"",
        "test/dog/4.txt": b"?",
    }
    files["test/dog/3.webp"] = w.encoded(three, "WEBP", lossless=True)
    w.write_files(tmp_path, files)
    calls: list[tuple[int, int]] = []
    arrays = folder.read(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert arrays.classes == ("cat", "dog")
    assert arrays.train.labels.tolist() == [0, 1]
    assert arrays.test.labels.tolist() == [1]
    np.testing.assert_array_equal(arrays.train.images, np.stack([one, two]).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(arrays.test.images, three[None].transpose(0, 3, 1, 2))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_folder_split_by_a_seed(tmp_path: Path) -> None:
    files = {f"{name}/{i}.png": w.png(np.full((32, 32, 3), i, np.uint8)) for name in "ab" for i in range(40)}
    w.write_files(tmp_path, files)
    first, again, other = (folder.read(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert len(first.train) + len(first.test) == 80
    assert 5 <= len(first.test) <= 30
    np.testing.assert_array_equal(first.test.images, again.test.images)
    assert not np.array_equal(first.test.images[:, 0, 0, 0], other.test.images[:, 0, 0, 0])
    more = {
        (int(image[0, 0, 0]), int(label)) for image, label in zip(first.test.images, first.test.labels, strict=True)
    }
    w.write_files(tmp_path, {"a/50.png": w.png(np.full((32, 32, 3), 50, np.uint8))})
    later = folder.read(tmp_path).test
    assert more <= {(int(image[0, 0, 0]), int(label)) for image, label in zip(later.images, later.labels, strict=True)}


@pytest.fixture
def decoded(tmp_path: Path) -> Any:
    def read(data: bytes, name: str = "1.png") -> Any:
        other = w.png(np.zeros((32, 32, 3), np.uint8))
        w.write_files(tmp_path, {f"train/a/{name}": data, "train/b/2.png": other, "test/a/3.png": other})
        return folder.read(tmp_path).train.images[0]

    return read


def test_folder_shrinks_by_averaging(decoded: Any) -> None:
    big = w.random_images(64, 96, 3)
    mean = big.reshape(32, 2, 32, 3, 3).mean(axis=(1, 3)).transpose(2, 0, 1)
    assert np.abs(decoded(w.png(big)) - mean).max() <= 1


@pytest.mark.parametrize("side", [1, 31, 33])
def test_folder_resizes_any_size(decoded: Any, side: int) -> None:
    assert (decoded(w.png(np.full((side, 2 * side, 3), 77, np.uint8))) == 77).all()


def test_folder_reads_jpeg(decoded: Any) -> None:
    grey = np.full((40, 40, 3), 100, np.uint8)
    assert np.abs(decoded(w.encoded(grey, "JPEG"), "1.jpeg").astype(int) - 100).max() <= 2


def test_folder_reads_grey_and_sixteen_bits(decoded: Any) -> None:
    grey = w.random_images(32, 32)
    np.testing.assert_array_equal(decoded(w.encoded(grey, "PNG")), [grey] * 3)
    deep = grey.astype(np.uint16) * 256 + 200
    np.testing.assert_array_equal(decoded(w.encoded(deep, "PNG")), [grey] * 3)


def test_folder_reads_a_palette_with_transparency_without_a_warning(decoded: Any, tmp_path: Path) -> None:
    image = Image.new("P", (32, 32), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "p.png", transparency=bytes([0, 128]))
    assert decoded((tmp_path / "p.png").read_bytes())[:, 5, 5].tolist() == [10, 20, 30]


def test_folder_broken_images(decoded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = w.png(w.random_images(32, 32, 3))
    for bad in (
        b"",
        good[:200],
        b"nothing",
        w.encoded(w.random_images(9, 9, 3), "GIF"),
        w.png(w.random_images(1, 1, 3), (0, 0)),
    ):
        with pytest.raises(DataError, match=r"1.png: cannot be read as an image .*Remove or repair it"):
            decoded(bad)
    monkeypatch.setattr(folder, "PIXEL_LIMIT", 1000)
    with pytest.raises(DataError, match=r"1.png: claims 32 x 32 pixels, more than 1,000. Shrink it first"):
        decoded(good)
    monkeypatch.setattr(folder, "FILE_LIMIT", 1000)
    with pytest.raises(DataError, match=r"1.png: has more than 1,000 bytes. Shrink it first"):
        decoded(good)


def test_folder_broken_layouts(tmp_path: Path) -> None:
    image = w.png(w.random_images(2, 2, 3))
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        folder.read(tmp_path / "nowhere")
    w.write_files(tmp_path / "one", {"train/a/1.png": image})
    with pytest.raises(DataError, match="has no folder 'test' beside the other split"):
        folder.read(tmp_path / "one")
    w.write_files(tmp_path / "two", {"a/1.png": image, "b/1.txt": b"", ".hidden/1.png": image})
    with pytest.raises(DataError, match=r"expected a folder per class with .jpeg, .jpg, .png, .webp files, found 1"):
        folder.read(tmp_path / "two")
    w.write_files(tmp_path / "three", {"train/a/1.png": image, "train/b/1.png": image, "test/c/1.txt": b""})
    with pytest.raises(DataError, match=r"there is no test image. Add images, or put them in"):
        folder.read(tmp_path / "three")
    w.write_files(tmp_path / "four", {"a/1.png": image, "b/1.png": image})
    with pytest.raises(DataError, match="there is no training image"):
        folder.read(tmp_path / "four", test_share=1.0)
    files = {"train/a/1.png": image, "test/a/1.png": image, "test/b/1.png": image, "test/c/1.png": image}
    w.write_files(tmp_path / "five", files)
    with pytest.raises(DataError, match=r"the classes b, c have no training image, so no network can learn them\. Add"):
        folder.read(tmp_path / "five")


def test_folder_with_names_that_are_no_text(tmp_path: Path) -> None:
    image = w.png(w.random_images(2, 2, 3))
    w.write_files(tmp_path, {"a/1.png": image, "b/1.png": image})
    try:
        (tmp_path / "a" / os.fsdecode(b"\xff.png")).write_bytes(image)
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(DataError, match="no test image"):
        folder.read(tmp_path, test_share=0.0)
    assert folder.fingerprint(tmp_path)
    w.write_files(tmp_path, {os.fsdecode(b"\xfe/1.png"): image})
    with pytest.raises(DataError, match=r"the folder '\\udcfe' has a name that cannot be printed. Rename it"):
        folder.read(tmp_path)


def test_fingerprint_changes_with_the_images_only(tmp_path: Path) -> None:
    w.write_files(tmp_path, {"a/1.png": b"1", "a/note.txt": b""})
    (tmp_path / "a" / "gone.png").symlink_to("nowhere")
    before = folder.fingerprint(tmp_path)
    w.write_files(tmp_path, {"a/note.txt": b"longer"})
    assert folder.fingerprint(tmp_path) == before
    w.write_files(tmp_path, {"a/1.png": b"22"})
    assert folder.fingerprint(tmp_path) != before


# ------------------------------------------------------------------------------------------- arrays


def test_arrays_that_do_not_belong_together() -> None:
    good = Split(np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64))
    assert check_arrays(Arrays(good, good, ("a",)), "here")
    flat = Split(np.zeros((1, 4), np.uint8), good.labels)
    with pytest.raises(DataError, match=r"here: the training split has 1 labels for images of shape \(1, 4\)"):
        check_arrays(Arrays(flat, good, ("a",)), "here")
    empty = Split(good.images[:0], good.labels[:0])
    with pytest.raises(DataError, match=r"here: the test split is empty. Get the files again"):
        check_arrays(Arrays(good, empty, ("a",)), "here")
