"""Random numbers that know where they belong: what a replica draws depends on nothing but its own address.

Every number of the laboratory is a function of (root seed, purpose, replica, step, draw, element),
computed by the counter-based generator Philox4x32-10 of Salmon et al. (2011). There is no state: a
replica trained among fifty draws what it draws alone, on any device, whatever ran before, and a
resumed run goes on where the first one would have.

The address becomes Philox's input like this; it is part of every stored result's meaning, so it
never changes:

| input   | bits | holds                                                                       |
| ------- | ---- | --------------------------------------------------------------------------- |
| key     | 64   | first 8 bytes, little-endian, of a sha256 over root seed and purpose        |
| c0      | 32   | element // 4; the element's word is output element % 4                      |
| c1      | 32   | draw: the Monte Carlo sample, or the part, where one step needs several     |
| c2      | 32   | step: the minibatch, or the epoch                                           |
| c3      | 32   | replica                                                                     |

A Triton kernel draws the same words with ``tl.philox(stream.seed, element // 4, draw, step, replica)``.

Words, uniforms, masks and permutations are equal bit for bit on every device; normals use log and
cosine, which may differ between devices in the last place. Shapes: R replicas, N elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, check_count

WORD = 0xFFFFFFFF
"""The largest 32-bit word; also the mask that keeps the low half of a product."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# On a CPU the rounds run over tiles that stay in the cache: (8, 262208) words take 16 ms on one thread,
# 30 ms in one piece. torch splits an operation among threads from 32768 elements each.
TILE_PER_THREAD = 65536


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four output words for four counter words, all of them uint32 held in int64.

    The counter words broadcast against each other. The first rounds, where most of them are one
    number per row, cost next to nothing.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words wraps around in int64 and keeps all its 64 bits. Its low half stays
        # in place, unmasked: it is only xored, next round, into a word that is masked then.
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product2 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(WORD)
        c2 = ((product0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(WORD)
        c1, c3 = product2, product0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


@dataclass(frozen=True)
class Stream:
    """The random numbers for one purpose, such as "order" or "start:conv1", under one root seed.

    Every method takes ``replicas``, an int64 tensor (R,) of replica numbers on the device where the
    numbers are wanted; ``step`` and ``draw``, whole numbers below 2^32, or 0-d int64 tensors on that
    device, so that a CUDA graph can count them up itself; and a ``count`` of elements per replica. The first
    elements of a longer draw are those of a shorter one. Nothing waits for a GPU, so the range of
    what lies on one is not checked: it is taken modulo 2^32.

    >>> order = Stream(root_seed=1, purpose="order")
    >>> order.permutation(torch.tensor([0, 7]), step=0, count=5)
    tensor([[1, 3, 2, 4, 0],
            [0, 3, 1, 4, 2]])
    >>> order.permutation(torch.tensor([7]), step=0, count=5)
    tensor([[0, 3, 1, 4, 2]])
    """

    root_seed: int
    purpose: str
    seed: int = field(init=False, repr=False, compare=False)
    """The 64-bit Philox key as one number, the form that ``tl.philox`` takes."""

    def __post_init__(self) -> None:
        check_count("root_seed", self.root_seed, minimum=0)
        if not isinstance(self.purpose, str) or not self.purpose:
            raise ArgumentError(f"purpose must be a name such as 'order' or 'start:conv1', got {self.purpose!r}.")
        # Decimal digits hold no NUL, so no two pairs of seed and purpose are encoded alike.
        name = f"dropconnectpp stream\0{int(self.root_seed)}\0{self.purpose}"
        object.__setattr__(self, "seed", int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))

    @property
    def key(self) -> tuple[int, int]:
        """The Philox key as two words."""
        return self.seed & WORD, self.seed >> 32

    def words(self, replicas: Tensor, step: int | Tensor, count: int, draw: int | Tensor = 0) -> Tensor:
        """Whole numbers in [0, 2^32), int64 (R, count).

        >>> Stream(1, "dropout").words(torch.tensor([3]), step=10, count=2)
        tensor([[3065710957, 3957934335]])
        """
        return self._draw(replicas, step, count, draw, lambda words, first: words)

    def uniform(
        self,
        replicas: Tensor,
        step: int | Tensor,
        count: int,
        draw: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Numbers in [0, 1), (R, count): multiples of 2^-24 in float32, of 2^-32 in float64.

        Both come from one word, float32 from its top 24 bits, so the float32 number is the float64 one
        rounded down. Either is a whole number times a power of two: exact, and equal on every device.

        >>> Stream(1, "dropout").uniform(torch.tensor([3]), step=10, count=2)
        tensor([[0.7138, 0.9215]])
        """
        if dtype not in (torch.float32, torch.float64):
            raise ArgumentError(
                f"dtype must be torch.float32 or torch.float64, got {dtype}. For a half precision draw float32 "
                "and cast: a half holds too few values in [0, 1) to compare with a probability."
            )
        return self._draw(replicas, step, count, draw, lambda words, first: _to_unit_interval(words, dtype))

    def bernoulli(
        self, keep_probability: Tensor, replicas: Tensor, step: int | Tensor, draw: int | Tensor = 0
    ) -> Tensor:
        """On/off variables, True with ``keep_probability`` (R, ...): a boolean tensor of its shape, Eq. (13).

        ``uniform < keep_probability``, where an element's number is its place in the flattened trailing
        axes. float64 probabilities meet float64 uniforms, all others float32 ones: the two masks differ
        only where a probability and a uniform agree in the leading 24 bits.

        >>> Stream(1, "mask:weight").bernoulli(torch.full((1, 2, 3), 0.5), torch.tensor([3]), step=10)
        tensor([[[ True, False,  True],
                 [ True, False, False]]])
        """
        if keep_probability.shape[:1] != replicas.shape or keep_probability.device != replicas.device:
            raise ArgumentError(
                f"keep_probability must be (R, ...) on the device of the {len(replicas)} replicas, {replicas.device}; "
                f"got {tuple(keep_probability.shape)} on {keep_probability.device}."
            )
        pi = keep_probability.flatten(1) if keep_probability.ndim > 1 else keep_probability[:, None]
        dtype = torch.float64 if pi.dtype == torch.float64 else torch.float32

        def keep(words: Tensor, first: int) -> Tensor:
            return _to_unit_interval(words, dtype) < pi[:, first : first + words.shape[1]]

        return self._draw(replicas, step, pi.shape[1], draw, keep).view(keep_probability.shape)

    def normal(
        self,
        replicas: Tensor,
        step: int | Tensor,
        count: int,
        draw: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normal numbers, (R, count): Box and Muller's in float64, then cast.

        Words 2k and 2k + 1 give elements 2k and 2k + 1, none further from zero than 6.8. log and
        cosine may differ between devices in the last place.

        >>> Stream(1, "start:conv1").normal(torch.tensor([3]), step=0, count=3)
        tensor([[-0.5248,  1.1825, -0.5535]])
        """
        _check_range("count", count, WORD + 1)
        drawn = self._draw(replicas, step, count + count % 2, draw, lambda words, first: _to_normal(words).to(dtype))
        return drawn[:, :count].contiguous()

    def permutation(self, replicas: Tensor, step: int | Tensor, count: int, draw: int | Tensor = 0) -> Tensor:
        """An order of ``count`` things for each replica, int64 (R, count); ``step`` is usually the epoch.

        The elements sorted by 63-bit keys made of two words each; the sort is stable, so that even
        equal keys are settled alike on every device.
        """
        _check_range("count", count, WORD // 2)
        high, low = _pairs(self.words(replicas, step, 2 * count, draw))
        return torch.argsort((high << 31) | (low >> 1), dim=1, stable=True)

    def _draw(
        self,
        replicas: Tensor,
        step: int | Tensor,
        count: int,
        draw: int | Tensor,
        convert: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        """``convert(words, first element)`` over tiles of (R, some elements), put together: (R, count)."""
        _check_replicas(replicas)
        _check_range("count", count, WORD + 1)
        c1 = _counter_word("draw", draw, replicas.device)
        c2 = _counter_word("step", step, replicas.device)
        c3 = replicas[:, None] & WORD
        width = _tile_width(replicas, count)
        tiles = []
        for first in range(0, max(count, 1), width):
            last = min(first + width, count)
            block = torch.arange(first // 4, (last + 3) // 4, device=replicas.device)
            # Without the mask torch.compile takes the first product for an index and computes it in 32 bits.
            c0 = block[None, :] & WORD
            words = torch.stack(philox((c0, c1, c2, c3), self.key), -1).flatten(1)
            tiles.append(convert(words[:, : last - first], first))
        return tiles[0].contiguous() if len(tiles) == 1 else torch.cat(tiles, 1)


def _to_unit_interval(words: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        return words.double().mul_(2.0**-32)
    return (words >> 8).float().mul_(2.0**-24)


def _to_normal(words: Tensor) -> Tensor:
    radius_word, angle_word = _pairs(words)
    # Half a step up: log never meets zero.
    radius = radius_word.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = angle_word.double().mul_(2.0**-32 * 2.0 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(1)


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Words 2k and words 2k + 1."""
    return words[:, 0::2], words[:, 1::2]


def _tile_width(replicas: Tensor, count: int) -> int:
    """How many elements of each replica to compute at a time; a multiple of 4, of no effect on the numbers."""
    # Elsewhere than on a CPU one launch over everything is best, and so it is for a compiler, which fuses.
    if torch.compiler.is_compiling() or replicas.device.type != "cpu":
        return max(count, 1)
    blocks = TILE_PER_THREAD * torch.get_num_threads() // max(len(replicas), 1)
    return 4 * max(blocks, 1)


def _check_replicas(replicas: Tensor) -> None:
    if replicas.ndim != 1 or replicas.dtype != torch.int64:
        raise ArgumentError(
            f"replicas must be an int64 tensor of shape (R,), got {replicas.dtype} of shape {tuple(replicas.shape)}. "
            "For replicas 0 to R - 1 use torch.arange(R)."
        )
    if replicas.device.type == "cpu" and len(replicas) and not torch.compiler.is_compiling():
        _check_range("replicas", int(replicas.min()), WORD)
        _check_range("replicas", int(replicas.max()), WORD)


def _check_range(name: str, value: int, largest: int) -> None:
    # Under torch.compile a number may be a symbol: nothing to look at yet.
    if not torch.compiler.is_compiling() and check_count(name, value, minimum=0) > largest:
        raise ArgumentError(
            f"{name} must be at most {largest}, what the generator's 32-bit counters hold; got {value}."
        )


def _counter_word(name: str, value: int | Tensor, device: torch.device) -> Tensor:
    """``value`` as a 0-d tensor on ``device``; a tensor is taken as it is, without asking what it holds."""
    if not isinstance(value, Tensor):
        _check_range(name, value, WORD)
        return torch.full((), value, dtype=torch.int64, device=device)
    if value.ndim != 0 or value.dtype != torch.int64 or value.device != device:
        raise ArgumentError(
            f"{name} as a tensor must be 0-d, int64 and on the replicas' device {device}; got {value.dtype} of shape "
            f"{tuple(value.shape)} on {value.device}. A plain int does for anything but a CUDA graph."
        )
    return value & WORD
