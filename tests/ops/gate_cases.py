"""What each GPU kernel of the library computes, against its definition: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.ops import gpu, gpu_examples, gpu_gates
from dropconnectpp.ops.prior import Prior

SEED = 1_234_567_890_123_456_789
PRIORS = (
    Prior(1.0, 1.0, "optimal"),
    Prior(10.0, 90.0, "optimal"),
    Prior(2.0, 0.7, "optimal"),
    Prior(1.0, 1.0, "marginal"),
    Prior(1.0, 99.0, "marginal"),
)


def logits(count: int, device: torch.device) -> Tensor:
    """Log-odds of all sizes, a zero and a nearly certain gate among them."""
    found = 4 * torch.randn(count, device=device)
    found[0] = 0.0
    found[count // 2] = -30.0
    return found


def kept_masks(count: int, device: torch.device) -> Iterator[Tensor | None]:
    """Nothing pruned, and a third of the synapses."""
    yield None
    yield torch.rand(count, device=device) > 0.3


def compare_noise(count: int, device: torch.device) -> None:
    """Noise and masks: in range, one draw for one seed and stream, another for any other."""
    seed = torch.tensor(SEED, device=device)
    shape = torch.Size([count])
    u = gpu.uniform(shape, seed, 3)
    assert bool(((u >= 0) & (u < 1)).all())
    assert torch.equal(u, gpu.uniform(shape, seed, 3))
    if count > 50:
        others = [gpu.uniform(shape, seed + 1, 3), gpu.uniform(shape, seed, 4), gpu.uniform(shape, seed, 3, 1)]
        assert not any(torch.equal(u, other) for other in others)
    assert bool(torch.isfinite(gpu.normal(shape, seed, 3)).all())
    logit = logits(count, device)
    for mirrored in (False, True):
        pi = torch.sigmoid(logit)
        sure = ((1 - u if mirrored else u) - pi).abs() > 1e-6  # nearer than that the two may round apart
        mask = gpu.binary(logit, shape, seed, 3, mirrored)
        draw = functional.draw_antithetic_mask if mirrored else functional.draw_mask
        assert torch.equal(mask[sure], draw(logit, u)[sure])
    one = torch.tensor(0.7, device=device)
    scalar = gpu.binary(one, shape, seed, 3, False)
    assert torch.equal(scalar, gpu.binary(one.expand(count).contiguous(), shape, seed, 3, False))


def compare_gating(count: int, device: torch.device, half: torch.dtype) -> None:
    """W z, z G and G W pi~ (1 - pi~), pruned or not, in single and half precision."""
    seed, logit = torch.tensor(SEED, device=device), logits(count, device)
    weight, upstream = torch.randn(count, device=device), torch.randn(count, device=device)
    for kept in kept_masks(count, device):
        for mirrored in (False, True):
            mask = gpu.binary(logit, logit.shape, seed, 5, mirrored)
            part = torch.ones(count, device=device) if kept is None else kept.float()
            for dtype in (None, half):
                found = gpu_gates.gated([(weight, logit, kept, 5)], seed, mirrored, dtype)[0]
                assert torch.equal(found, (weight * mask * part).to(dtype or torch.float32))
            for grad in (upstream, upstream.to(half)):
                wide = grad.float()
                part_of = [(weight, logit, kept, 5)]
                (by_weight,), (by_logit,) = gpu_gates.gated_backward([grad], part_of, seed, mirrored, (True, True))
                assert by_weight is not None
                assert by_logit is not None
                assert torch.equal(by_weight, wide * mask * part)
                exact = functional.straight_through_gradient(logit.double(), weight.double(), wide.double()) * part
                torch.testing.assert_close(by_logit.double(), exact, rtol=3e-6, atol=1e-12)
            only = gpu_gates.gated_backward([upstream], [(weight, logit, kept, 5)], seed, mirrored, (True, False))
            assert only[1] == [None]
    product = gpu.multiply(weight, mask, torch.empty_like(weight))
    assert torch.equal(product, weight * mask)


def compare_examples(examples: int, outs: int, ins: int, device: torch.device) -> None:
    """One mask an example: their noise, the product, its gradients and weighted sums of masks."""
    seed = torch.tensor(SEED, device=device)
    logit = logits(outs * ins, device).view(outs, ins)
    x, weight, upstream = (torch.randn(*s, device=device) for s in ((examples, ins), (outs, ins), (examples, outs)))
    noise = gpu_examples.uniform(torch.Size((examples, outs, ins)), seed, 4)
    assert bool(((noise >= 0) & (noise < 1)).all())
    rest = gpu_examples.uniform(torch.Size((examples, outs, ins)), seed, 4, 1)[: examples - 1]
    assert torch.equal(rest, noise[1:])  # an example's own, wherever its block begins
    if examples * outs * ins > 50:
        assert not torch.equal(noise[0], noise[1])
        assert not torch.equal(noise[0], gpu_examples.uniform(torch.Size((1, outs, ins)), seed, 5)[0])
    weights = torch.randn(3, examples, device=device)
    for kept in (None, torch.rand(outs, ins, device=device) > 0.3):
        for mirrored in (False, True):
            masks = gpu_examples.Masks(logit, kept, seed, 4, mirrored)
            draw = functional.draw_antithetic_mask if mirrored else functional.draw_mask
            gate = draw(logit, noise).double()
            part = torch.ones_like(weight) if kept is None else kept.float()
            gate, wide = gate * part, weight.double()
            tight = {"rtol": 2e-5, "atol": 2e-5}
            found = gpu_examples.product(x, weight, masks, torch.float32)
            torch.testing.assert_close(found.double(), torch.einsum("boi,oi,bi->bo", gate, wide, x.double()), **tight)
            found = gpu_examples.by_input(upstream, weight, masks, torch.float32)
            exact = torch.einsum("boi,oi,bo->bi", gate, wide, upstream.double())
            torch.testing.assert_close(found.double(), exact, **tight)
            by_weight, by_logit = gpu_examples.by_weight(upstream, x, weight, masks, True)
            exact = torch.einsum("boi,bo,bi->oi", gate, upstream.double(), x.double())
            torch.testing.assert_close(by_weight.double(), exact, **tight)
            assert by_logit is not None
            exact = functional.straight_through_gradient(logit.double(), wide, upstream.double().T @ x.double()) * part
            torch.testing.assert_close(by_logit.double(), exact, **tight)
            found = gpu_examples.weighted_sum(weights, masks)
            torch.testing.assert_close(found.double(), torch.einsum("kb,boi->koi", weights.double(), gate), **tight)


def compare_posterior(count: int, device: torch.device) -> None:
    """KL, squared scores and gradient of every form of the KL, with none, one and two samples."""
    seed, logit = torch.tensor(SEED, device=device), logits(count, device)
    seeds = torch.stack([seed, seed + 1])
    upstream = torch.tensor(1.7, device=device)
    masks = [[gpu.binary(logit, logit.shape, s, 2, mirrored) for mirrored in (False, True)] for s in seeds]
    for prior in PRIORS:
        exact_kl, exact_gradient = exact(prior, logit.double())
        for kept in kept_masks(count, device):
            part = torch.ones(count, device=device) if kept is None else kept.float()
            for samples in (0, 1, 2):
                some = seeds[:samples] if samples else None
                scores = [functional.bernoulli_score(pair[0], logit.double()) * part for pair in masks[:samples]]
                kl, squared = gpu.posterior(logit, kept, prior, some, 2)
                torch.testing.assert_close(kl.double(), (exact_kl * part).sum(), rtol=3e-6, atol=1e-6)
                for found, score in zip(squared, scores, strict=True):
                    torch.testing.assert_close(found.double(), score.square().sum(), rtol=3e-6, atol=1e-6)
                weights = torch.tensor([0.3, -0.7], device=device)[:samples]
                for scale in (0.25, torch.tensor(0.25, device=device)):
                    found = gpu.posterior_backward(
                        logit,
                        kept,
                        prior,
                        upstream,
                        kl_scale=scale,
                        seeds=some,
                        coefficients=weights if samples else None,
                        stream=2,
                    )
                    likelihood = sum((c * s for c, s in zip(weights, scores, strict=True)), torch.zeros_like(exact_kl))
                    wanted = 1.7 * (0.25 * exact_gradient - likelihood) * part
                    torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=2e-6)
            pairs = [pair[0].double() - pair[1].double() for pair in masks]
            paired = gpu.posterior_backward(
                logit, kept, prior, upstream, seeds=seeds, coefficients=weights, stream=2, paired=True
            )
            disarm = functional.disarm_gradient(logit.double(), weights[0] * pairs[0] + weights[1] * pairs[1])
            wanted = 1.7 * (exact_gradient - disarm) * part
            torch.testing.assert_close(paired.double(), wanted, rtol=3e-6, atol=2e-6)


def exact(prior: Prior, logit: Tensor) -> tuple[Tensor, Tensor]:
    """KL and gradient of each synapse by the definition."""
    if prior.hyper == "marginal":
        return (
            functional.marginal_kl(logit, prior.alpha, prior.beta),
            functional.marginal_kl_gradient(logit, prior.alpha, prior.beta),
        )
    kl, gradient = functional.collapsed_kl(logit, prior.alpha, prior.beta)
    assert kl is not None
    assert gradient is not None
    return kl, gradient
