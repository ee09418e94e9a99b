"""A layer's pass with one mask per example, forward and backward: block by block, or by kernels without blocks.

Shapes: B examples, b examples of one block, O out, I in, S the shape of a parameter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.errors import ShapeError
from dropconnectpp.functional import relax_mask
from dropconnectpp.layers.affine import LinearOperation, Operation
from dropconnectpp.layers.per_example import ExampleGates
from dropconnectpp.ops import gpu_examples
from dropconnectpp.ops.drawn import transformed


class _PerExample(torch.autograd.Function):
    """Run a layer block by block with fresh masks; backward redraws them and goes block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Operation,
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
        ctx.save_for_backward(input, weight, bias, *(logit.detach() for logit in gates.logits.values()))
        outputs = [
            layer.operate_each(input[part], *_gated(gates.spread(masks), weight, bias))
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
        for part, drawn in gates.blocks(input.shape[0]):
            masks = gates.spread(drawn)
            with torch.enable_grad(), torch.autocast(input.device.type, **ctx.autocast):
                x = input[part].detach().requires_grad_(grad_input is not None)
                gated = [g.detach().requires_grad_() for g in _gated(masks, weight, bias) if g is not None]
                output = ctx.layer.operate_each(x, gated[0], gated[1] if len(gated) > 1 else None)
            wanted = ([x] if grad_input is not None else []) + gated
            found = list(torch.autograd.grad(output, wanted, gradient[part]))
            if grad_input is not None:
                grad_input[part] = found.pop(0)
            by_name = dict(zip(parameters, found, strict=True))
            for name, grad in by_name.items():
                grads[name] += (grad * masks[name]).sum(0)
            if not gates.pathwise:
                continue
            by_gate = gates.gather({name: grad * parameters[name] for name, grad in by_name.items()})
            for name, grad in by_gate.items():
                grad_gate = gates.grad_gate(name, drawn[name])
                if grad_gate is not None:
                    part_grad = (grad * grad_gate).sum(0)
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


class _LinearInBlocks(torch.autograd.Function):
    """`_PerExample` for a linear layer with binary masks on the CPU: nothing of a block's size is made but once.

    An outer product is an example's gradient by its masked weight, and its sum over the examples, which straight
    through is the gates', a matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: LinearOperation,
        gates: ExampleGates,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_logit: Tensor | None,
        bias_logit: Tensor | None,
    ) -> Tensor:
        ctx.gates = gates
        # The logits too, so that a change of them is noticed: backward redraws the masks by them.
        ctx.save_for_backward(input, weight, bias, *(logit.detach() for logit in gates.logits.values()))
        output = input.new_empty((input.shape[0], weight.shape[0]))
        room = _Room(weight)
        for part, masks in gates.blocks(input.shape[0]):
            gated = room.first(masks["weight"]).mul_(weight)
            biases = None if bias is None else bias * masks["bias"]
            output[part] = layer.operate_each(input[part], gated, biases)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *_ = ctx.saved_tensors
        gates: ExampleGates = ctx.gates
        grad_input = torch.empty_like(input) if ctx.needs_input_grad[2] else None
        grad_weight, grad_bias = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        room = _Room(weight)
        for part, masks in gates.blocks(input.shape[0]):
            x, upstream, gate = input[part], gradient[part], room.first(masks["weight"])
            outer = torch.mul(upstream.unsqueeze(2), x.unsqueeze(1), out=room.second(len(x))).mul_(gate)
            grad_weight += outer[0] if len(x) == 1 else outer.sum(0)
            if grad_bias is not None:
                grad_bias += (upstream * masks["bias"]).sum(0)
            if grad_input is not None:
                grad_input[part] = torch.matmul(upstream.unsqueeze(1), gate.mul_(weight)).squeeze(1)
        found: list[Tensor | None] = [None, None]
        if gates.through:
            by_weight, by_bias = gates.grad_gate("weight", grad_weight), None
            assert by_weight is not None
            found[0] = (gradient.T @ input).mul_(weight).mul_(by_weight)
            if bias is not None:
                by_bias = gates.grad_gate("bias", bias)
                assert by_bias is not None
                found[1] = gradient.sum(0).mul_(bias).mul_(by_bias)
        return None, None, grad_input, grad_weight, grad_bias, *found


class _Room:
    """Memory for the gates of one block as numbers, and for one tensor more of its size, used again for the next."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._rooms: list[Tensor | None] = [None, None]

    def _room(self, index: int, count: int) -> Tensor:
        known = self._rooms[index]
        if known is None or known.shape[0] < count:
            known = self._rooms[index] = self.weight.new_empty((count, *self.weight.shape))
        return known[:count]

    def first(self, mask: Tensor) -> Tensor:
        """A block's masks as numbers."""
        return self._room(0, mask.shape[0]).copy_(mask)

    def second(self, count: int) -> Tensor:
        """Room for as many examples."""
        return self._room(1, count)


def _in_blocks(layer: Operation, gates: ExampleGates, input: Tensor) -> bool:
    """Whether `_LinearInBlocks` can run a layer."""
    plain = isinstance(layer, LinearOperation) and gates.members is None and gates.temperature is None
    if not plain or input.ndim != 2 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [input, layer.weight, *([] if layer.bias is None else [layer.bias])]
    return all(t.dtype == layer.weight.dtype and t.device == input.device for t in tensors)


def _gated(masks: dict[str, Tensor], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight * masks["weight"], None if bias is None else bias * masks["bias"]


def _autocast_state(device_type: str) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }


def run_each(layer: Operation, gates: ExampleGates, input: Tensor) -> Tensor:
    """A layer's output before its activation, each example through its own mask."""
    if gates.draw is not None:
        gates.draw.examples.update(dict.fromkeys(gates.streams.values(), input.shape[0]))
    if transformed():  # plain operations alone: one block of everything
        return _run_plainly(layer, gates, input)
    if gates.given is not None:
        masks = gates.given["weight"]
        assert masks is not None
        if masks.shape[0] != input.shape[0]:
            raise ShapeError(f"forced_masks gave {masks.shape[0]} masks for a batch of {input.shape[0]} examples.")
    if isinstance(layer, LinearOperation) and input.ndim == 2:
        drawn = gates.in_registers("weight")
        if drawn is not None and gpu_examples.supported(drawn, layer.weight, input.contiguous()):
            return _run_in_registers(layer, gates, drawn, input)
    logits = gates.logits if gates.pathwise else {}
    run = _LinearInBlocks if _in_blocks(layer, gates, input) else _PerExample
    output: Tensor = run.apply(  # type: ignore[no-untyped-call]
        layer, gates, input, layer.weight, layer.bias, logits.get("weight"), logits.get("bias")
    )
    return output


def _run_in_registers(layer: Operation, gates: ExampleGates, masks: gpu_examples.Masks, input: Tensor) -> Tensor:
    """The weight's masks by kernels that never write them; a bias has no more gates than the layer has outputs."""
    autocast = _autocast_state(input.device.type)
    dtype = autocast["dtype"] if autocast["enabled"] else torch.result_type(input, layer.weight)
    output = gpu_examples.masked_product(input, layer.weight, gates.logits["weight"], masks, gates.through, dtype)
    if layer.bias is None:
        return output
    ((_, drawn),) = replace(gates, logits={"bias": gates.logits["bias"]}).blocks_of(input.shape[0], input.shape[0])
    gate = drawn["bias"].to(layer.bias.dtype)
    if gates.through:
        pi = torch.sigmoid(gates.logits["bias"])
        learned = pi - pi.detach()
        kept = gates.kept["bias"]
        gate = gate + (learned if kept is None else learned * kept)
    return output + (layer.bias * gate).to(dtype)


def _run_plainly(layer: Operation, gates: ExampleGates, input: Tensor) -> Tensor:
    drawn: dict[str, Tensor] = {}
    for name in gates.names:
        logit, kept = gates.logits[name], gates.kept[name]
        if gates.given is not None:
            mask = gates.given[name]
            assert mask is not None
        else:
            noise = gates.noise(name, input.shape[0])
            mask = gates.gate(name, noise)
        if gates.temperature is not None:
            gate = relax_mask(logit, noise, gates.temperature)
        else:
            pi = torch.sigmoid(logit)
            gate = mask + (pi - pi.detach() if gates.through else 0.0)
        drawn[name] = gate if kept is None else gate * kept
    return layer.operate_each(input, *_gated(gates.spread(drawn), layer.weight, layer.bias))
