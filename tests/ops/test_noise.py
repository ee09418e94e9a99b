"""Numbers as a function of seed and stream: the same whenever they are asked for, however they are cut up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.ops import noise
from dropconnectpp.ops.drawn import Draw, Synapses

CPU = torch.device("cpu")
SEED = torch.tensor(2**61 + 12345)
SIZES = [1, 63, 64, 65, 1000, noise._WORTH_SEEDING - 1, noise._WORTH_SEEDING, noise._WORTH_SEEDING + 1]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "CHUNK", 64)


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def uniform(count: int, seed: Tensor = SEED, stream: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise.uniform(torch.Size([count]), seed, stream, dtype, CPU)


def z_score(values: Tensor, mean: float, variance: float) -> float:
    return float((values.double().mean() - mean) / (variance / values.numel()) ** 0.5)


# ------------------------------------------------------------------------------- one seed, one stream


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", SIZES)
def test_a_mask_is_that_of_its_noise(count: int, dtype: torch.dtype, scalar: bool, mirrored: bool) -> None:
    logit = torch.tensor(0.3, dtype=dtype) if scalar else torch.randn(count, dtype=dtype)
    u = uniform(count, dtype=noise.noise_dtype(dtype))
    threshold = functional.draw_antithetic_mask if mirrored else functional.draw_mask
    mask = noise.binary(logit, torch.Size([count]), SEED, 3, mirrored)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, threshold(logit, u))
    assert bool(((u >= 0) & (u < 1)).all())


@pytest.mark.parametrize("count", SIZES)
def test_numbers_do_not_depend_on_the_chunks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logit = torch.randn(count)
    found = []
    for chunk in (2, 64, 998, 2**20):
        monkeypatch.setattr(noise, "CHUNK", chunk)
        found.append((uniform(count), noise.binary(logit, logit.shape, SEED, 3)))
    assert all(torch.equal(u, found[0][0]) and torch.equal(mask, found[0][1]) for u, mask in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", [1, 3, 1000])
def test_numbers_do_not_depend_on_the_blocks(row: int, dtype: torch.dtype) -> None:
    """Blocks of one, of a few and of all examples, some of them passed over."""
    found = []
    for cut in ([7], [1] * 7, [3, 1, 2, 1], [2, 5]):
        blocks = noise.Blocks(SEED, 3, dtype, CPU)
        found.append(torch.cat([blocks.next(torch.Size([size, row])) for size in cut]))
    assert all(torch.equal(one, found[0]) for one in found)
    blocks = noise.Blocks(SEED, 3, dtype, CPU)
    parts = []
    for size, wanted in ((1, False), (2, True), (1, False), (1, False), (2, True)):
        shape = torch.Size([size, row])
        parts.append(blocks.next(shape) if wanted else None)
        if not wanted:
            blocks.skip(shape)
    first, second = (part for part in parts if part is not None)
    assert torch.equal(first, found[0][1:3])
    assert torch.equal(second, found[0][5:7])


def test_a_serial_source_gives_the_same_numbers_piece_by_piece() -> None:
    whole = noise.CpuNoise(SEED, 0).fill(torch.empty(1000))
    for sizes in ([1] * 1000, [7] * 142 + [6], [0, 500, 0, 500], [999, 1]):
        source = noise.CpuNoise(SEED, 0)
        assert torch.equal(torch.cat([source.fill(torch.empty(size)) for size in sizes]), whole)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("count", [100, 2**16])
def test_numbers_do_not_depend_on_the_number_of_threads(count: int) -> None:
    logit = torch.randn(count)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        wide = uniform(count, dtype=torch.float64)
        normal = noise.normal(torch.Size([count]), SEED, 3, torch.float32, CPU)
        found.append((uniform(count), wide, normal, noise.binary(logit, logit.shape, SEED, 3)))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_numbers_do_not_depend_on_torchs_own_generator_nor_touch_it() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = uniform(100), uniform(2**14), noise.normal(torch.Size([9]), SEED, 0, torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = uniform(100), uniform(2**14), noise.normal(torch.Size([9]), SEED, 0, torch.float32, CPU)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# ------------------------------------------------------------------------------- others are others


def test_keys_of_neighbours_differ_in_half_of_their_bits() -> None:
    keys = {(seed, stream): noise.key_of(seed, stream) for seed in range(300) for stream in range(300)}
    assert len(set(keys.values())) == len(keys)
    assert all(0 <= key < 2**64 for key in keys.values())
    for shift in ((0, 1), (1, 0), (1, -1)):
        flips = [
            bin(key ^ keys[seed + shift[0], stream + shift[1]]).count("1")
            for (seed, stream), key in keys.items()
            if (seed + shift[0], stream + shift[1]) in keys
        ]
        assert abs(sum(flips) / len(flips) - 32) < 5 * 4 / len(flips) ** 0.5
        assert min(flips) > 6


@pytest.mark.parametrize("count", [4000, 200_000], ids=["torch's generator", "NumPy's"])
def test_seeds_and_streams_are_not_correlated(count: int) -> None:
    base = uniform(count) - 0.5
    for other in (uniform(count, stream=4), uniform(count, seed=SEED + 1), uniform(count, seed=SEED + 1, stream=2)):
        assert abs(z_score(base * (other - 0.5), 0.0, 1 / 144)) < 5
    assert abs(z_score(base[:-1] * base[1:], 0.0, 1 / 144)) < 5


@pytest.mark.parametrize("count", [4000, 200_000], ids=["torch's generator", "NumPy's"])
def test_noise_is_uniform_to_24_bits(count: int) -> None:
    u = uniform(count)
    assert abs(z_score(u, 0.5, 1 / 12)) < 5
    assert abs(z_score((u - 0.5).square(), 1 / 12, 1 / 180)) < 5
    levels = (u.double() * 2**24).round()
    assert torch.equal(levels / 2**24, u.double())
    if count > 100_000:
        assert len(torch.unique(levels % 1024)) == 1024  # the lowest bits vary too
    halves = u.view(-1, 2) - 0.5  # both halves of a 64-bit word, and not the same number twice
    assert abs(z_score(halves[:, 0] * halves[:, 1], 0.0, 1 / 144)) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_noise_is_normal(dtype: torch.dtype) -> None:
    x = noise.normal(torch.Size([100_000]), SEED, 1, dtype, CPU)
    assert x.dtype == dtype
    assert abs(z_score(x, 0.0, 1.0)) < 5
    assert abs(z_score(x.square(), 1.0, 2.0)) < 5
    assert abs(z_score(x**4, 3.0, 96.0)) < 5


@pytest.mark.parametrize("pi", [0.003, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("count", [4000, 200_000], ids=["torch's generator", "NumPy's"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_masks_have_the_right_frequencies(pi: float, count: int, mirrored: bool) -> None:
    logit = torch.logit(torch.full((count,), pi))
    masks = [noise.binary(logit, logit.shape, SEED + seed, 3, mirrored) for seed in range(10)]
    both = torch.stack(masks)
    assert abs(z_score(both, pi, pi * (1 - pi))) < 5
    assert abs(z_score(both, pi + 0.02, pi * (1 - pi))) > 5  # a rate two hundredths off is noticed
    pairs = (masks[0].double() - pi) * (masks[1].double() - pi)
    assert abs(z_score(pairs, 0.0, (pi * (1 - pi)) ** 2)) < 5


def test_the_second_arm_mirrors_the_first() -> None:
    logit = torch.randn(20_000)
    first, second = (noise.binary(logit, logit.shape, SEED, 3, mirrored) for mirrored in (False, True))
    assert not bool((first & second & (logit < 0)).any())  # never both on where pi~ < 1/2, nor both off where above
    assert not bool((~first & ~second & (logit > 0)).any())
    apart = (first != second).double()
    expected = 2 * torch.minimum(torch.sigmoid(logit), torch.sigmoid(-logit)).double()
    assert abs(float((apart - expected).sum() / (expected * (1 - expected)).sum().sqrt())) < 5


# ------------------------------------------------------------------------------- a draw


def test_a_draw_gives_the_same_gates_again_and_remembers_or_redraws_them() -> None:
    logit = torch.randn(3000)
    kept = torch.rand(3000) < 0.7
    draw = Draw(SEED)
    first = draw.mask(logit.shape, Synapses(logit, kept, 2))
    assert torch.equal(first, noise.binary(logit, logit.shape, SEED, 2) & kept)
    assert draw.mask(logit.shape, Synapses(logit, kept, 2)) is first
    again = draw.anew()
    assert again.masks == {}
    assert torch.equal(again.mask(logit.shape, Synapses(logit, kept, 2)), first)
    other = draw.mask(logit.shape, Synapses(logit, kept, 2), mirrored=True)
    assert torch.equal(other, noise.binary(logit, logit.shape, SEED, 2, True) & kept)
    assert not torch.equal(draw.mask(logit.shape, Synapses(logit, None, 5)), noise.binary(logit, logit.shape, SEED, 2))


def test_a_draw_without_a_seed_takes_torchs_noise_once() -> None:
    logit = torch.randn(300)
    torch.manual_seed(5)
    draw = Draw(None)
    first = draw.mask(logit.shape, Synapses(logit, None, 0))
    mirror = draw.mask(logit.shape, Synapses(logit, None, 0), mirrored=True)
    torch.manual_seed(5)
    u = torch.rand(300)
    assert torch.equal(first, functional.draw_mask(logit, u))
    assert torch.equal(mirror, functional.draw_antithetic_mask(logit, u))  # of the same noise
    assert draw.anew() is draw
