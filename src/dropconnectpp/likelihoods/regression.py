"""Log-likelihoods of real values and of counts, in nats, with what predictions need of their noise.

Shapes: B batch, K outputs, `*` further axes of an example. `__call__` sums over K and `*`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ShapeError, check_count, check_positive
from dropconnectpp.likelihoods.outputs import along_outputs, check_same_shape, per_example, tensor_of, wide
from dropconnectpp.likelihoods.student_t import student_t_cdf

Scale = float | tuple[float, ...]
"""One noise scale for all outputs, or one for each along axis 1."""


def _normal_log_density(standardised: Tensor, log_scale: Tensor | float) -> Tensor:
    return -0.5 * standardised.square() - log_scale - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Noise:
    """Additive noise of one shape at a scale: output holds means, target values of the same shape."""

    scale: Scale

    def __post_init__(self) -> None:
        for scale in self.scales:
            check_positive("scale", scale)

    @property
    def name(self) -> str:
        """What errors and descriptions call it."""
        raise NotImplementedError

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales as a tuple."""
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        output = tensor_of(output)
        scale = self._scale(output)
        return self.at(output, target, scale, math.log(scale) if isinstance(scale, float) else scale.log())

    def at(self, output: Tensor, target: Tensor, scale: Tensor | float, log_scale: Tensor | float) -> Tensor:
        """The log-likelihood (B,) at this scale."""
        check_same_shape(self.name, output, target)
        mean = wide(output)
        return per_example(self.log_density((target.to(mean.dtype) - mean) / scale, log_scale))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-density (B,) of the target."""
        return self(output, target)

    def log_density(self, standardised: Tensor, log_scale: Tensor | float) -> Tensor:
        """The log-density of (y - mean) / scale, element by element."""
        raise NotImplementedError

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def deviation(self, output: Tensor) -> Tensor:
        """The noise's standard deviation, shaped like `mean`."""
        return torch.ones_like(output) * (self._scale(output) * self._unit_deviation())

    def cdf(self, output: Tensor, value: Tensor) -> Tensor:
        """The probability of at most ``value``, element by element."""
        return self._unit_cdf((value - output) / self._scale(output))

    def tempered(self, factor: float) -> Noise:
        """The same with ``factor`` times the scale."""
        scaled = tuple(scale * factor for scale in self.scales)
        return replace(self, scale=scaled if isinstance(self.scale, tuple) else scaled[0])

    def _scale(self, output: Tensor) -> Tensor | float:
        if len(self.scales) == 1:
            return float(self.scales[0])  # a number: nothing to copy to a device, nor within a CUDA graph
        return along_outputs(self.name, torch.tensor(self.scales, dtype=torch.float64), output)

    def _unit_deviation(self) -> float:
        return 1.0

    def _unit_cdf(self, standardised: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Noise):
    """Real values with normal noise of a known scale: output holds means, target values of the same shape."""

    @property
    def name(self) -> str:
        return "gaussian"

    def log_density(self, standardised: Tensor, log_scale: Tensor | float) -> Tensor:
        return _normal_log_density(standardised, log_scale)

    def _unit_cdf(self, standardised: Tensor) -> Tensor:
        below: Tensor = torch.special.ndtr(standardised)
        return below


@dataclass(frozen=True)
class StudentT(Noise):
    """Real values with outliers: Student's t with ``df`` degrees of freedom around the output."""

    df: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("df", self.df)

    @property
    def name(self) -> str:
        return "student_t"

    def log_density(self, standardised: Tensor, log_scale: Tensor | float) -> Tensor:
        half = 0.5 * (self.df + 1.0)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(self.df * math.pi)
        return constant - half * torch.log1p(standardised.square() / self.df) - log_scale

    def _unit_deviation(self) -> float:
        return math.sqrt(self.df / (self.df - 2.0)) if self.df > 2.0 else math.inf

    def _unit_cdf(self, standardised: Tensor) -> Tensor:
        return student_t_cdf(standardised, self.df)


class LearnedNoise(nn.Module):
    """Noise whose scale is learned: a parameter of the ELBO that holds it, in `parameter_groups(elbo, ...)`."""

    def __init__(self, noise: Gaussian | StudentT, outputs: int) -> None:
        super().__init__()
        count = check_count("outputs", outputs)
        self.noise = noise
        start = torch.tensor(noise.scales).expand(count) if len(noise.scales) == 1 else torch.tensor(noise.scales)
        self.log_scale = nn.Parameter(start.log().clone())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        output = tensor_of(output)
        log_scale = along_outputs(self.noise.name, self.log_scale, output)
        return self.noise.at(output, target, log_scale.exp(), log_scale)

    @property
    def scale(self) -> Tensor:
        """The noise scale as it is now, (1,) or one per output."""
        return self.log_scale.detach().exp()

    def fixed(self) -> Gaussian | StudentT:
        """The same noise at the scale of now, which further training does not move."""
        scales = tuple(self.log_scale.detach().double().exp().tolist())
        return replace(self.noise, scale=scales if len(scales) > 1 else scales[0])

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output

    def extra_repr(self) -> str:
        return f"{self.noise.name}, scale={[float(f'{scale:.4g}') for scale in self.scale.tolist()]}"


