"""The log-likelihoods against torch.distributions, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as td

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ShapeError

EXTRA_AXES = [(), (4,), (2, 3)]


def summed(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1).sum(1)


@pytest.mark.parametrize("extra", EXTRA_AXES)
def test_categorical(extra: tuple[int, ...]) -> None:
    logits = torch.randn(5, 3, *extra, dtype=torch.float64)
    target = torch.randint(3, (5, *extra))
    truth = td.Categorical(logits=logits.movedim(1, -1))
    torch.testing.assert_close(dcpp.categorical(logits, target), summed(truth.log_prob(target)))
    probabilities = dcpp.categorical.mean(logits)
    torch.testing.assert_close(probabilities.movedim(1, -1), truth.probs)
    torch.testing.assert_close(dcpp.categorical.entropy(probabilities), truth.entropy())


@pytest.mark.parametrize("extra", EXTRA_AXES)
def test_bernoulli(extra: tuple[int, ...]) -> None:
    logits = torch.randn(5, *extra, dtype=torch.float64)
    truth = td.Bernoulli(logits=logits)
    target = torch.randint(2, (5, *extra))
    torch.testing.assert_close(dcpp.bernoulli(logits, target), summed(truth.log_prob(target.double())))
    torch.testing.assert_close(dcpp.bernoulli(logits, target.bool()), dcpp.bernoulli(logits, target))
    probabilities = dcpp.bernoulli.mean(logits)
    torch.testing.assert_close(probabilities, truth.probs)
    torch.testing.assert_close(dcpp.bernoulli.entropy(probabilities), summed(truth.entropy()))


def test_bernoulli_takes_shades_between_yes_and_no() -> None:
    logits, target = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    yes, no = td.Bernoulli(logits=logits).probs.log(), td.Bernoulli(logits=-logits).probs.log()
    torch.testing.assert_close(dcpp.bernoulli(logits, target), (target * yes + (1 - target) * no).sum(1))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("extra", EXTRA_AXES)
def test_gaussian(extra: tuple[int, ...], scale: float) -> None:
    output, target = torch.randn(2, 5, *extra, dtype=torch.float64)
    likelihood = dcpp.gaussian(scale)
    torch.testing.assert_close(likelihood(output, target), summed(td.Normal(output, scale).log_prob(target)))
    assert likelihood.mean(output) is output
    assert likelihood == dcpp.gaussian(scale) != dcpp.gaussian(2.0)


def test_extreme_logits_stay_finite() -> None:
    huge = torch.tensor([[1e4, -1e4]], dtype=torch.float64)
    torch.testing.assert_close(dcpp.categorical(huge, torch.tensor([1])), torch.tensor([-2e4], dtype=torch.float64))
    torch.testing.assert_close(
        dcpp.bernoulli(huge, torch.tensor([[0.0, 1.0]])), torch.tensor([-2e4], dtype=torch.float64)
    )
    assert dcpp.bernoulli.entropy(dcpp.bernoulli.mean(huge)) == 0
    assert dcpp.categorical.entropy(dcpp.categorical.mean(huge)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("likelihood", "target"),
    [
        (dcpp.categorical, torch.tensor([0, 2, 1, 1])),
        (dcpp.bernoulli, torch.rand(4, 3)),
        (dcpp.gaussian(0.5), torch.randn(4, 3)),
    ],
    ids=["categorical", "bernoulli", "gaussian"],
)
def test_half_precision_output_is_widened_first(likelihood: Any, target: Tensor, dtype: torch.dtype) -> None:
    output = torch.randn(4, 3).to(dtype).requires_grad_()
    values = likelihood(output, target)
    assert values.dtype == torch.float32
    assert torch.equal(values, likelihood(output.float(), target))
    assert not torch.equal(values, values.to(dtype).float())  # the narrow type would have lost digits
    values.sum().backward()
    assert output.grad is not None
    assert output.grad.dtype == dtype


@pytest.mark.parametrize(
    ("output", "target"), [((4, 3), (4, 3)), ((4, 3), (3,)), ((4,), (4,)), ((4, 3, 5), (4,)), ((4, 3, 5), (4, 3))]
)
def test_categorical_refuses_shapes_that_do_not_fit(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    words = f"logits of shape (B, C, ...) and class numbers of shape (B, ...), got {output} and {target}."
    with pytest.raises(ShapeError, match=re.escape(words)):
        dcpp.categorical(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_categorical_refuses_real_valued_targets() -> None:
    with pytest.raises(ArgumentError, match=r"needs whole-number classes as target, got torch.float32. Use target.lo"):
        dcpp.categorical(torch.zeros(4, 3), torch.zeros(4))


@pytest.mark.parametrize(("name", "likelihood"), [("bernoulli", dcpp.bernoulli), ("gaussian", dcpp.gaussian(1.0))])
@pytest.mark.parametrize(("output", "target"), [((4, 1), (4,)), ((4,), (4, 1)), ((4, 3), (3, 4))])
def test_shapes_must_be_equal_so_that_nothing_broadcasts(name: str, likelihood: Any, output: Any, target: Any) -> None:
    with pytest.raises(
        ShapeError, match=re.escape(f"{name} needs output and target of one shape, got {output} and {target}.")
    ):
        likelihood(torch.zeros(output), torch.zeros(target))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_gaussian_refuses_scales_that_are_none(scale: float) -> None:
    with pytest.raises(ArgumentError, match="scale must be a finite number above 0, got"):
        dcpp.gaussian(scale)
