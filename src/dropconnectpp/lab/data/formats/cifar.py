"""Read CIFAR-10 and CIFAR-100 from the official python or binary archive, or from an unpacked folder of either.

Shapes: N images of 3 x 32 x 32, as R, G and B planes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.safe_reading import as_bytes, read_file, read_tar

PIXELS = 3 * 32 * 32
FILE_LIMIT = 200_000_000
TOTAL_LIMIT = 400_000_000
INSTRUCTION_LIMIT = 1_000_000
"""Most instructions of one pickle; the largest official one has about 200,000."""


@dataclass(frozen=True)
class Variant:
    """How CIFAR-10 or CIFAR-100 names its files and labels."""

    python_train: tuple[str, ...]
    python_test: str
    binary_train: tuple[str, ...]
    binary_test: str
    label_key: str
    label_bytes: int
    """Label bytes before each image of the binary version; the last is the one that counts."""

    @property
    def sets(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The files of the python version and those of the binary one, the test file last."""
        return (*self.python_train, self.python_test), (*self.binary_train, self.binary_test)

    @property
    def listed(self) -> str:
        """Every file that may hold images, for error messages."""
        return ", ".join(name for names in self.sets for name in names)


CIFAR10 = Variant(
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
    tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test_batch.bin",
    "labels",
    1,
)
CIFAR100 = Variant(("train",), "test", ("train.bin",), "test.bin", "fine_labels", 2)


def find(path: Path, variant: Variant) -> dict[str, Path]:
    """The files that `read` would read, by name: the archive itself, or the python or binary files of a folder."""
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path}: there is no such file or folder.")
        return {path.name: path}
    incomplete = ""
    for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        for names in variant.sets:
            files = {name: folder / name for name in names if (folder / name).is_file()}
            if len(files) == len(names):
                return files
            if files and not incomplete:
                missing = ", ".join(name for name in names if name not in files)
                incomplete = f"{folder}: {missing} missing. Get the whole archive again."
    raise DataError(incomplete or f"{path}: holds none of {variant.listed}. Is it the folder of another data set?")


def read(path: Path, variant: Variant, classes: tuple[str, ...]) -> Arrays:
    """Read an archive or a folder; the names of the files inside tell python from binary."""
    parts: dict[str, Split] = {}
    for name, data in _contents(path, variant):
        if name in parts:
            raise DataError(f"{path}: holds {name} twice. Get the archive again.")
        decode = _decode_binary if name.endswith(".bin") else _decode_python
        parts[name] = decode(data, variant, f"{path}: {name}")
    for names in variant.sets:
        if any(name in parts for name in names):
            if missing := [name for name in names if name not in parts]:
                raise DataError(f"{path}: {', '.join(missing)} missing. Get the whole archive again.")
            *train, test = (parts[name] for name in names)
            images = np.concatenate([part.images for part in train])
            labels = np.concatenate([part.labels for part in train])
            return check_arrays(Arrays(Split(images, labels), test, classes), path)
    raise DataError(f"{path}: holds none of {variant.listed}. Is it the archive of another data set?")


def _contents(path: Path, variant: Variant) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for name, file in find(path, variant).items():
            yield name, read_file(file, FILE_LIMIT)
    else:
        wanted = {name for names in variant.sets for name in names}
        yield from read_tar(path, wanted.__contains__, file_limit=FILE_LIMIT, total_limit=TOTAL_LIMIT)


def _decode_binary(data: bytes, variant: Variant, source: str) -> Split:
    record = variant.label_bytes + PIXELS
    count, rest = divmod(len(data), record)
    if rest or not count:
        raise DataError(f"{source}: {len(data):,} bytes are not a whole number of {record}-byte records. Get it again.")
    rows = as_bytes(data, (count, record), 0, source)
    images = rows[:, variant.label_bytes :].reshape(count, 3, 32, 32)
    return Split(images, rows[:, variant.label_bytes - 1].astype(np.int64))


def _decode_python(data: bytes, variant: Variant, source: str) -> Split:
    batch = _unpickle(data, source)
    pixels = batch.get("data")
    labels = batch.get(variant.label_key)
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise DataError(f"{source}: has no 'data' and {variant.label_key!r}. Is it a file of another data set?")
    if not all(type(label) is int and 0 <= label < 2**31 for label in labels):
        raise DataError(f"{source}: its labels are not whole numbers. Get the file again.")
    array = pixels.to_numpy(source)
    if array.ndim != 2 or array.shape[1] != PIXELS:
        raise DataError(f"{source}: images of shape {array.shape}, expected (N, {PIXELS}). Get the file again.")
    if len(labels) != len(array):
        raise DataError(f"{source}: {len(labels)} labels for {len(array)} images. Get the file again.")
    return Split(array.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64))


# --------------------------------------------------------------------------------- safe unpickling


