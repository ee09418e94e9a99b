"""How the dense layer's kernels are launched on a card: tiles, warps, stages, registers.

The defaults were chosen on an H200. `dcpp tune` measures others and keeps them in a file for the card and for Triton's
version. A process reads it once, and it holds as long as the kernels are the same. Nothing is measured in a training,
and nothing here depends on R: sums have one order in every stack.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.config.json_values import canonical
from dropconnectpp.lab.kernels.support import has_triton
from dropconnectpp.lab.machine.cache_dir import cache_directory
from dropconnectpp.lab.machine.whole_files import write_whole

VARIABLE = "DCPP_LAUNCHES"
"""An environment variable that names another file, or is "off" for the defaults."""
OPTIONS = ("num_warps", "num_stages", "maxnreg")
LIMITS = {
    "block": (16, 65536),
    "block_b": (16, 256),
    "block_o": (16, 256),
    "block_i": (16, 256),
    "split": (16, 65536),
    "num_warps": (1, 32),
    "num_stages": (1, 8),
    "maxnreg": (16, 255),
}
"""The least and the most; all but the last two are powers of two."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launch of every kernel has."""

    num_warps: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "maxnreg" and value is None:
                continue
            (least, most), power = LIMITS[name], name not in ("num_stages", "maxnreg")
            if type(value) is not int or not least <= value <= most or (power and value.bit_count() > 1):
                kind = "a power of two" if power else "a whole number"
                raise ArgumentError(f"{name} must be {kind} from {least} to {most}, got {value!r}.")

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told."""
        return {name: value for name, value in vars(self).items() if name in OPTIONS and value is not None}


@dataclass(frozen=True, kw_only=True)
class Walk(Launch):
    """The launch of a kernel that takes a block of gates at a time."""

    block: int


@dataclass(frozen=True, kw_only=True)
class Product(Launch):
    """The launch of a kernel with products: its largest tiles; None leaves the number of registers to Triton."""

    block_b: int
    block_o: int
    block_i: int
    num_stages: int
    maxnreg: int | None


@dataclass(frozen=True, kw_only=True)
class Forward(Product):
    """The launch of a forward pass, of which one program adds up ``split`` inputs."""

    split: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split < self.block_i:
            raise ArgumentError(f"split must be at least block_i, {self.block_i}, got {self.split}.")


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Every launch of the dense layer; `layer` and `local` say what is "many" and what is "crowded"."""

    forward: Forward = Forward(block_b=128, block_o=64, block_i=64, num_warps=8, num_stages=2, maxnreg=128, split=512)
    forward_many: Forward = Forward(
        block_b=128, block_o=64, block_i=32, num_warps=4, num_stages=3, maxnreg=None, split=512
    )
    backward: Product = Product(block_b=128, block_o=64, block_i=64, num_warps=8, num_stages=1, maxnreg=128)
    backward_crowded: Product = Product(block_b=128, block_o=64, block_i=32, num_warps=8, num_stages=1, maxnreg=128)
    gates: Walk = Walk(block=1024, num_warps=4)
    gates_learned: Walk = Walk(block=512, num_warps=4)
    local_forward: Forward = Forward(
        block_b=128, block_o=64, block_i=32, num_warps=8, num_stages=3, maxnreg=128, split=512
    )
    local_backward: Product = Product(block_b=128, block_o=64, block_i=32, num_warps=8, num_stages=1, maxnreg=128)
    local_crowded: Product = Product(block_b=128, block_o=64, block_i=16, num_warps=8, num_stages=1, maxnreg=128)


DEFAULTS = Launches()
_imposed: ContextVar[Launches | None] = ContextVar("imposed", default=None)


