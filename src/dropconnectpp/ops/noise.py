"""Random numbers as a function of a seed and a stream: drawn again wherever they are needed, never kept.

A pass through a network has a seed; each gate parameter has a stream in it. The numbers of one (seed, stream) are the
same whenever and by whatever thread they are asked for, on one kind of device: Philox in a kernel on a GPU, a keyed
serial generator on the CPU, which is faster there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.ops import gpu, gpu_examples

CHUNK = 2**19
"""Elements worked on at a time: few enough to stay in the cache, and enough that starting the threads, once
for each operation on a chunk, costs little. Even, since one 64-bit draw serves two of them."""

_RESOLUTION = 2**24
_WORTH_SEEDING = 2**13
"""Fewer elements are drawn by torch's own generator: seeding NumPy's takes longer than they do."""
_WORD = 2**64 - 1


def chunks(count: int) -> Iterator[slice]:
    """Slices that cover ``count`` elements."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def in_chunks(*tensors: Tensor) -> bool:
    """Whether tensors can be worked on a chunk at a time: on the CPU and in one piece."""
    return all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def key_of(seed: int, stream: int) -> int:
    """One 64-bit key for a seed and a stream: neighbours differ in half of their bits (SplitMix64's finaliser)."""
    word = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def generator_of(seed: Tensor, stream: int, device: torch.device) -> torch.Generator:
    """torch's own generator, started for a seed and a stream."""
    return torch.Generator(device).manual_seed(key_of(int(seed), stream))


class CpuNoise:
    """Uniform noise on the CPU, a chunk at a time: multiples of 2^-24 in [0, 1), as `torch.rand` gives.

    SFC64 takes 1.8 ms for two million elements; torch's Mersenne twister is as serial and takes 6.
    """

    def __init__(self, seed: Tensor, stream: int) -> None:
        self.bits = np.random.SFC64(key_of(int(seed), stream))
        self._spare = np.empty(0, np.int32)

    def fill(self, noise: Tensor) -> Tensor:
        """Draw the next ``noise.numel()`` numbers: the same ones whatever the chunks."""
        wanted = noise.numel() - len(self._spare)
        halves = self.bits.random_raw((wanted + 1) // 2).view(np.int32)  # 64 bits serve two elements
        if len(self._spare):
            halves = np.concatenate([self._spare, halves])
        low = torch.from_numpy(halves[: noise.numel()]).bitwise_and_(_RESOLUTION - 1)
        self._spare = halves[noise.numel() :]
        return noise.copy_(low).mul_(1.0 / _RESOLUTION)


class Blocks:
    """The noise of one stream in blocks of examples, one after the other."""

    def __init__(self, seed: Tensor, stream: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.stream, self.dtype, self.device = seed, stream, dtype, device
        self._row = 0
        self._skipped: list[torch.Size] = []
        self._cpu = CpuNoise(seed, stream) if device.type == "cpu" and dtype == torch.float32 else None
        self._kernel = device.type == "cuda" and dtype == torch.float32 and gpu.installed()
        self._generator = None if self._cpu or self._kernel else generator_of(seed, stream, device)

    def skip(self, shape: torch.Size) -> None:
        """Pass over the next block: its noise is not wanted, but that of the blocks after it must stay theirs."""
        self._skipped.append(shape)

    def next(self, shape: torch.Size) -> Tensor:
        """The noise of the next block, (b, *S)."""
        while self._skipped:
            self._draw(self._skipped.pop(0))
        return self._draw(shape)

    def _draw(self, shape: torch.Size) -> Tensor:
        if self._kernel:
            noise = gpu_examples.uniform(shape, self.seed, self.stream, self._row)
            self._row += shape[0]
            return noise
        if self._cpu is None:
            return torch.rand(shape, dtype=self.dtype, device=self.device, generator=self._generator)
        noise = torch.empty(shape)
        flat = noise.view(-1)
        for part in chunks(flat.numel()):
            self._cpu.fill(flat[part])
        return noise


def examples(
    shape: torch.Size, seed: Tensor, stream: int, dtype: torch.dtype, device: torch.device, step: int
) -> Tensor:
    """The noise of a batch of examples, (B, *S), as blocks of ``step`` of them have it."""
    blocks = Blocks(seed, stream, dtype, device)
    count, *rest = shape
    return torch.cat([blocks.next(torch.Size((min(step, count - start), *rest))) for start in range(0, count, step)])


def uniform(shape: torch.Size, seed: Tensor, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform noise in [0, 1), to 24 bits in float32 and 53 in float64."""
    if device.type == "cuda" and dtype == torch.float32 and gpu.installed():
        return gpu.uniform(shape, seed, stream)
    if device.type != "cpu" or dtype != torch.float32 or shape.numel() < _WORTH_SEEDING:
        return torch.rand(shape, dtype=dtype, device=device, generator=generator_of(seed, stream, device))
    noise = torch.empty(shape, device=device)
    flat, source = noise.view(-1), CpuNoise(seed, stream)
    for part in chunks(flat.numel()):
        source.fill(flat[part])
    return noise


def normal(shape: torch.Size, seed: Tensor, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal noise."""
    if device.type == "cuda" and dtype != torch.float64 and gpu.installed():
        return gpu.normal(shape, seed, stream).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator_of(seed, stream, device))


def binary(logit: Tensor, shape: torch.Size, seed: Tensor, stream: int, mirrored: bool = False) -> Tensor:
    """Boolean masks, z ~ Bernoulli(sigmoid(logit)), from the stream's noise or, if mirrored, from one minus it.

    ``logit`` has the masks' shape, or is one number for all.
    """
    if logit.device.type == "cuda" and gpu.supported(logit):
        return gpu.binary(logit, shape, seed, stream, mirrored)
    streamed = logit.dtype == torch.float32 and in_chunks(logit) and (logit.ndim == 0 or logit.shape == shape)
    if mirrored or not streamed or shape.numel() < _WORTH_SEEDING:
        noise = uniform(shape, seed, stream, noise_dtype(logit.dtype), logit.device)
        return (functional.draw_antithetic_mask if mirrored else functional.draw_mask)(logit, noise)
    mask = torch.empty(shape, dtype=torch.bool)
    flat_mask, source = mask.view(-1), CpuNoise(seed, stream)
    noise, pi = torch.empty((2, min(mask.numel(), CHUNK)))
    for part in chunks(mask.numel()):
        u = source.fill(noise[: part.stop - part.start])
        keep = torch.sigmoid(logit.view(-1)[part], out=pi[: u.numel()]) if logit.ndim else torch.sigmoid(logit)
        torch.lt(u, keep, out=flat_mask[part])
    return mask


def noise_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of the noise for a logit's: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32
