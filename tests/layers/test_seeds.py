"""Where a pass's seed comes from: torch's generators, apart by rank, and the masks that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from dropconnectpp.layers import seeds
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.sampling import Sample, draw_samples

CPU = torch.device("cpu")
WIDTH = 100  # 10,000 synapses: beyond what torch's own generator draws


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(count: int, generator: torch.Generator | None = None) -> list[int]:
    return [int(draw.seed) for draw in seeds.fresh_draws(count, CPU, generator) if draw.seed is not None]


def test_seeds_follow_their_generator_and_no_other() -> None:
    torch.manual_seed(1)
    first = values(3)
    assert first != values(3)
    torch.manual_seed(1)
    assert values(3) == first
    state = torch.get_rng_state()
    assert values(3, seeded(2)) == values(3, seeded(2)) != values(3, seeded(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(first)) == 3
    assert all(0 <= value < 2**62 for value in first)


def test_ranks_have_seeds_of_their_own_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[int]] = {}
    for rank in (*range(40), 1000, 123_456):
        monkeypatch.setattr(seeds, "_rank", lambda rank=rank: rank)
        torch.manual_seed(1)
        found[rank] = values(5)
        assert values(2, seeded(7)) == found.setdefault(-1, values(2, seeded(7)))  # a generator is the caller's word
    mixed = [value for rank, drawn in found.items() if rank >= 0 for value in drawn]
    assert len(set(mixed)) == len(mixed)
    assert all(0 <= value < 2**62 for value in mixed)


# ------------------------------------------------------------------------------- one seed, one mask


def network(mask: str = "batch", **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [dcpp.DropConnectPPLinear(WIDTH, WIDTH, mask=mask, **options) for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            layer.weight_logit.normal_()
    return nn.Sequential(*layers)


def masks_of(model: nn.Module, sample: Sample, arm: int = 0) -> list[Tensor]:
    found = []
    for layer in masked_layers(model).values():
        gates: Any = sample.arms[arm][layer]
        for name in layer.synapse_names:
            if gates.each_example:
                blocks = [masks[name] for _, masks in layer.example_gates(gates).blocks(7)]
                found.append(torch.cat(blocks))
            else:
                shape = getattr(layer, name).shape
                found.append(gates.draw.mask(shape, layer.synapses(name, gates), gates.mirrored))
    return found


def drawn(model: nn.Module, seed: int = 5, **options: Any) -> list[Sample]:
    count = options.pop("count", 1)
    return draw_samples(list(masked_layers(model).values()), count, seeded(seed), relaxed=False, **options)


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_a_seeds_masks_are_the_same_whatever_the_number_of_threads(mask: str) -> None:
    model = network(mask)
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        found.append(masks_of(model, drawn(model)[0]))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_samples_layers_and_parameters_have_masks_of_their_own(mask: str) -> None:
    model = network(mask)
    samples = drawn(model, count=4)
    weights = [masks_of(model, sample)[index] for sample in samples for index in (0, 2)]
    for one, other in itertools.combinations(weights, 2):
        agreement = float((one == other).double().mean())  # by chance: 0.5 between layers, 0.59 within one
        assert 0.45 < agreement < 0.65
    biases = [masks_of(model, sample)[1] for sample in samples]
    assert len({tuple(bias.flatten().tolist()) for bias in biases}) == 4


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_arms_differ_as_mirrored_noise_does(mask: str) -> None:
    model = network(mask, estimator="disarm")
    sample = drawn(model, arms=2)[0]
    for name, (first, second) in enumerate(zip(masks_of(model, sample, 0), masks_of(model, sample, 1), strict=True)):
        layer = model[name // 2]
        logit = layer.weight_logit if name % 2 == 0 else layer.bias_logit
        assert not bool((first & second & (logit < 0)).any())
        assert not bool((~first & ~second & (logit > 0)).any())
        assert bool((first != second).any())


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "concrete"])
def test_tied_parameters_and_layers_called_twice_have_one_mask(mask: str, estimator: str) -> None:
    model = network(mask, estimator=estimator)
    model[1].weight, model[1].weight_logit = model[0].weight, model[0].weight_logit
    with torch.no_grad():
        for layer in model:
            layer.bias.zero_()
    x = torch.eye(WIDTH)
    for context in (dcpp.sampling(model.train(), seeded(2)), dcpp.sampling(model.eval(), seeded(2))):
        with context:
            first, second, third = model[0](x), model[1](x), model[0](x)
        assert torch.equal(first, second)
        assert torch.equal(first, third)
        with dcpp.sampling(model, seeded(3)):
            assert not torch.equal(model[0](x), first)


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
@pytest.mark.parametrize("way", ["elbo", "sampling", "plain call"])
def test_recomputation_draws_the_same_masks(mask: str, reentrant: bool, way: str) -> None:
    """With NumPy's generator too, and threads that change in between."""
    found = []
    for recompute in (False, True):
        model = network(mask, estimator="straight-through")
        x = torch.randn(7, WIDTH, generator=seeded(1)).requires_grad_()

        class Block(nn.Module):
            runs = 0

            def __init__(self, model: nn.Module, recompute: bool) -> None:
                super().__init__()
                self.model, self.recompute = model, recompute

            def run(self, x: Tensor) -> Tensor:
                self.runs += 1
                output: Tensor = self.model(x)
                return output

            def forward(self, x: Tensor) -> Tensor:
                output: Tensor = checkpoint(self.run, x, use_reentrant=reentrant) if self.recompute else self.run(x)
                return output

        block = Block(model, recompute)
        torch.manual_seed(9)
        torch.set_num_threads(1)
        if way == "elbo":
            elbo = dcpp.ELBO(block, dcpp.gaussian(1.0), num_data=7)
            loss = elbo(x, torch.zeros(7, WIDTH)).loss
        elif way == "sampling":
            with dcpp.sampling(block, seeded(4)):
                loss = block(x).square().sum()
        else:
            loss = block(x).square().sum()
        torch.set_num_threads(3)
        loss.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
        assert block.runs == 1 + recompute
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-4, atol=1e-4)  # threads add up in another order
        assert torch.equal(plain == 0, again == 0)


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_masks_of_an_elbo_keep_the_layers_rates(mask: str) -> None:
    """Over steps, samples and examples, as a training run draws them."""
    layer = dcpp.DropConnectPPLinear(WIDTH, WIDTH, bias=False, mask=mask)
    nn.init.ones_(layer.weight)
    with torch.no_grad():
        layer.weight_logit[:] = torch.linspace(-4, 4, WIDTH)[:, None]
    elbo = dcpp.ELBO(layer, lambda output, target: output.sum(1), num_data=9, num_samples=2, generator=seeded(1))
    counts = torch.zeros(WIDTH, dtype=torch.float64)
    rounds = 12

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counts.add_(output.detach().double().sum(0))

    handle = layer.register_forward_hook(count)
    for _ in range(rounds):
        elbo(torch.ones(1 if mask == "batch" else 3, WIDTH), None)
    handle.remove()
    draws = rounds * 2 * WIDTH * (1 if mask == "batch" else 3)
    pi = torch.sigmoid(torch.linspace(-4, 4, WIDTH)).double()
    z = (counts / draws - pi) / (pi * (1 - pi) / draws).sqrt()
    assert float(z.abs().max()) < 5
    assert abs(float(z.square().sum()) - WIDTH) / (2 * WIDTH) ** 0.5 < 5
