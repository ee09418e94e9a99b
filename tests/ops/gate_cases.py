"""What the kernels of the gates compute, against their definitions."""

from __future__ import annotations

import torch

from dropconnectpp import functional
from dropconnectpp.ops import gpu as kernels


def compare_gates(device: torch.device, count: int) -> None:
    """The mask and the straight-through gradients of fresh numbers against their definitions."""
    logit, weight, upstream = (torch.randn(count) for _ in range(3))
    noise = torch.rand(count)
    mask = kernels.draw_mask(logit.to(device), noise.to(device)).cpu()
    edge = (noise - torch.sigmoid(logit)).abs() < 1e-6  # the two may round apart
    assert torch.equal(mask[~edge], functional.draw_mask(logit, noise)[~edge])
    product = kernels.multiply(weight.to(device), mask.to(device), torch.empty(count, device=device))
    assert torch.equal(product.cpu(), weight * mask)
    gradient = upstream.to(device).clone()
    found = kernels.straight_through(logit.to(device), weight.to(device), mask.to(device), gradient)
    expected = functional.straight_through_gradient(logit.double(), weight.double(), upstream.double())
    torch.testing.assert_close(found.double().cpu(), expected, rtol=3e-6, atol=1e-12)
    assert torch.equal(gradient.cpu(), upstream * mask)
