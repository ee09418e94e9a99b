"""Damages that do not depend on what a file means: to its bytes, as disks and networks do them, and to JSON in it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECTOR = 512
SILENT = "a silent difference"


@dataclass(frozen=True)
class Found:
    """What came of one damaged file."""

    kind: str
    """How it was damaged."""
    victim: str
    outcome: str


def flipped(content: bytes, rng: random.Random, first: int = 0) -> bytes:
    """One bit is another; half of the time one of the ``first`` bytes."""
    data = bytearray(content)
    data[_place(data, rng, first)] ^= 1 << rng.randrange(8)
    return bytes(data)


def scattered(content: bytes, rng: random.Random, first: int = 0) -> bytes:
    """A few bytes are others."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        data[_place(data, rng, first)] = rng.randrange(256)
    return bytes(data)


def torn(content: bytes, rng: random.Random, first: int = 0) -> bytes:
    """A sector is empty, or is another one, or the end is missing, or there is too much."""
    data = bytearray(content)
    at = rng.randrange(0, len(data), SECTOR)
    kind = rng.randrange(5)
    if kind == 0:
        data[at : at + SECTOR] = bytes(len(data[at : at + SECTOR]))
    elif kind == 1:
        other = rng.randrange(0, len(data), SECTOR)
        data[at : at + SECTOR] = data[other : other + SECTOR]
    elif kind == 2:
        del data[rng.randrange(len(data)) :]
    elif kind == 3:
        data += bytes(rng.randint(1, 4096))
    else:
        del data[at : at + rng.randint(1, SECTOR)]
    return bytes(data)


BYTES: dict[str, Callable[[bytes, random.Random, int], bytes]] = {
    "a flipped bit": flipped,
    "other bytes": scattered,
    "torn": torn,
}


def damaged(kind: str, content: bytes, rng: random.Random, first: int = 0) -> bytes:
    """The content with a damage of `BYTES`, and not as it was."""
    found = content
    while found == content:
        found = BYTES[kind](content, rng, first)
    return found


def _place(data: bytearray, rng: random.Random, first: int) -> int:
    return rng.randrange(first if first and rng.random() < 0.5 else len(data))


NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e308,
    2**31,
    2**47,
    2**63,
    2**64,
    10**40,
    float("nan"),
    float("inf"),
)
TEXTS = (
    *("", "0", "None", "true", "\x1b[31m", "a" * 10_000, "..", "0.0.weight", "weight", "weight_kept", "Transformer"),
    *("Module", "ReLU", "Sequential", "Linear", "Conv2d", "LSTM", "__class__", "same", "dropconnect", "learned"),
    *("bitmap", "gaps", "float32", "bool", "float64", "bbvi", "0.weight", "é\u202e", "\ud800"),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1], {"": 1}, {"name": "bbvi"}, [0, 0], [2**40, 2**40])


def changed_json(found: Any, rng: random.Random) -> Any:
    """One place of JSON is another: its value, its name, its neighbours."""
    changed = copy.deepcopy(found)
    places = [(None, None, changed)]
    for _, _, value in places:  # grows
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        places += [(value, key, one) for key, one in inner]
    owner, key, value = rng.choice(places)
    if owner is None:
        return rng.choice(OTHERS) if rng.random() < 0.2 else changed
    _, _, other = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[rng.choice([*TEXTS, str(key) + "x", str(rng.randrange(9))])] = owner.pop(key)
    elif kind == 2:
        owner[key] = copy.deepcopy(other)
    elif kind == 3 and isinstance(owner, dict):
        owner[rng.choice(TEXTS)] = copy.deepcopy(other)
    elif kind == 4 and isinstance(value, int | float) and not isinstance(value, bool):
        owner[key] = rng.choice([value + 1, value - 1, -value, 2 * value, 1000 * value, float(value), str(value)])
    elif kind == 5 and isinstance(value, list):
        owner[key] = rng.choice([value * 2, value[:-1], value[::-1], [value], value * 40])
    else:
        owner[key] = copy.deepcopy(rng.choice(rng.choice([NUMBERS, TEXTS, OTHERS])))
    return changed
