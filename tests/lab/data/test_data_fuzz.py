"""Mutated and random files for every reader: a valid result or `DataError` may come out, nothing else.

`DCPP_FUZZ_EXAMPLES=100` tries a hundred times as many, at random. Files that once found a bug are kept in
`corpus/`, named by reader and bug, and replayed.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import data_writers as w
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropconnectpp.lab.data.dataset import Arrays, DataError
from dropconnectpp.lab.data.formats import cifar, folder, idx, norb, svhn

CORPUS = Path(__file__).with_name("corpus")
TIMES = int(os.environ.get("DCPP_FUZZ_EXAMPLES", "1"))
TEN, FIVE = tuple("abcdefghij"), tuple("abcde")

budget = settings(
    max_examples=200 * TIMES,
    derandomize=TIMES == 1,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Case:
    """A reader, the files around the one that is mutated, and well-formed contents of that one."""

    read: Callable[[Path], Arrays]
    around: dict[str, bytes]
    target: str
    seeds: list[bytes]
    seal: Callable[[bytes], bytes] = bytes
    """Makes checksums and compression right again, so that mutations get past them."""

    def check(self, place: Path, data: bytes) -> bool:
        """Read the mutated file; whether it was accepted."""
        if not place.exists():
            w.write_files(place, self.around)
        w.write_files(place, {self.target: data})
        try:
            arrays = self.read(place)
        except DataError as error:
            message = str(error)
        else:
            message = ""
        if message:
            assert len(message) < 2000
            message.encode()  # it can be printed
            return False
        for split in (arrays.train, arrays.test):
            assert split.images.dtype == np.uint8
            assert split.labels.dtype == np.int64
            assert split.images.ndim == 4
            assert split.images.shape[2:] == (32, 32)
            assert len(split.images) == len(split.labels) > 0
            assert 0 <= split.labels.min() <= split.labels.max() < len(arrays.classes)
        return True


def sealed_tar(data: bytes) -> bytes:
    """Right checksums for the headers where they are in the seed."""
    blocks = [bytearray(data[start : start + 512]) for start in range(0, len(data), 512)]
    return b"".join(w.with_checksum(b) if b[257:262] == b"ustar" and len(b) == 512 else bytes(b) for b in blocks)


def sealed_png(data: bytes) -> bytes:
    """Right checksums for as many chunks as there are."""
    out, position = bytearray(data[:8]), 8
    while position + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, position)
        body = data[position + 4 : position + 8 + size]
        out += data[position : position + 4] + body + struct.pack(">I", zlib.crc32(body))
        position += 12 + size
    return bytes(out + data[position:])


def sealed_mat(data: bytes) -> bytes:
    """The mutated element, compressed, beside a whole one of the other kind."""
    whole = X if b"y" in data[:64] else Y
    return w.MATLAB_HEADER + w.mat_compressed(data) + w.mat_compressed(whole)


def read_cifar10(place: Path) -> Arrays:
    return cifar.read(place, cifar.CIFAR10, TEN)


def read_archive(place: Path) -> Arrays:
    return cifar.read(place / "archive", cifar.CIFAR10, TEN)


def read_svhn(place: Path) -> Arrays:
    return svhn.read(place, TEN)


PYTHON, BINARY = w.cifar10_files(count=1), w.cifar10_files("binary", count=1)
MODERN = b"\x80\x04}(\x8c\x06labels]K\x01a\x8c\x04data\x8c\x13numpy._core.numeric\x8c\x0b_frombuffer\x93"
MODERN += (
    b"(B\x00\x0c\x00\x00"
    + bytes(3072)
    + b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x85RK\x01M\x00\x0c\x86\x8c\x01CtRu."
)
TAR = w.cifar_archive(PYTHON, zipped=False)
SMALL_TAR = b"".join(w.tar_member(name.encode(), data) for name, data in BINARY.items()) + bytes(512)
X = w.mat_matrix(b"X", (32, 32, 3, 1), bytes(3072))
Y = w.mat_matrix(b"y", (1, 1), struct.pack("<d", 1.0), kind=9, matlab_class=6)
MATS = {"train_32x32.mat": w.svhn_mat(1), "test_32x32.mat": w.svhn_mat(1)}
NORB, IDX = w.norb_files(1), w.idx_files(1)
IMAGE = w.random_images(5, 7, 3)
PNG = w.png(IMAGE)
AROUND = {"train/b/1.png": PNG, "test/a/1.png": PNG}

CASES = {
    "cifar_pickle": Case(read_cifar10, PYTHON, "data_batch_1", [PYTHON["data_batch_1"], MODERN]),
    "cifar_binary": Case(read_cifar10, BINARY, "data_batch_1.bin", [BINARY["data_batch_1.bin"]]),
    "cifar_archive": Case(read_archive, {}, "archive", [TAR, gzip.compress(TAR, mtime=0), SMALL_TAR]),
    "cifar_tar": Case(read_archive, {}, "archive", [TAR, SMALL_TAR], sealed_tar),
    "svhn": Case(read_svhn, MATS, "train_32x32.mat", [w.svhn_mat(1), w.MATLAB_HEADER + X + Y]),
    "svhn_inside": Case(read_svhn, MATS, "train_32x32.mat", [X, Y], sealed_mat),
    **{
        f"norb_{part}": Case(lambda p: norb.read(p, FIVE), NORB, name, [NORB[name]])
        for part in ("dat", "cat", "info")
        for name in [f"{w.NORB_STEMS[0]}-{part}.mat"]
    },
    "idx_images": Case(lambda p: idx.read(p, TEN), IDX, w.IDX_NAMES[0], [IDX[w.IDX_NAMES[0]]]),
    "idx_labels": Case(lambda p: idx.read(p, TEN), IDX, w.IDX_NAMES[1], [IDX[w.IDX_NAMES[1]]]),
    "idx_gzip": Case(lambda p: idx.read(p, TEN), IDX, w.IDX_NAMES[1], [gzip.compress(IDX[w.IDX_NAMES[1]], mtime=0)]),
    "folder_png": Case(folder.read, AROUND, "train/a/1.png", [PNG, w.encoded(IMAGE[..., 0], "PNG")], sealed_png),
    "folder_jpeg": Case(folder.read, AROUND, "train/a/1.jpg", [w.encoded(IMAGE, "JPEG")]),
    "folder_webp": Case(
        folder.read, AROUND, "train/a/1.webp", [w.encoded(IMAGE, "WEBP"), w.encoded(IMAGE, "WEBP", lossless=True)]
    ),
}

NUMBERS = [0, 1, 2, 3, 4, 8, 14, 15, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
DOUBLES = [0.0, -1.0, 1.5, 1e300, float("inf"), float("nan")]
PACKED = [
    *(struct.pack(form, n) for n in NUMBERS for form in ("<I", ">I")),
    *(struct.pack(form, n) for n in NUMBERS if n < 2**16 for form in ("<H", ">H")),
    *(struct.pack("<d", n) for n in DOUBLES),
]


@st.composite
def mutated(draw: st.DrawFn, case: Case) -> bytes:
    """A seed after a few changes, most of them near its beginning or its end, where the headers are."""
    data = bytearray(draw(st.sampled_from(case.seeds)))

    def place() -> int:
        where = draw(st.sampled_from(["start", "start", "end", "any"]))
        if where == "any":
            return draw(st.integers(0, len(data)))
        near = min(draw(st.integers(0, 300)), len(data))
        return near if where == "start" else len(data) - near

    for _ in range(draw(st.integers(1, 4))):
        at = place()
        match draw(st.sampled_from(["flip", "flip", "number", "words", "cut", "insert", "remove", "splice"])):
            case "flip":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "number":
                new = draw(st.sampled_from(PACKED))
                data[at : at + len(new)] = new
            case "words":  # a few numbers of a header, and perhaps nothing after them
                order = draw(st.sampled_from("<>"))
                words = draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4))
                at = 4 * draw(st.integers(0, 20))
                data[at : at + 4 * len(words)] = struct.pack(f"{order}{len(words)}I", *words)
                if draw(st.booleans()):
                    del data[at + 4 * len(words) :]
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(max_size=20))
            case "remove":
                del data[at : at + draw(st.integers(1, 600))]
            case "splice":
                start = place()
                data[at:at] = data[start : start + draw(st.integers(1, 600))]
    return case.seal(bytes(data))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", CASES)
def test_seeds_are_accepted(places: Path, name: str) -> None:
    for seed in CASES[name].seeds:
        assert CASES[name].check(places / name, CASES[name].seal(seed))


@pytest.mark.parametrize("name", CASES)
def test_mutations(places: Path, name: str) -> None:
    case = CASES[name]

    @budget
    @given(mutated(case))
    def run(data: bytes) -> None:
        case.check(places / name, data)

    run()


@pytest.mark.parametrize("name", CASES)
def test_random_bytes(places: Path, name: str) -> None:
    case = CASES[name]
    starts = st.sampled_from([b"", b"\x1f\x8b\x08\0", *(seed[:size] for seed in case.seeds for size in (4, 16, 130))])

    @settings(budget, max_examples=40 * TIMES)
    @given(starts, st.binary(max_size=300))
    def run(start: bytes, rest: bytes) -> None:
        case.check(places / name, start + rest)
        case.check(places / name, case.seal(start + rest))

    run()


ATOMS = [
    b"N",
    b"\x88",
    b"\x89",
    b"K\x01",
    b"K\x00",
    b"M\x00\x0c",
    b"J\xff\xff\xff\xff",
    b"\x8a\x01\xff",
    b"\x8a\xc8" + b"\x7f" * 200,
]
ATOMS += [
    b"U\x04data",
    b"U\x06labels",
    b"C\x04data",
    b"\x8c\x06labels",
    b"U\x02u1",
    b"U\x01C",
    b"X\x03\x00\x00\x00\xe2\x82\xac",
]
ATOMS += [b"T\x00\x0c\x00\x00" + bytes(3072), b"X\x06\x00\x00\x00latin1", b"\x96" + struct.pack("<Q", 3) + b"abc"]
ATOMS += [b"(", b")", b"]", b"}", b"t", b"e", b"u", b"a", b"s", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x93", b"\x94"]
ATOMS += [
    b"q\x00",
    b"q\x01",
    b"h\x00",
    b"h\x01",
    b"r\xff\xff\xff\xff",
    b"j\xff\xff\xff\xff",
    b"0",
    b"2",
    b".",
    b"\x81",
    b"o",
    b"l",
]
ATOMS += [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"]
ATOMS += [b"cnumpy._core.numeric\n_frombuffer\n", b"cos\nsystem\n", b"\x8c\x05numpy\x8c\x05dtype\x93", b"I9\n", b"F1\n"]
ATOMS += [
    b"cnumpy\ndtype\nU\x02u1\x85R",
    b"K\x01M\x00\x0c\x86",
    b"U\x06labels](K\x01es",
    b"U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1\x85R\x89",
    b"tbs",
]


def test_random_pickle_programs(places: Path) -> None:
    @settings(budget, max_examples=600 * TIMES)
    @given(st.lists(st.sampled_from(ATOMS), max_size=25))
    def run(atoms: list[bytes]) -> None:
        for start in (b"", b"\x80\x02}"):
            CASES["cifar_pickle"].check(places / "cifar_pickle", start + b"".join(atoms) + b".")

    run()


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.bin")), ids=lambda file: file.stem)
def test_corpus(places: Path, file: Path) -> None:
    name = file.name.partition("-")[0]
    assert not CASES[name].check(places / name, file.read_bytes()), "every one of these is to be refused"
