"""Gates that a draw defines: one seed for a pass, one stream for each parameter, drawn again wherever needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import _compat, functional
from dropconnectpp.ops import gpu, gpu_gates, noise, registered
from dropconnectpp.ops.gated_weight import multiply, through_mask
from dropconnectpp.ops.gpu_gates import Part, Tally


def transformed() -> bool:
    """Whether torch.compile or a torch.func transform is watching: then only operations that they know will do."""
    return torch.compiler.is_compiling() or _compat.under_transform()


@dataclass(frozen=True, eq=False)
class Synapses:
    """What gates one parameter: its log-odds, what pruning left of it, and its stream of random numbers."""

    logit: Tensor
    kept: Tensor | None
    stream: int


@dataclass(frozen=True, eq=False)
class Draw:
    """One draw of every gate of a network: a value, since whoever has it draws the same gates again.

    Without a seed the numbers come from torch's own generator; then, and on the CPU, where drawing costs more than
    memory, masks are remembered for the draw's lifetime.
    """

    seed: Tensor | None
    masks: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    examples: dict[int, int] = field(default_factory=dict, repr=False)
    """How many examples had a mask each, by stream."""

    def anew(self) -> Draw:
        """The same draw, with no mask remembered."""
        return self if self.seed is None else Draw(self.seed)

    def seed_on(self, device: torch.device) -> Tensor:
        """The seed as a tensor where the kernels of a device can read it."""
        assert self.seed is not None
        return self.seed if self.seed.device == device else self.seed.to(device)

    def mask(self, shape: torch.Size, synapses: Synapses, mirrored: bool = False) -> Tensor:
        """The boolean mask of one parameter, False where it was pruned."""
        key = (synapses.stream, mirrored)
        found = self.masks.get(key)
        if found is None:
            logit = synapses.logit.detach()
            if self.seed is None:
                u = self.uniform(shape, synapses.stream, noise.noise_dtype(logit.dtype), logit.device)
                found = (functional.draw_antithetic_mask if mirrored else functional.draw_mask)(logit, u)
            else:
                found = self._binary(logit, shape, synapses.stream, mirrored)
            if synapses.kept is not None:
                found = found & synapses.kept
            if self.seed is None or found.device.type == "cpu":
                self.masks[key] = found
        return found

    def _binary(self, logit: Tensor, shape: torch.Size, stream: int, mirrored: bool) -> Tensor:
        seed = self.seed_on(logit.device)
        if torch.compiler.is_compiling():
            traced: Tensor = registered.binary(logit, shape, seed, stream, mirrored)
            return traced
        return noise.binary(logit, shape, seed, stream, mirrored)

    def uniform(self, shape: torch.Size, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The uniform noise of one parameter."""
        if self.seed is not None:
            if torch.compiler.is_compiling():
                traced: Tensor = registered.uniform(shape, self.seed_on(device), stream, dtype == torch.float64)
                return traced
            return noise.uniform(shape, self.seed_on(device), stream, dtype, device)
        key = (stream, "noise")
        if key not in self.masks:
            self.masks[key] = torch.rand(shape, dtype=dtype, device=device)
        return self.masks[key]

    def example_noise(
        self, shape: torch.Size, stream: int, dtype: torch.dtype, device: torch.device, step: int
    ) -> Tensor:
        """The uniform noise of one parameter for each example, (B, *S), where blocks of ``step`` would draw it."""
        if self.seed is None:
            return self.uniform(shape, stream, dtype, device)
        seed = self.seed_on(device)
        if torch.compiler.is_compiling():
            traced: Tensor = registered.examples(shape, seed, stream, dtype == torch.float64, step)
            return traced
        return noise.examples(shape, seed, stream, dtype, device, step)

    def normal(self, shape: torch.Size, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal noise, for instance of one layer's outputs."""
        if self.seed is None:
            return torch.randn(shape, dtype=dtype, device=device)
        if torch.compiler.is_compiling():
            traced: Tensor = registered.normal(shape, self.seed_on(device), stream, dtype == torch.float64)
            return traced.to(dtype)
        return noise.normal(shape, self.seed_on(device), stream, dtype, device)


@dataclass(frozen=True, eq=False)
class Gating:
    """How one pass gates a layer's parameters."""

    draw: Draw
    synapses: tuple[Synapses, ...]
    mirrored: bool
    through: bool
    """Whether the gradient goes on to the logits, as though z were pi~."""
    dtype: torch.dtype | None
    """What the product is written in; None: as the parameter is."""
    tally: Tally | None = None
    """What a kernel works out beside it, where this pass is the one that does."""

    def settings(self, synapses: Synapses) -> tuple[Tensor, Tensor | None, Tensor, int, bool]:
        """Log-odds, what pruning left, seed, stream and arm of one parameter."""
        seed = self.draw.seed_on(synapses.logit.device)
        return synapses.logit.detach(), synapses.kept, seed, synapses.stream, self.mirrored


class _Drawn(torch.autograd.Function):
    """W z for a layer's parameters, weights and biases in one node; the masks stay until backward."""

    @staticmethod
    def forward(ctx: Any, gating: Gating, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(gating.synapses)
        ctx.gating = gating
        products: list[Tensor] = []
        masks: list[Tensor] = []
        for parameter, synapses in zip(tensors[:count], gating.synapses, strict=True):
            mask = gating.draw.mask(parameter.shape, synapses, gating.mirrored)
            out = torch.empty_like(parameter, dtype=gating.dtype or parameter.dtype)
            products.append(multiply(parameter, mask, out))
            masks.append(mask)
        ctx.save_for_backward(*tensors, *masks)
        return tuple(products)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gating: Gating = ctx.gating
        count = len(gating.synapses)
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        by_parameter: list[Tensor | None] = []
        by_logit: list[Tensor | None] = []
        for index, (synapses, gradient) in enumerate(zip(gating.synapses, gradients, strict=True)):
            parameter, logit, mask = saved[index], saved[count + index], saved[2 * count + index]
            wanted = needed[index], needed[count + index] and gating.through
            found = through_mask(gradient, parameter, logit, mask, synapses.kept, wanted)
            by_parameter.append(found[0])
            by_logit.append(found[1])
        return None, *by_parameter, *by_logit


class _DrawnByKernels(torch.autograd.Function):
    """`_Drawn` on a GPU: the masks are drawn again in backward. With a tally a number more, which stands for it."""

    @staticmethod
    def forward(ctx: Any, gating: Gating, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gating = gating
        ctx.set_materialize_grads(False)
        # The logits too, so that a change of them before backward is noticed.
        ctx.save_for_backward(*tensors)
        products = gpu_gates.gated(*_parts(gating, tensors), gating.mirrored, gating.dtype, gating.tally)
        if gating.tally is None:
            return tuple(products)
        return *products, torch.empty((), device=tensors[0].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gating: Gating = ctx.gating
        tensors, needed, count = ctx.saved_tensors, ctx.needs_input_grad[1:], len(gating.synapses)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, gradients[:count], strict=False)]
        logits = any(needed[count:])
        upstream = gradients[count] if gating.tally is not None and logits else None
        by_parameter, by_logit = gpu_gates.gated_backward(
            grads,
            *_parts(gating, tensors),
            gating.mirrored,
            (any(needed[:count]), gating.through and logits),
            None if upstream is None else gating.tally,
            upstream,
        )
        return None, *by_parameter, *by_logit


def _parts(gating: Gating, tensors: tuple[Tensor, ...]) -> tuple[list[Part], Tensor]:
    """What a launch takes of a layer, and the seed."""
    synapses, count = gating.synapses, len(gating.synapses)
    parts: list[Part] = [(tensors[i], tensors[count + i], s.kept, s.stream) for i, s in enumerate(synapses)]
    return parts, gating.draw.seed_on(tensors[0].device)


def draw_gated(parameters: tuple[Tensor, ...], gating: Gating) -> tuple[Tensor, ...]:
    """The masked parameters of one draw, differentiable by them and, straight through, by the logits.

    Where the gating has a tally, its anchor is set, and the logits' gradient has KL and score in it.
    """
    logits = [synapses.logit for synapses in gating.synapses]
    tally = gating.tally
    if not gating.through and tally is None:
        logits = [logit.detach() for logit in logits]
    if gating.draw.seed is None or not gpu.supported(*parameters, *logits):
        drawn: tuple[Tensor, ...] = _Drawn.apply(gating, *parameters, *logits)  # type: ignore[no-untyped-call]
        return drawn
    found: tuple[Tensor, ...] = _DrawnByKernels.apply(gating, *parameters, *logits)  # type: ignore[no-untyped-call]
    if tally is None:
        return found
    tally.anchor, tally.used = found[-1], True
    return found[:-1]


def gated_plainly(parameters: tuple[Tensor, ...], gating: Gating) -> tuple[Tensor, ...]:
    """`draw_gated` in operations that torch.compile and the transforms of `torch.func` see through."""
    if torch.compiler.is_compiling():
        return tuple(
            registered.gated(
                parameter, *_with_gradient(gating, synapses), gating.through, gating.dtype or parameter.dtype
            )
            for parameter, synapses in zip(parameters, gating.synapses, strict=True)
        )
    products = []
    for parameter, synapses in zip(parameters, gating.synapses, strict=True):
        dtype = noise.noise_dtype(synapses.logit.dtype)
        u = gating.draw.uniform(parameter.shape, synapses.stream, dtype, parameter.device)
        threshold = functional.draw_antithetic_mask if gating.mirrored else functional.draw_mask
        gate = threshold(synapses.logit.detach(), u).to(parameter.dtype)
        if gating.through:
            pi = torch.sigmoid(synapses.logit)
            gate = gate + (pi - pi.detach())
        products.append(parameter * gate if synapses.kept is None else parameter * gate * synapses.kept)
    return tuple(products)


def _with_gradient(gating: Gating, synapses: Synapses) -> tuple[Tensor, Tensor | None, Tensor, int, bool]:
    settings = gating.settings(synapses)
    return (synapses.logit, *settings[1:]) if gating.through else settings