class _Dtype:
    """Stands in for numpy.dtype: keeps the type code it was given."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def build(self, state: Any) -> None:
        """Ignore byte order and flags: neither matters for bytes."""


class _Array:
    """Stands in for numpy.ndarray: keeps its state and builds nothing until the state has been checked."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Keep version, shape, type, whether the order is Fortran's, and content."""
        self.state = state

    def to_numpy(self, source: str) -> NDArray[np.uint8]:
        """The array, if the state describes as many plain bytes as its shape needs."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise DataError(f"{source}: its array is damaged. Get the file again.")
        _, shape, dtype, fortran, data = self.state
        sides = isinstance(shape, tuple) and len(shape) == 2 and all(type(s) is int and 0 < s < 2**31 for s in shape)
        plain = isinstance(dtype, _Dtype) and isinstance(dtype.code, str) and dtype.code == "u1" and fortran is False
        if not sides or not plain or not isinstance(data, str | bytes | bytearray):
            raise DataError(f"{source}: its array is not plain uint8 of two axes. Get the file again.")
        try:
            content = data.encode("latin-1") if isinstance(data, str) else bytes(data)
        except UnicodeError as error:
            raise DataError(f"{source}: its array is text rather than bytes. Get the file again.") from error
        return as_bytes(content, shape, 0, source)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Stands in for the function by which numpy writes an array with pickle protocol 5."""
    array = _Array()
    array.build((1, shape, dtype, order != "C", data))
    return array


def _as_it_is(text: Any, encoding: Any) -> Any:
    """Stands in for _codecs.encode, by which Python 3 writes bytes with protocol 2; `to_numpy` encodes them later."""
    if encoding != "latin1":
        raise DataError("has bytes in an encoding that no CIFAR file has")
    return text


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _as_it_is,
}


class _Name(NamedTuple):
    """A function that a pickle asked for and that is allowed."""

    module: str
    name: str


def _allowed(module: Any, name: Any) -> _Name:
    """A name from the list of allowed functions; anything else is refused before it can run."""
    if not (isinstance(module, str) and isinstance(name, str) and (module, name) in _ALLOWED):
        asked = f"{module}.{name}"[:80] if isinstance(module, str) and isinstance(name, str) else "something nameless"
        raise DataError(f"asks for {asked!a}, which no CIFAR file contains: it may be malicious and was not run")
    return _Name(module, name)


_CONSTANTS = {
    *("BININT1", "BININT2", "BININT", "LONG1"),
    *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}


def _run(data: bytes) -> Any:
    """Run the few pickle instructions that CIFAR's files use and refuse all others.

    Python's unpicklers can be made to hash, recurse and allocate without bound; this one cannot. Strings from
    Python 2 stay text, with one character for each byte.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def above_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def extend(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise DataError("appends to what is no list")
        stack[-1].extend(items)

    def update(items: list[Any]) -> None:
        if type(stack[-1]) is not dict:
            raise DataError("sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples can crash Python or take forever; decoding long keys could fill the memory.
            if not isinstance(key, str | bytes) or len(key) > 100:
                raise DataError("has a key that is no short string")
            stack[-1][key.decode("latin-1") if isinstance(key, bytes) else key] = value

    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count > INSTRUCTION_LIMIT:
            raise DataError(f"has more than {INSTRUCTION_LIMIT:,} instructions, which no CIFAR file has")
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case name if name in _CONSTANTS:
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(above_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode.name[-1])
                stack[-length:] = [tuple(stack[-length:])]
            case "APPEND":
                extend([stack.pop()])
            case "APPENDS":
                extend(above_mark())
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                update([key, value])
            case "SETITEMS":
                update(above_mark())
            case "GLOBAL":
                stack.append(_allowed(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                asked, module = stack.pop(), stack.pop()
                stack.append(_allowed(module, asked))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if type(function) is not _Name or type(arguments) is not tuple or len(arguments) > 4:
                    raise DataError("has a call that no CIFAR file has: it may be malicious")
                stack.append(_ALLOWED[function](*arguments))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Array | _Dtype):
                    raise DataError("sets the state of what has none: it may be malicious")
                stack[-1].build(state)
            case "STOP":
                return stack.pop()
            case other:
                raise DataError(f"has the instruction {other}, which no CIFAR file has: it may be malicious")
    raise AssertionError("pickletools ends with STOP or an error")


def _unpickle(data: bytes, source: str) -> dict[str, Any]:
    try:
        batch = _run(data)
    except DataError as error:
        raise DataError(f"{source}: {error}. Get the official file.") from None
    except Exception as error:  # a damaged pickle can raise anything
        detail = ascii(f"{type(error).__name__}: {error}"[:120])
        raise DataError(f"{source}: damaged pickle ({detail}). Get the file again.") from error
    if not isinstance(batch, dict):
        raise DataError(f"{source}: holds a {type(batch).__name__}, expected a dictionary. Get the file again.")
    return batch
