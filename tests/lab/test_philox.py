"""The laboratory's random numbers: known answers, an oracle, independence, and what statistics can see.

The statistical checks are z-scores of fixed draws. Each allows |z| < LARGEST_Z, a false alarm in two
million checks of a perfect generator; the tests of wrong generators show that it catches them.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab import philox as streams
from dropconnectpp.lab.philox import Stream, philox

LARGEST_Z = 5.0
STREAM = Stream(2015, "mask:weight")
KEY_OF_ORDER = 0xB0D641F6766A0508
REPLICAS = torch.tensor([4, 0, 17])
word32 = st.integers(0, 2**32 - 1)

Draw = Callable[[Tensor, "int | Tensor"], Tensor]
DRAWS: dict[str, Draw] = {
    "words": lambda replicas, step: STREAM.words(replicas, step, 37),
    "uniform": lambda replicas, step: STREAM.uniform(replicas, step, 37),
    "uniform in float64": lambda replicas, step: STREAM.uniform(replicas, step, 37, dtype=torch.float64),
    "bernoulli": lambda replicas, step: STREAM.bernoulli(torch.full((len(replicas), 5, 9), 0.3), replicas, step),
    "permutation": lambda replicas, step: STREAM.permutation(replicas, step, 37),
    "normal": lambda replicas, step: STREAM.normal(replicas, step, 37),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


# ------------------------------------------------------------------------------------------ the words


def oracle(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 as Salmon et al. (2011) define it, in Python's own whole numbers."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x0, x1, x2, x3]


def run_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    return [int(word) for word in philox((c0, c1, c2, c3), (key[0], key[1]))]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(word, 16) for word in text.split())

    assert tuple(run_philox(numbers(counter), numbers(key))) == numbers(answer)
    assert tuple(oracle(numbers(counter), numbers(key))) == numbers(answer)


@settings(deadline=None)
@given(st.tuples(word32, word32, word32, word32), st.tuples(word32, word32))
def test_philox_equals_the_oracle(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert run_philox(counter, key) == oracle(counter, key)


@settings(deadline=None)
@given(word32, word32, word32, st.integers(0, 40))
def test_an_element_has_the_address_that_the_table_says(replica: int, step: int, draw: int, element: int) -> None:
    words = STREAM.words(torch.tensor([replica]), step, element + 1, draw)
    assert int(words[0, element]) == oracle((element // 4, draw, step, replica), STREAM.key)[element % 4]


def test_the_key_is_fixed_for_good() -> None:
    # Changing this changes every result ever stored.
    assert Stream(0, "order").seed == KEY_OF_ORDER
    assert Stream(0, "order").key == (KEY_OF_ORDER & 0xFFFFFFFF, KEY_OF_ORDER >> 32)


def test_seeds_and_purposes_never_share_a_key() -> None:
    pairs = [(seed, purpose) for seed in (0, 1, 11, 2**70) for purpose in ("a", "1a", "\x001\x00a", "start:conv1")]
    assert len({Stream(seed, purpose).seed for seed, purpose in pairs}) == len(pairs)


def test_streams_are_values() -> None:
    assert Stream(1, "order") == Stream(1, "order")
    assert Stream(1, "order") != Stream(1, "dropout")
    assert repr(Stream(1, "order")) == "Stream(root_seed=1, purpose='order')"


# --------------------------------------------------------------------------------- what a number knows


@each_draw
def test_a_replica_does_not_know_its_neighbours(draw: Draw) -> None:
    together = draw(REPLICAS, 3)
    for row, replica in enumerate(REPLICAS):
        assert torch.equal(together[row], draw(replica[None], 3)[0])


@each_draw
def test_a_step_on_the_device_is_the_same_step(draw: Draw) -> None:
    assert torch.equal(draw(REPLICAS, torch.tensor(70_000)), draw(REPLICAS, 70_000))
    assert torch.equal(draw(REPLICAS, torch.tensor(2**32 - 1)), draw(REPLICAS, 2**32 - 1))


@each_draw
def test_replicas_and_steps_differ(draw: Draw) -> None:
    drawn = torch.cat([draw(torch.arange(4), step).flatten(1) for step in range(4)])
    assert len(drawn.unique(dim=0)) == 16


@each_draw
def test_torchs_own_generator_is_neither_asked_nor_moved(draw: Draw) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(REPLICAS, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draw(REPLICAS, 3), first)


@each_draw
def test_tiles_leave_no_trace(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(REPLICAS, 3)
    for size in (1, 7, 25):
        monkeypatch.setattr(streams, "TILE_PER_THREAD", size)
        assert torch.equal(draw(REPLICAS, 3), whole)


@each_draw
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_it_draws_the_same(draw: Draw, backend: str) -> None:
    compiled = torch.compile(draw, backend=backend, fullgraph=True)
    for step in (3, 4, torch.tensor(5)):
        assert torch.equal(compiled(REPLICAS, step), draw(REPLICAS, step))


def test_draws_purposes_and_seeds_differ() -> None:
    variants = [
        STREAM.words(REPLICAS, 3, 8),
        STREAM.words(REPLICAS, 3, 8, draw=1),
        STREAM.words(REPLICAS, 3, 8, draw=torch.tensor(2)),
        Stream(2015, "mask:bias").words(REPLICAS, 3, 8),
        Stream(2016, "mask:weight").words(REPLICAS, 3, 8),
    ]
    assert len(torch.stack(variants).flatten().unique()) == 5 * 3 * 8


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50))
def test_a_shorter_draw_is_the_start_of_a_longer_one(short: int, more: int) -> None:
    for method in (STREAM.words, STREAM.uniform, STREAM.normal):
        drawn = method(REPLICAS, 3, short)
        assert drawn.shape == (3, short)
        assert drawn.is_contiguous()
        assert torch.equal(drawn, method(REPLICAS, 3, short + more)[:, :short])


# ---------------------------------------------------------------------------- what is made of the words


def test_uniforms_are_the_top_bits_of_the_words() -> None:
    words = STREAM.words(REPLICAS, 3, 1000)
    single = STREAM.uniform(REPLICAS, 3, 1000)
    double = STREAM.uniform(REPLICAS, 3, 1000, dtype=torch.float64)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert torch.equal(double * 2.0**32, words.double())
    assert torch.equal(single.double() * 2.0**24, (words // 256).double())


def test_the_largest_uniform_is_below_one() -> None:
    largest = torch.tensor([[2**32 - 1]])
    for dtype in (torch.float32, torch.float64):
        assert 0.999 < float(streams._to_unit_interval(largest, dtype)) < 1.0


def test_masks_compare_uniforms_with_probabilities() -> None:
    pi = torch.linspace(0.0, 1.0, 3 * 4 * 5).view(3, 4, 5)
    mask = STREAM.bernoulli(pi, REPLICAS, 3)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, STREAM.uniform(REPLICAS, 3, 20).view(3, 4, 5) < pi)
    assert torch.equal(mask, STREAM.bernoulli(pi.double(), REPLICAS, 3))
    assert torch.equal(
        STREAM.bernoulli(pi.bfloat16(), REPLICAS, 3), STREAM.bernoulli(pi.bfloat16().float(), REPLICAS, 3)
    )
    assert torch.equal(STREAM.bernoulli(pi[:, 0, 0], REPLICAS, 3), STREAM.bernoulli(pi[:, 0, :1], REPLICAS, 3)[:, 0])


def test_certain_masks_are_certain() -> None:
    assert STREAM.bernoulli(torch.ones(3, 10_000), REPLICAS, 3).all()
    assert not STREAM.bernoulli(torch.zeros(3, 10_000), REPLICAS, 3).any()


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_permutations_are_permutations(count: int) -> None:
    orders = STREAM.permutation(REPLICAS, 3, count)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(count).expand(3, count))


def test_every_order_is_equally_likely() -> None:
    orders = STREAM.permutation(torch.arange(24_000), 0, 4)
    code = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    _, counts = code.unique(return_counts=True)
    assert len(counts) == 24
    assert abs(chi_square_z(counts)) < LARGEST_Z


def test_the_rarest_words_make_finite_normals() -> None:
    ends = streams._to_normal(torch.tensor([[0, 0, 2**32 - 1, 2**32 - 1]]))
    assert ends.isfinite().all()
    assert 6.7 < float(ends.abs().max()) < 6.8


# ------------------------------------------------------------------------------------------- statistics


def mean_z(sample: Tensor, mean: float, variance: float) -> float:
    sample = sample.double().flatten()
    return float((sample.mean() - mean) * (sample.numel() / variance) ** 0.5)


def chi_square_z(counts: Tensor) -> float:
    expected = counts.sum().double() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def correlation_z(a: Tensor, b: Tensor) -> float:
    """Correlation of uniforms, whose mean is 1/2 and whose variance is 1/12."""
    return mean_z((a.double() - 0.5) * (b.double() - 0.5), 0.0, 1.0 / 144.0)


def uniform_scores(uniform: Callable[[Tensor, int], Tensor]) -> dict[str, float]:
    """z-scores of everything that uniforms should be: flat in their high and low bits, and unrelated."""
    here = uniform(torch.arange(4), 8)
    later = uniform(torch.arange(4), 9)
    low_bits = (here * 2**16).frac()
    return {
        "mean": mean_z(here, 1 / 2, 1 / 12),
        "variance": mean_z((here.double() - 0.5).square(), 1 / 12, 1 / 180),
        "high bits": chi_square_z(torch.histc(here.float(), 256, 0.0, 1.0)),
        "low bits": chi_square_z(torch.histc(low_bits.float(), 256, 0.0, 1.0)),
        "neighbouring elements": correlation_z(here[:, 1:], here[:, :-1]),
        "neighbouring blocks": correlation_z(here[:, 4:], here[:, :-4]),
        "neighbouring replicas": correlation_z(here[1:], here[:-1]),
        "neighbouring steps": correlation_z(here, later),
    }


COUNT = 1 << 17


def test_uniforms_are_uniform_and_unrelated() -> None:
    for dtype in (torch.float32, torch.float64):
        for name, z in uniform_scores(lambda r, s: STREAM.uniform(r, s, COUNT, dtype=dtype)).items():  # noqa: B023
            assert abs(z) < LARGEST_Z, name


WRONG: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "a mean 1% off": (lambda r, s: STREAM.uniform(r, s, COUNT) * 0.99, "mean"),
    "too little spread": (lambda r, s: STREAM.uniform(r, s, COUNT) * 0.99 + 0.005, "variance"),
    "16 bits for 24": (lambda r, s: (STREAM.uniform(r, s, COUNT) * 2**16).floor() * 2.0**-16, "low bits"),
    "one replica for all": (lambda r, s: STREAM.uniform(r[:1], s, COUNT).expand(4, -1), "neighbouring replicas"),
    "steps ignored": (lambda r, s: STREAM.uniform(r, 0, COUNT), "neighbouring steps"),
    "a counter": (lambda r, s: torch.arange(4 * COUNT).view(4, -1) / (4.0 * COUNT), "neighbouring elements"),
}


@pytest.mark.parametrize(("wrong", "seen_by"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_generator_would_be_caught(wrong: Callable[[Tensor, int], Tensor], seen_by: str) -> None:
    assert abs(uniform_scores(wrong)[seen_by]) > 2 * LARGEST_Z


def test_too_few_rounds_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ROUNDS", 5)
    scores = uniform_scores(lambda r, s: STREAM.uniform(r, s, COUNT))
    assert max(abs(z) for z in scores.values()) > 2 * LARGEST_Z


def test_normals_are_normal() -> None:
    drawn = STREAM.normal(torch.arange(4), 8, COUNT, dtype=torch.float64)
    cells = torch.special.ndtr(drawn)
    assert abs(mean_z(drawn, 0.0, 1.0)) < LARGEST_Z
    assert abs(mean_z(drawn.square(), 1.0, 2.0)) < LARGEST_Z
    assert abs(chi_square_z(torch.histc(cells, 256, 0.0, 1.0))) < LARGEST_Z
    assert abs(mean_z(drawn[:, 0::2] * drawn[:, 1::2], 0.0, 1.0)) < LARGEST_Z
    assert abs(mean_z(drawn[1:] * drawn[:-1], 0.0, 1.0)) < LARGEST_Z
    assert torch.equal(STREAM.normal(torch.arange(4), 8, COUNT), drawn.float())


def test_masks_keep_as_often_as_they_should() -> None:
    for pi in (0.02, 0.5, 0.9):
        mask = STREAM.bernoulli(torch.full((4, COUNT), pi), torch.arange(4), 8)
        assert abs(mean_z(mask, pi, pi * (1 - pi))) < LARGEST_Z
        assert abs(mean_z(mask, pi + 0.01, pi * (1 - pi))) > LARGEST_Z


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stream(-1, "order"), "root_seed must be a whole number of at least 0, got -1"),
        (lambda: Stream(1, ""), "purpose must be a name such as 'order'"),
        (lambda: STREAM.words(torch.tensor([-1, 3]), 0, 4), "replicas must be a whole number of at least 0, got -1"),
        (lambda: STREAM.words(torch.tensor([3, 2**32]), 0, 4), "replicas must be at most 4294967295, .*got 4294967296"),
        (lambda: STREAM.words(torch.tensor(3), 0, 4), r"shape \(R,\), got torch.int64 of shape \(\)"),
        (lambda: STREAM.words(torch.ones(3), 0, 4), "got torch.float32 of shape"),
        (lambda: STREAM.words(REPLICAS, 2**32, 4), "step must be at most 4294967295"),
        (lambda: STREAM.words(REPLICAS, 1.5, 4), "step must be a whole number"),  # type: ignore[arg-type]
        (lambda: STREAM.words(REPLICAS, 0, 4, draw=-1), "draw must be a whole number of at least 0, got -1"),
        (lambda: STREAM.words(REPLICAS, REPLICAS, 4), r"step as a tensor must be 0-d, .* of shape \(3,\)"),
        (lambda: STREAM.words(REPLICAS, 0, 2**32 + 1), "count must be at most 4294967296"),
        (lambda: STREAM.permutation(REPLICAS, 0, 2**31), "count must be at most 2147483647"),
        (lambda: STREAM.normal(REPLICAS, 0, -1), "count must be a whole number of at least 0"),
        (lambda: STREAM.uniform(REPLICAS, 0, 4, dtype=torch.float16), "dtype must be torch.float32 or torch.float64"),
        (lambda: STREAM.bernoulli(torch.ones(2, 5), REPLICAS, 0), r"of the 3 replicas, cpu; got \(2, 5\) on cpu"),
        (lambda: STREAM.bernoulli(torch.tensor(0.5), REPLICAS, 0), r"must be \(R, ...\)"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


# ----------------------------------------------------------------------------------------------- kernels

TRITON = """
import sys
import torch
import triton
import triton.language as tl
from dropconnectpp.lab.philox import Stream