@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Normal noise that the model predicts: output (B, 2K, *) holds K means, then K log-variances; target (B, K, *)."""

    factor: float = 1.0
    """What the predicted standard deviation is multiplied by: see `calibrate`."""

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        mean, log_scale = self._parts(wide(tensor_of(output)))
        check_same_shape("heteroscedastic_gaussian's mean", mean, target)
        return per_example(_normal_log_density((target.to(mean.dtype) - mean) * torch.exp(-log_scale), log_scale))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-density (B,) of the target."""
        return self(output, target)

    def mean(self, output: Tensor) -> Tensor:
        """The first half of the outputs, (B, K, *)."""
        return self._parts(output)[0]

    def deviation(self, output: Tensor) -> Tensor:
        """The predicted standard deviation, (B, K, *)."""
        return self._parts(output)[1].exp()

    def cdf(self, output: Tensor, value: Tensor) -> Tensor:
        """The probability of at most ``value``, element by element."""
        mean, log_scale = self._parts(output)
        below: Tensor = torch.special.ndtr((value - mean) * torch.exp(-log_scale))
        return below

    def tempered(self, factor: float) -> HeteroscedasticGaussian:
        """The same with ``factor`` times the standard deviation."""
        return replace(self, factor=self.factor * factor)

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Means, and logarithms of standard deviations."""
        if output.ndim < 2 or output.shape[1] % 2:
            raise ShapeError(
                "heteroscedastic_gaussian needs an output of shape (B, 2K, ...): K means, then K log-variances; "
                f"got {tuple(output.shape)}."
            )
        mean, log_variance = output.chunk(2, 1)
        return mean, 0.5 * log_variance + math.log(self.factor)


@dataclass(frozen=True)
class Poisson:
    """Counts: output holds the logarithm of the rate, target whole numbers of at least 0 in the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        log_rate = wide(tensor_of(output))
        check_same_shape("poisson", log_rate, target)
        count = target.to(log_rate.dtype)
        log_mass = count * log_rate - log_rate.exp() - torch.lgamma(count + 1.0)
        # No count: NaN, which the ELBO refuses without waiting for the device here.
        return per_example(torch.where((count >= 0) & (count == count.floor()), log_mass, torch.nan))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-probability (B,) of the target."""
        return self(output, target)

    def mean(self, output: Tensor) -> Tensor:
        """The rate."""
        return output.exp()

    def deviation(self, output: Tensor) -> Tensor:
        """The square root of the rate."""
        return torch.exp(0.5 * output)

    def cdf(self, output: Tensor, value: Tensor) -> Tensor:
        """The probability of at most ``value``, element by element."""
        count, rate = torch.broadcast_tensors(value.floor(), output.exp())
        return torch.where(count < 0, 0.0, torch.special.gammaincc(count.clamp_min(0.0) + 1.0, rate))


def gaussian(scale: Scale | None = None, *, outputs: int = 1, start: float = 1.0) -> Gaussian | LearnedNoise:
    """Normal noise around the output, with a scale that is known or, without ``scale``, learned.

    Args:
        scale: The noise's standard deviation, one for all or one per output; None: a parameter of the ELBO,
            which `parameter_groups(elbo, ...)` and ``elbo.parameters()`` include.
        outputs: How many scales to learn: 1, or one for each of the outputs along axis 1.
        start: Where a learned scale starts; 1 suits targets brought to a standard deviation of 1.

    >>> gaussian(1.0)(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.9189])
    >>> gaussian(outputs=2)
    LearnedNoise(gaussian, scale=[1.0, 1.0])
    """
    if scale is None:
        return LearnedNoise(Gaussian(check_positive("start", start)), outputs)
    return Gaussian(_given(scale, outputs))


def student_t(
    scale: Scale | None = None, *, df: float = 4.0, outputs: int = 1, start: float = 1.0
) -> StudentT | LearnedNoise:
    """Student's t noise around the output, for targets with outliers; the scale as in `gaussian`.

    Args:
        scale: The scale, one for all or one per output; None: learned, as in `gaussian`.
        df: Degrees of freedom: fewer have heavier tails; with 2 or fewer the variance is infinite.
        outputs: How many scales to learn.
        start: Where a learned scale starts.
    """
    if scale is None:
        return LearnedNoise(StudentT(check_positive("start", start), df), outputs)
    return StudentT(_given(scale, outputs), df)


def _given(scale: Scale, outputs: int) -> Scale:
    if outputs != 1:
        raise ArgumentError(
            f"outputs says how many scales to learn, and scale={scale!r} is given. Leave one of the two out."
        )
    return tuple(scale) if isinstance(scale, tuple | list) else scale


def heteroscedastic_gaussian() -> HeteroscedasticGaussian:
    """Normal noise that the model predicts for each input: K means, then K log-variances along axis 1.

    >>> heteroscedastic_gaussian()(torch.zeros(1, 2), torch.zeros(1, 1))
    tensor([-0.9189])
    """
    return HeteroscedasticGaussian()


def poisson() -> Poisson:
    """Counts whose log-rate is the output.

    >>> poisson()(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([-1.])
    """
    return Poisson()
