"""The readers on hostile files: nothing runs, nothing is written, and no lie about a size costs memory."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import data_writers as w
import numpy as np
import pytest

from dropconnectpp.lab.data.dataset import DataError
from dropconnectpp.lab.data.formats import cifar, folder, idx, norb, svhn
from dropconnectpp.lab.data.safe_reading import read_file

TEN = tuple("abcdefghij")
MEGABYTE = 2**20


@contextmanager
def little_memory(limit: int = 8 * MEGABYTE) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def refused(read: Callable[[], Any], match: str, limit: int = 8 * MEGABYTE) -> None:
    with little_memory(limit), pytest.raises(DataError, match=match):
        read()


def read_archive(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return cifar.read(path, cifar.CIFAR10, TEN)


def read_pickle(tmp_path: Path, data: bytes) -> Any:
    w.write_files(tmp_path, {**w.cifar10_files(count=1), "data_batch_1": data})
    return cifar.read(tmp_path, cifar.CIFAR10, TEN)


# ------------------------------------------------------------------------------------------ pickles


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps({"data": Malice(marker), "labels": [1]}, protocol)
    pickle.loads(data)["data"].close()
    assert marker.exists(), "the attack works on Python's own unpickler"
    marker.unlink()
    with pytest.raises(DataError, match=r"data_batch_1: .*malicious"):
        read_pickle(tmp_path / "set", data)
    path = tmp_path / "archive"
    with pytest.raises(DataError, match=r"test_batch: .*malicious"):
        read_archive(path, w.cifar_archive({**w.cifar10_files(count=1), "test_batch": data}))
    assert not marker.exists()


@pytest.mark.parametrize(
    "instructions",
    [
        b"cos\nsystem\n(U\x02lstR.",
        b"cbuiltins\neval\n(U\x011tR.",
        b"(S'ls'\nios\nsystem\n.",
        b"(cos\nsystem\nU\x02lso.",
        b"\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
        b"cnumpy.core.multiarray\n__builtins__\n.",
        b"cnumpy\nload\n.",
        b"\x8c\x05numpy\x8c\x0ddtype.__class__\x93.",
        b"cnumpy\ndtype\n)\x81.",  # NEWOBJ
        b"\x82\x01.",  # EXT1
        b"Pid\n.",
        b"NQ.",
        b"\x97.",  # NEXT_BUFFER
        b"}\x98.",  # READONLY_BUFFER
        b"cnumpy\ndtype\n}b.",  # the state of a function
        b"}}U\x09__class__K\x01sb.",
        b"cnumpy\nndarray\n)R}U\x08to_numpyK\x01sb.",
        b"cnumpy\ndtype\n)R.",
        b"cnumpy\ndtype\nN\x85RN\x86R.",
        b"(cnumpy\nndarray\n)Rl.",
        b"\x8f(K\x01\x90.",  # a set
        b"I" + b"9" * 5000 + b"\n.",
        b"L" + b"9" * 5000 + b"L\n.",
        b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096 + b".",  # LONG4
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8e" + struct.pack("<Q", 2**62) + b".",  # BINBYTES8
        b"\x96" + struct.pack("<Q", 2**63) + b".",  # BYTEARRAY8
        b"T\xff\xff\xff\x7f.",
        b"T\xff\xff\xff\xff.",
        b"\x95" + struct.pack("<Q", 2**62) + b".",  # FRAME
        b"Nr\xff\xff\xff\xff.",
        b"j\xff\xff\xff\xff.",
        b"q\x00.",
        b".",
        b"0.",
        b"c\xff\xff\n\xff\n.",
        b"cnumpy",
        b"V\\ud800\n.",
        b"S'\\d'\n.",
    ],
)
def test_odd_instructions_are_refused(tmp_path: Path, instructions: bytes) -> None:
    refused(lambda: read_pickle(tmp_path, instructions), "data_batch_1: ")


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_of_an_enormous_claim(tmp_path: Path, protocol: int) -> None:
    for side in (2**31 - 1, -1, 0, 2**200, 10**600):
        pickled = pickle.dumps(side, 4)[2:-1]
        state = b"(K\x01(" + pickled + b"M\x00\x0ctcnumpy\ndtype\nU\x02u1\x85R\x89U\x01xtb"
        data = b"}U\x06labels]sU\x04datacnumpy.core.multiarray\n_reconstruct\n)R" + state + b"s."
        if protocol == 5:
            content = b"U\x01xcnumpy\ndtype\nU\x02u1\x85R" + pickled + b"M\x00\x0c\x86U\x01C"
            data = b"}U\x06labels]sU\x04datacnumpy.core.numeric\n_frombuffer\n(" + content + b"tRs."
        refused(lambda data=data: read_pickle(tmp_path, data), "data_batch_1: ")  # type: ignore[misc]


def test_deep_and_doubling_pickles(tmp_path: Path) -> None:
    deep = b"N" + b"\x85" * 30_000
    doubling = b")" + b"q\x00h\x00\x86" * 60
    for value in (deep, doubling):
        refused(lambda value=value: read_pickle(tmp_path, b"}" + value + b"Ns."), "no short string")  # type: ignore[misc]
        refused(lambda value=value: read_pickle(tmp_path, value + b"."), "holds a tuple")  # type: ignore[misc]
        data = b"}U\x06labels" + value + b"s."
        refused(lambda data=data: read_pickle(tmp_path, data), "has no 'data'", 16 * MEGABYTE)  # type: ignore[misc]
    lists = b"]" * 30_000 + b"a" * 29_999
    refused(lambda: read_pickle(tmp_path, lists + b"."), "holds a list", 16 * MEGABYTE)
    itself = b"}q\x00U\x04datah\x00sU\x06labels]q\x01h\x01as."
    refused(lambda: read_pickle(tmp_path, itself), "has no 'data'")


def test_a_pickle_cannot_multiply_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"X" + struct.pack("<I", MEGABYTE) + b"a" * MEGABYTE + b"q\x00"
    encode = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 1000
    refused(lambda: read_pickle(tmp_path, text + encode + b"."), "holds a str", 16 * MEGABYTE)
    key = b"B" + struct.pack("<I", MEGABYTE) + b"a" * MEGABYTE + b"q\x00"
    refused(lambda: read_pickle(tmp_path, key + b"}h\x00Ns" * 1000 + b"."), "no short string", 16 * MEGABYTE)
    arguments = b"(" + b"N" * 20_000 + b"tq\x00"
    calls = b"cnumpy\nndarray\nh\x00R" * 20_000
    refused(lambda: read_pickle(tmp_path, arguments + calls + b"."), "has a call that no CIFAR file has")
    monkeypatch.setattr(cifar, "INSTRUCTION_LIMIT", 10_000)
    for flood in (b"]", b"}", b"(", b"N\x94", b"Nq\x00", b")"):
        data = flood * (4 * MEGABYTE // len(flood))
        refused(lambda data=data: read_pickle(tmp_path, data), "10,000 instructions", 24 * MEGABYTE)  # type: ignore[misc]


# --------------------------------------------------------------------------------------------- tar


def test_an_archive_writes_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    files = w.cifar10_files(count=1)
    names = [b"../data_batch_1", b"/data_batch_2", b"a/../../data_batch_3", str(tmp_path / "x/data_batch_4").encode()]
    names += [b"./data_batch_5", b"..\\..\\evil", b"test_batch"]
    members = [w.tar_member(n, files.get(n.rpartition(b"/")[2].decode(), b"evil")) for n in names]
    before = sorted(tmp_path.rglob("*"))
    here = os.getcwd()
    os.chdir(inside)
    try:
        arrays = read_archive(inside / "archive", w.tar_of(members))
    finally:
        os.chdir(here)
    assert len(arrays.train) == 5
    assert sorted(tmp_path.rglob("*")) == sorted([*before, inside / "archive"])


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_links_and_devices_are_passed_over(tmp_path: Path, kind: bytes) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(w.cifar10_files(count=1)["test_batch"])
    members = [w.tar_member(name.encode(), data) for name, data in w.cifar10_files(count=1).items()]
    link = w.tar_member(b"test_batch", kind=kind, link=str(secret).encode()[:99], size=4096)
    arrays = read_archive(tmp_path / "a", w.tar_of([link, *members]))
    assert len(arrays.test) == 1
    with pytest.raises(DataError, match="test_batch missing"):
        read_archive(tmp_path / "a", w.tar_of([link, *members[:-1]]))


def test_extended_headers_of_tar_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    members = [w.tar_member(name.encode(), data) for name, data in w.cifar10_files(count=1).items()]
    chain = [w.tar_member(b"././@LongLink", b"x", b"L")] * 3000  # tarfile calls itself for each
    assert len(read_archive(path, w.tar_of([*chain, *members])).train) == 5
    sparse = b"30 GNU.sparse.map=not,numbers\n22 GNU.sparse.major=1\n"
    assert len(read_archive(path, w.tar_of([w.tar_member(b"x", sparse, b"x"), *members])).train) == 5
    for kind in (b"x", b"g", b"L", b"K", b"S", b"0", b"?"):
        lie = w.tar_member(b"x", kind=kind, size=300_000_000)
        refused(lambda lie=lie: read_archive(path, gzip.compress(lie)), "is cut short")  # type: ignore[misc]
        large = w.tar_member(b"x", kind=kind, size=8**11 - 1)
        refused(lambda large=large: read_archive(path, large), "unpacks to more than 400,000,000")  # type: ignore[misc]


@pytest.mark.parametrize(
    "size",
    [
        *(b"-0000000001\0", b"+0000000001\0", b"0o000000001\0", b"1_000000001\0", b"00000000009\0"),
        *(b"\x80" + bytes(11), b"\xff" * 12, b" " * 12, bytes(12), b"\xb2" * 12),
    ],
)
def test_sizes_of_tar_that_are_no_numbers(tmp_path: Path, size: bytes) -> None:
    header = bytearray(w.tar_member(b"test_batch"))
    header[124:136] = size
    refused(lambda: read_archive(tmp_path / "a", w.with_checksum(header)), "unpacks to more than")


def test_an_archive_that_lies_about_a_batch(tmp_path: Path) -> None:
    lie = w.tar_member(b"test_batch", b"short", size=190_000_000)
    refused(lambda: read_archive(tmp_path / "a", gzip.compress(lie)), "a file in it is cut short: 189,999,488 bytes")
    lie = w.tar_member(b"test_batch", b"short", size=210_000_000)
    refused(
        lambda: read_archive(tmp_path / "a", lie), "test_batch claims 210,000,000 bytes, expected at most 200,000,000"
    )


def test_an_archive_that_ends_in_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "TOTAL_LIMIT", 20 * MEGABYTE)
    bomb = w.tar_of([bytes(30 * MEGABYTE)])
    assert len(bomb) < 50_000
    refused(lambda: read_archive(tmp_path / "a", bomb), "unpacks to more than 20,971,520 bytes")
    bomb = w.tar_of([w.tar_member(b"other", bytes(30 * MEGABYTE))])
    refused(lambda: read_archive(tmp_path / "a", bomb), "unpacks to more than 20,971,520 bytes")


def test_the_oracle_for_our_archives() -> None:
    with tarfile.open(fileobj=io.BytesIO(w.tar_of([w.tar_member(b"a/b", b"content")]))) as archive:
        member = archive.extractfile("a/b")
        assert member is not None
        assert member.read() == b"content"


# -------------------------------------------------------------------------------------- gzip, files


def test_a_gzip_bomb_is_refused_at_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(bytes(64 * MEGABYTE)))
    assert path.stat().st_size < 80_000
    refused(lambda: read_file(path, MEGABYTE), "bomb: holds more than 1,048,576 bytes")


@pytest.mark.parametrize("name", w.IDX_NAMES)
def test_a_gzip_bomb_in_place_of_an_idx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(idx, "FILE_LIMIT", MEGABYTE)
    w.write_files(tmp_path, {**w.idx_files(), name: bytes(32 * MEGABYTE)}, zipped=True)
    refused(lambda: idx.read(tmp_path, TEN), f"{name}.gz: holds more than 1,048,576 bytes")


def test_many_tiny_images_are_not_padded_to_many_large_ones(tmp_path: Path) -> None:
    many = struct.pack(">IIII", 0x803, 2 * MEGABYTE, 1, 1) + bytes(2 * MEGABYTE)
    w.write_files(tmp_path, {**w.idx_files(), w.IDX_NAMES[0]: many}, zipped=True)
    refused(lambda: idx.read(tmp_path, TEN), "images of 1 x 1, expected 28 x 28", 12 * MEGABYTE)


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: there is no such file"):
        read_file(tmp_path / "pipe", 1)
    with pytest.raises(DataError, match="pipe: there is no such file"):
        cifar.read(tmp_path / "pipe", cifar.CIFAR10, TEN)


# --------------------------------------------------------------------------------------- lying sizes


@pytest.mark.parametrize("sides", [(2**32 - 1,) * 3, (2**31, 28, 28), (0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 28)])
def test_idx_headers_that_lie(tmp_path: Path, sides: tuple[int, int, int]) -> None:
    w.write_files(tmp_path, {**w.idx_files(), w.IDX_NAMES[0]: struct.pack(">IIII", 0x803, *sides)})
    refused(lambda: idx.read(tmp_path, TEN), "its header promises")
    w.write_files(tmp_path, {**w.idx_files(), w.IDX_NAMES[1]: struct.pack(">II", 0x801, sides[0])})
    refused(lambda: idx.read(tmp_path, TEN), "its header promises")


@pytest.mark.parametrize("magic", [0x1E3D4C55, 0x1E3D4C54])
@pytest.mark.parametrize("sides", [(2**31 - 1,) * 4, (0, *(2**31 - 1,) * 3), (-(2**31),) * 4, (24300, 2, 96, 96)])
@pytest.mark.parametrize("part", ["dat", "cat", "info"])
def test_norb_headers_that_lie(tmp_path: Path, part: str, sides: tuple[int, ...], magic: int) -> None:
    lie = struct.pack("<Ii4i", magic, 4, *sides)
    w.write_files(tmp_path, {**w.norb_files(), f"{w.NORB_STEMS[0]}-{part}.mat": lie})
    refused(lambda: norb.read(tmp_path, TEN), f"{part}.mat: its header promises")


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("sides", [(32, 32, 3, 73257), (2**31 - 1,) * 4, (0, *(2**31 - 1,) * 3), (-1, -1, 1, 8)])
def test_svhn_headers_that_lie(tmp_path: Path, sides: tuple[int, ...], compressed: bool) -> None:
    element = w.mat_matrix(b"X", sides, bytes(8))
    lie = w.MATLAB_HEADER + (w.mat_compressed(element) if compressed else element)
    w.write_files(tmp_path, {"train_32x32.mat": lie, "test_32x32.mat": w.svhn_mat()})
    refused(lambda: svhn.read(tmp_path, TEN), "train_32x32.mat: a matrix of ")


# --------------------------------------------------------------------------------------------- SVHN


def read_mat(tmp_path: Path, *elements: bytes) -> Any:
    data = w.MATLAB_HEADER + b"".join(elements)
    w.write_files(tmp_path, {"train_32x32.mat": data, "test_32x32.mat": w.svhn_mat()})
    return svhn.read(tmp_path, TEN)


def test_a_zlib_bomb_in_a_mat_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svhn, "FILE_LIMIT", MEGABYTE)
    bomb = w.mat_compressed(bytes(64 * MEGABYTE))
    assert len(bomb) < 80_000
    refused(lambda: read_mat(tmp_path, bomb), "unpacks to more than 1,048,576 bytes")


def test_many_zlib_bombs_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svhn, "FILE_LIMIT", MEGABYTE)
    bombs = [w.mat_compressed(w.mat_matrix(b"a%d" % i, (400_000, 1), bytes(400_000))) for i in range(9)]
    refused(lambda: read_mat(tmp_path, *bombs), "unpacks to more than 1,048,576 bytes", 4 * MEGABYTE)


def test_compression_within_compression(tmp_path: Path) -> None:
    nested = w.mat_element(2, b"")
    for _ in range(2000):
        nested = w.mat_element(2, b"") + struct.pack("<II", 15, len(packed := zlib.compress(nested))) + packed
    refused(lambda: read_mat(tmp_path, w.mat_compressed(nested)), "an element has type 2")
    refused(lambda: read_mat(tmp_path, w.mat_compressed(w.mat_compressed(nested))), "an element has type 15")


def test_floods_of_small_elements(tmp_path: Path) -> None:
    flood = w.mat_element(2, b"") * 250_000
    refused(lambda: read_mat(tmp_path, w.mat_compressed(w.mat_element(14, flood))), "4 parts", 12 * MEGABYTE)
    matrices = w.mat_matrix(b"a", (1, 1), b"1") + w.mat_matrix(b"b", (1, 1), b"1") * 20_000
    refused(lambda: read_mat(tmp_path, matrices), "twice", 12 * MEGABYTE)


def test_a_shape_of_very_many_axes(tmp_path: Path) -> None:
    sides = [2**31 - 1] * 300_000
    refused(lambda: read_mat(tmp_path, w.mat_matrix(b"X", sides, b"1")), "a kind of matrix", 12 * MEGABYTE)


def test_a_name_of_a_megabyte(tmp_path: Path) -> None:
    refused(lambda: read_mat(tmp_path, w.mat_matrix(b"X" * MEGABYTE, (1, 1), b"1")), "a kind of matrix", 12 * MEGABYTE)


# ------------------------------------------------------------------------------------------- folder


def read_image(tmp_path: Path, data: bytes, name: str = "1.png") -> Any:
    other = w.png(np.zeros((2, 2, 3), np.uint8))
    w.write_files(tmp_path, {f"train/a/{name}": data, "train/b/2.png": other, "test/a/3.png": other})
    return folder.read(tmp_path)


@pytest.mark.parametrize(
    "claim", [(10_000, 5_001), (9_500, 9_500), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (1, 2**31 - 1)]
)
def test_a_png_that_claims_an_enormous_size(tmp_path: Path, claim: tuple[int, int], recwarn: Any) -> None:
    data = w.png(w.random_images(1, 1, 3), claim)
    read_image(tmp_path, w.png(w.random_images(1, 1, 3)))  # so that importing Pillow is not counted
    refused(lambda: read_image(tmp_path, data), "1.png: (claims|cannot be read as an image)")
    assert not recwarn.list


@pytest.mark.parametrize("claim", [(50_000_000, 1), (1, 50_000_000), (20_001, 10)])
def test_a_png_of_an_enormous_side_is_refused(tmp_path: Path, claim: tuple[int, int]) -> None:
    data = w.png(w.random_images(1, 1, 3), claim)
    read_image(tmp_path, w.png(w.random_images(1, 1, 3)))
    refused(lambda: read_image(tmp_path, data), rf"1.png: claims {claim[0]} x {claim[1]} pixels, and neither side may")


def test_a_webp_that_claims_an_enormous_size(tmp_path: Path) -> None:
    from PIL import Image

    Image.init()
    canvas = struct.pack("<I", 2**24 - 1)[:3] * 2
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas
    data = b"RIFF" + struct.pack("<I", len(body)) + body
    refused(lambda: read_image(tmp_path, data, "1.webp"), "1.webp: cannot be read as an image")


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_png_with_a_bomb_for_text(tmp_path: Path, kind: bytes) -> None:
    good = w.png(w.random_images(1, 1, 3))
    packed = zlib.compress(bytes(64 * MEGABYTE))
    content = b"a\0\x01\0\0\0" + packed if kind == b"iTXt" else b"a\0\0" + packed
    data = good[:33] + w.png_chunk(kind, content) + good[33:]
    read_image(tmp_path, good)
    with little_memory(16 * MEGABYTE):
        try:
            assert read_image(tmp_path, data).train.images.shape == (2, 3, 32, 32)
        except DataError as error:
            assert "1.png: cannot be read as an image" in str(error)  # noqa: PT017


def test_a_png_with_a_bomb_for_pixels(tmp_path: Path) -> None:
    rows = zlib.compress(bytes(64 * MEGABYTE))
    head = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + w.png_chunk(b"IHDR", head) + w.png_chunk(b"IDAT", rows) + w.png_chunk(b"IEND", b"")
    with little_memory():
        assert read_image(tmp_path, data).train.images[0].sum() == 0


def test_an_image_in_another_format_is_not_opened(tmp_path: Path) -> None:
    for kind in ("GIF", "TIFF", "BMP", "PPM"):
        with pytest.raises(DataError, match="cannot be read as an image"):
            read_image(tmp_path, w.encoded(w.random_images(9, 9, 3), kind))