@triton.jit
def draw_words(out, replicas, step, seed, draw, count, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    c1, c2 = zero + draw.to(tl.uint32), zero + tl.load(step).to(tl.uint32)
    c3 = zero + tl.load(replicas + row).to(tl.uint32)
    words = tl.philox(seed, block.to(tl.uint32), c1, c2, c3)
    for i in tl.static_range(4):
        element = 4 * block + i
        tl.store(out + row * count + element, words[i].to(tl.int64), mask=element < count)

device = torch.device(sys.argv[1])
for name, step, draw in [("order", 0, 0), ("mask:weight", 70_000, 3), ("dropout", 2**32 - 1, 5)]:
    stream = Stream(7, name)
    replicas = torch.tensor([0, 5, 2**32 - 1], device=device)
    counter = torch.tensor(step, device=device)
    out = torch.zeros(3, 203, dtype=torch.int64, device=device)
    draw_words[(3, 4)](out, replicas, counter, stream.seed, draw, 203, BLOCK=16)
    assert torch.equal(out.cpu(), stream.words(replicas.cpu(), step, 203, draw)), name
print("all well")
"""


@pytest.mark.triton
def test_an_interpreted_kernel_draws_the_same_words(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(TRITON, "cpu")


@pytest.mark.triton
@pytest.mark.gpu
def test_a_kernel_on_a_gpu_draws_the_same_words(run_compiled: Callable[..., str]) -> None:
    assert run_compiled(TRITON, "cuda").strip() == "all well"


class TestOnAGPU:
    pytestmark = pytest.mark.gpu

    def test_all_but_normals_are_equal_bit_for_bit(self) -> None:
        for step in (0, 70_000):
            for name, draw in DRAWS.items():
                if name != "bernoulli":  # its probabilities are on the CPU
                    drawn = draw(REPLICAS.cuda(), step).cpu()
                    error = 1e-6 if name == "normal" else 0.0
                    torch.testing.assert_close(drawn, draw(REPLICAS, step), rtol=error, atol=error)
        assert torch.equal(STREAM.words(REPLICAS.cuda(), 1, 300_001).cpu(), STREAM.words(REPLICAS, 1, 300_001))
        assert torch.equal(
            STREAM.permutation(REPLICAS.cuda(), 1, 50_000).cpu(), STREAM.permutation(REPLICAS, 1, 50_000)
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_masks_are_equal(self, dtype: torch.dtype) -> None:
        pi = torch.linspace(0.0, 1.0, 3 * 1001).view(3, 1001).to(dtype)
        assert torch.equal(STREAM.bernoulli(pi.cuda(), REPLICAS.cuda(), 9).cpu(), STREAM.bernoulli(pi, REPLICAS, 9))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
    def test_nothing_waits_for_the_gpu(self) -> None:
        replicas, step = REPLICAS.cuda(), torch.tensor(5).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for name, draw in DRAWS.items():
                if name != "bernoulli":
                    draw(replicas, step)
            STREAM.bernoulli(replicas[:, None] * 0.1, replicas, 3, draw=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_step_on_the_wrong_device_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match=r"on the replicas' device cuda:0; got torch\.int64 of .* on cpu"):
            STREAM.words(REPLICAS.cuda(), torch.tensor(3), 4)

    def test_a_captured_graph_counts_its_own_steps(self) -> None:
        replicas, step = REPLICAS.cuda(), torch.zeros((), dtype=torch.int64, device="cuda")
        pi = torch.full((3, 1001), 0.3, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # kernels are loaded before the capture
            STREAM.bernoulli(pi, replicas, step)
            STREAM.permutation(replicas, step, 1000)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mask = STREAM.bernoulli(pi, replicas, step)
            order = STREAM.permutation(replicas, step, 1000)
            step.add_(1)
        for expected in range(4):
            graph.replay()
            assert torch.equal(mask.cpu(), STREAM.bernoulli(pi.cpu(), REPLICAS, expected))
            assert torch.equal(order.cpu(), STREAM.permutation(REPLICAS, expected, 1000))
        step.fill_(70_000)
        graph.replay()
        assert torch.equal(mask.cpu(), STREAM.bernoulli(pi.cpu(), REPLICAS, 70_000))

    @pytest.mark.triton
    def test_compiled_for_the_gpu_it_draws_the_same(self) -> None:
        replicas, step = REPLICAS.cuda(), torch.tensor(5).cuda()
        drawn = torch.compile(lambda r, s: STREAM.words(r, s, 1001), fullgraph=True)(replicas, step)
        assert torch.equal(drawn.cpu(), STREAM.words(REPLICAS, 5, 1001))
