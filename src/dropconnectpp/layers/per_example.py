"""One mask per example, in blocks of bounded memory: masks are redrawn from a seed, never kept.

Shapes: B examples, b examples of one block, K weightings, S the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropconnectpp.errors import ShapeError
from dropconnectpp.functional import draw_antithetic_mask, draw_mask, relax_mask
from dropconnectpp.layers.sampling import Gates, NoiseSource, transformed

if TYPE_CHECKING:
    from dropconnectpp.layers.base import MaskedLayer

BLOCK_ELEMENTS = 2**23
"""The most mask elements that exist at a time (one example's, if its masks are larger)."""


class ExampleGates:
    """The gates of a layer for each example in turn: the same ones whenever they are asked for."""

    def __init__(self, layer: MaskedLayer, gates: Gates) -> None:
        self.names = layer.synapse_names
        self.logits = {name: layer.logit(name).detach() for name in self.names}
        self.shapes = {name: getattr(layer, name).shape for name in self.names}
        self.kept = {name: layer.kept(name) for name in self.names}
        self.given = {"weight": gates.weight, "bias": gates.bias} if gates.kind == "mask" else None
        self.seeds = {"weight": gates.seed, "bias": gates.bias_seed}
        self.mirrored = gates.mirrored
        self.temperature = layer.temperature if gates.relaxed else None
        self.straight_through = layer.straight_through
        self.device = layer.weight.device

    def blocks(self, batch: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Slices of the batch with their gates (b, *S) for each parameter."""
        step = max(1, BLOCK_ELEMENTS // self.shapes["weight"].numel())
        # A stream for each parameter: layers may share one and not the other.
        streams = {name: torch.Generator(self.device) for name in self.names}
        for name, stream in streams.items():
            seed = self.seeds[name]
            if seed is not None:
                stream.manual_seed(seed)
        for start in range(0, batch, step):
            part = slice(start, min(start + step, batch))
            yield part, {name: self._block(name, part, stream) for name, stream in streams.items()}

    def _block(self, name: str, part: slice, generator: torch.Generator) -> Tensor:
        logit = self.logits[name]
        if self.given is not None:
            gate = self.given[name]
            assert gate is not None
            gate = gate[part]
        else:
            count = part.stop - part.start
            dtype = torch.float64 if logit.dtype == torch.float64 else torch.float32
            shape = (count, *self.shapes[name])
            noise = torch.rand(shape, device=self.device, dtype=dtype, generator=generator)
            if self.temperature is not None:
                gate = relax_mask(logit, noise, self.temperature)
            else:
                gate = (draw_antithetic_mask if self.mirrored else draw_mask)(logit, noise)
        kept = self.kept[name]
        return gate if kept is None else gate * kept

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_n c_kn z_n for K weightings (K, B) of the examples: (K, *S) for each parameter."""
        totals = {
            name: torch.zeros((weights.shape[0], *self.shapes[name]), device=self.device, dtype=weights.dtype)
            for name in self.names
        }
        for part, gates in self.blocks(weights.shape[1]):
            for name, gate in gates.items():
                flat = gate.reshape(gate.shape[0], -1).to(weights.dtype)
                totals[name] += (weights[:, part] @ flat).view_as(totals[name])
        return totals

    def slope(self, name: str, gate: Tensor) -> Tensor | None:
        """d gate / d logit as the layer's estimator has it; None where it takes the score instead."""
        if self.temperature is not None:
            return gate * (1.0 - gate) / self.temperature
        if self.straight_through:
            kept = self.kept[name]
            slope = torch.sigmoid(self.logits[name]) * torch.sigmoid(-self.logits[name])
            return slope if kept is None else slope * kept
        return None


class _PerExample(torch.autograd.Function):
    """Run a layer block by block with fresh masks; backward redraws them and goes block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: MaskedLayer,
        gates: ExampleGates,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_logit: Tensor | None,
        bias_logit: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.gates = layer, gates
        ctx.autocast = _autocast_state(input.device.type)
        # The logits too, so that a change of them is noticed: backward redraws the masks by them.
        ctx.save_for_backward(input, weight, bias, *gates.logits.values())
        outputs = [
            layer.operate_each(input[part], *_gated(masks, weight, bias))
            for part, masks in gates.blocks(input.shape[0])
        ]
        return torch.cat(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *_ = ctx.saved_tensors
        parameters = {"weight": weight, **({} if bias is None else {"bias": bias})}
        gates: ExampleGates = ctx.gates
        grad_input = torch.empty_like(input) if ctx.needs_input_grad[2] else None
        grads = {name: torch.zeros_like(p) for name, p in parameters.items()}
        logit_grads: dict[str, Tensor] = {}
        for part, masks in gates.blocks(input.shape[0]):
            with torch.enable_grad(), torch.autocast(input.device.type, **ctx.autocast):
                x = input[part].detach().requires_grad_(grad_input is not None)
                gated = [g.detach().requires_grad_() for g in _gated(masks, weight, bias) if g is not None]
                output = ctx.layer.operate_each(x, gated[0], gated[1] if len(gated) > 1 else None)
            wanted = ([x] if grad_input is not None else []) + gated
            found = list(torch.autograd.grad(output, wanted, gradient[part]))
            if grad_input is not None:
                grad_input[part] = found.pop(0)
            for (name, parameter), grad in zip(parameters.items(), found, strict=True):
                grads[name] += (grad * masks[name]).sum(0)
                slope = gates.slope(name, masks[name])
                if slope is not None:
                    part_grad = (grad * parameter * slope).sum(0)
                    logit_grads[name] = logit_grads[name] + part_grad if name in logit_grads else part_grad
        return (
            None,
            None,
            grad_input,
            grads["weight"],
            grads.get("bias"),
            logit_grads.get("weight"),
            logit_grads.get("bias"),
        )


def _gated(masks: dict[str, Tensor], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight * masks["weight"], None if bias is None else bias * masks["bias"]


def _autocast_state(device_type: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_per_example(layer: MaskedLayer, input: Tensor, gates: Gates) -> Tensor:
    """The layer's output before its activation, each example through its own mask."""
    layer._examples = input.shape[0]
    if transformed():  # torch.func sees through plain operations alone: one block of everything
        return _run_plainly(layer, input, gates)
    if gates.weight is not None and gates.weight.shape[0] != input.shape[0]:
        raise ShapeError(f"forced_masks gave {gates.weight.shape[0]} masks for a batch of {input.shape[0]} examples.")
    if gates.kind == "example" and gates.seed is None:
        source = NoiseSource()
        gates = replace(gates, seed=source.seed(), bias_seed=source.seed())
    logits = {name: layer.logit(name) for name in layer.synapse_names} if layer.pathwise else {}
    output: Tensor = _PerExample.apply(  # type: ignore[no-untyped-call]
        layer,
        ExampleGates(layer, gates),
        input,
        layer.weight,
        layer.bias,
        logits.get("weight"),
        logits.get("bias"),
    )
    return output


def _run_plainly(layer: MaskedLayer, input: Tensor, gates: Gates) -> Tensor:
    given = {"weight": gates.weight, "bias": gates.bias} if gates.kind == "mask" else {}
    seeds = {"weight": gates.seed, "bias": gates.bias_seed}
    gated: list[Tensor | None] = []
    for name in layer.synapse_names:
        parameter, logit, kept = getattr(layer, name), layer.logit(name), layer.kept(name)
        mask, seed = given.get(name), seeds[name]
        if mask is None:
            generator = None if seed is None else torch.Generator(parameter.device).manual_seed(seed)
            dtype = torch.float64 if logit.dtype == torch.float64 else torch.float32
            shape = (input.shape[0], *parameter.shape)
            noise = torch.rand(shape, device=parameter.device, dtype=dtype, generator=generator)
            mask = (draw_antithetic_mask if gates.mirrored else draw_mask)(logit, noise)
        if layer.temperature is not None and gates.relaxed:
            gate = relax_mask(logit, noise, layer.temperature)
        else:
            pi = torch.sigmoid(logit)
            gate = mask + (pi - pi.detach() if layer.straight_through else 0.0)
        gated.append(parameter * gate if kept is None else parameter * gate * kept)
    weight, bias = [*gated, None][:2]
    assert weight is not None
    return layer.operate_each(input, weight, bias)