def of(device: torch.device) -> Launches:
    """The launches in force on a device: those of `using`, else those of its file, else the defaults."""
    if (imposed := _imposed.get()) is not None:
        return imposed
    if device.type != "cuda":
        return DEFAULTS
    return _of_card(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def using(launches: Launches) -> Iterator[None]:
    """Within the context, and on this thread, these launches are in force on every device."""
    token = _imposed.set(launches)
    try:
        yield
    finally:
        _imposed.reset(token)


def evidence(device: torch.device) -> dict[str, str]:
    """What a result made on the device must say of its launches: nothing where they are the defaults."""
    found = of(device)
    return {} if found == DEFAULTS else {"launches": f"tuned, {_digest(canonical(asdict(found)))}"}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------- the file


def card(device: torch.device) -> dict[str, str]:
    """What a file is made for."""
    import triton

    return {"card": torch.cuda.get_device_name(device), "triton": triton.__version__, "kernels": kernels()}


@cache
def kernels() -> str:
    """A digest of the kernels that are tuned: once they change, other launches may be the fastest."""
    return _digest("".join(inspect.getsource(module) for module in sources()))


def sources() -> tuple[ModuleType, ...]:
    """The modules of the kernels that are tuned, with those that Triton compiles into them."""
    from dropconnectpp.lab.kernels import gates_triton, layer_triton, local_triton
    from dropconnectpp.ops import gpu_triton

    return layer_triton, local_triton, gates_triton, gpu_triton


def file_of(device: torch.device) -> Path | None:
    """Where a card's launches are kept, whether or not the file exists; None where `DCPP_LAUNCHES` is "off".

    Raises RuntimeError where it would be in the home of a user who has none.
    """
    if named := os.environ.get(VARIABLE):
        return None if named == "off" else Path(named).expanduser()
    name = re.sub(r"[^\w.]+", "-", "{card} triton {triton}".format_map(card(device)))
    return cache_directory() / "launches" / f"{name}.json"


def write(path: Path, launches: Launches, made_for: dict[str, str]) -> None:
    """Keep launches; a reader meanwhile finds the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({**made_for, "launches": asdict(launches)}, indent=1) + "\n").encode())


def try_to_write(path: Path) -> None:
    """Raise now what `write` would raise, and leave the file as it is."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _part_of(path) as part:
        part.touch()


@contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """A file beside the one that it is to become, in a folder that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def is_ours(path: Path) -> bool:
    """Whether `dcpp tune` may replace or remove the file: `DCPP_LAUNCHES` may name any file of the user's."""
    if not os.environ.get(VARIABLE):
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "launches" in found


def read(path: Path, made_for: dict[str, str]) -> Launches:
    """What `write` kept for this card; for anything else an ArgumentError says what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"it is not JSON ({error}).") from error
    if not isinstance(found, dict) or found.keys() != {*made_for, "launches"}:
        raise ArgumentError("it is no file of launches.")
    for name, here in made_for.items():
        if found[name] != here:
            kind = "other kernels than these" if name == "kernels" else f"{name} {found[name]!r}, and here is {here!r}"
            raise ArgumentError(f"it was made for {kind}.")
    launches: Launches = _like(DEFAULTS, found["launches"], "launches")
    return launches


def _like(example: Any, values: Any, where: str) -> Any:
    """A dataclass like the example, with other values."""
    names = vars(example)
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise ArgumentError(f"{where} must have {', '.join(names)}, and nothing else.")
    nested = {name: _like(value, values[name], name) for name, value in names.items() if is_dataclass(value)}
    return replace(example, **values | nested)


@cache
def _of_card(index: int) -> Launches:
    device, named = torch.device("cuda", index), os.environ.get(VARIABLE)
    try:
        path = file_of(device) if has_triton() else None
    except RuntimeError as error:  # a user without a home has no file in it
        if named:
            _warn(f"{VARIABLE}={named}", str(error), f"Name another file with {VARIABLE}.")
        path = None
    if path is None:
        return DEFAULTS
    try:
        return read(path, card(device))
    except (OSError, ArgumentError) as error:
        if named or not isinstance(error, FileNotFoundError):
            ours = "`dcpp tune` writes it anew, and `dcpp tune --forget` removes it."
            _warn(str(path), str(error), ours if is_ours(path) else f"Name another file with {VARIABLE}.")
        return DEFAULTS


def _warn(what: str, error: str, next_step: str) -> None:
    text = f"{what}: cannot be used, so kernels are launched as by default: {error.rstrip('.')}. {next_step}"
    warnings.warn(text, stacklevel=3)
