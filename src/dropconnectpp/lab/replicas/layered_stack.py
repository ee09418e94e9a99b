"""Training a stack of networks given as layers: protocols in, trained parameters and losses out; nothing is written.

Shapes: R replicas, B batch, N training examples, I inputs and O units of a layer. A step never touches the host, so
that on a GPU it is one CUDA graph; between steps gates are counted, prices steered and weights removed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dropconnectpp.lab.config.protocol import Protocol, Training
from dropconnectpp.lab.config.pruning import L0, Plan, SparseVD
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.device import tensor_cores
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.noise import draw_uniform
from dropconnectpp.lab.kernels.synapses import StepRule, Synapses
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.layered_data import LayeredExamples
from dropconnectpp.lab.replicas.layered_front import Front, supported_front
from dropconnectpp.lab.replicas.layered_network import apply_weights, run_layers, start
from dropconnectpp.lab.replicas.network import Unit, check_units
from dropconnectpp.lab.replicas.pruning.gating import Gating, Settings, settings_of
from dropconnectpp.lab.replicas.pruning.groups import PlannedGroups
from dropconnectpp.lab.replicas.pruning.l0 import HardConcreteGates
from dropconnectpp.lab.replicas.pruning.magnitude import Masks
from dropconnectpp.lab.replicas.pruning.plan import PlannedGates
from dropconnectpp.lab.replicas.pruning.sparse_vd import NoisyWeights
from dropconnectpp.lab.replicas.stack import EAGER_STEPS, fast_products

TOLD_EVERY = 50
"""Batches between two words on progress."""


def family_of(settings: Settings) -> type[Gating]:
    """What trains the gates of a replica."""
    if isinstance(settings, Plan):
        return PlannedGates if settings.granularity == "synapse" else PlannedGroups
    if isinstance(settings, SparseVD):
        return NoisyWeights
    return HardConcreteGates if isinstance(settings, L0) else Masks


def _segment_of(settings: Settings) -> tuple[type[Gating], str]:
    """What neighbouring replicas must have in common to be trained by one object."""
    return family_of(settings), settings.granularity if isinstance(settings, Plan) else ""


class LayeredStack:
    """R networks given as layers, side by side, that do not know of each other, with the data that they train on."""

    fused = False

    def __init__(self, units: Sequence[Unit], dataset: Dataset, device: torch.device, *, graph: bool = True) -> None:
        check_units(units)
        self.units, self.device, self.protocol = tuple(units), device, units[0].protocol
        protocol = self.protocol
        self.dtype = torch.float64 if protocol.precision == "float64" else torch.float32
        self.examples = LayeredExamples(dataset, protocol, device, self.dtype)
        channels, side = self.examples.shape
        self.shape = protocol.architecture.shape(channels, side, len(dataset.classes))
        self.layers = self.shape.weight_layers()
        mixed = protocol.precision == "mixed" and tensor_cores(device) and self.layers[0].convolution
        self.input_dtype = torch.bfloat16 if mixed else self.dtype
        self.gated = [n for n, one in enumerate(self.layers) if one.layer.gated]
        batch, count = protocol.training.batch_size, len(self.examples.rows)
        if count < batch:
            raise ProtocolError(f"batch_size is {batch} and there are only {count} training examples.")
        self.batches = count // batch
        self.steps = self.batches * protocol.training.epochs
        self.replicas = torch.tensor([unit.replica for unit in self.units], device=device)
        self._make_parameters()
        self.segments = self._segments()
        self._make_buffers()
        self.front = self._front()
        self.epoch = self.batch = 0
        self.on_batch: Callable[[float], None] | None = None  # told the share of the epoch that is done, and may raise
        self.chunk: int | None = None  # images evaluated at a time, where the usual number does not fit the memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._use_graph = graph and device.type == "cuda"
        self._steps_here = 0

    # ------------------------------------------------------------------------------------------ making

    def _make_parameters(self) -> None:
        protocol = self.protocol
        self.weights = start(self.layers, protocol.root_seed, self.replicas, self.dtype)
        self.biases = [w.new_zeros((len(w), w.shape[2])) for w in self.weights]
        trained = [*self.weights, *self.biases]
        self.moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in trained]
        training = protocol.training
        self.rule = StepRule(training.optimiser, training.epsilon, training.epsilon_inside, training.momentum)
        stream = Stream(protocol.root_seed, "plain")  # never drawn from
        self.plain = {
            number: Synapses("plain", self.rule, stream, trained[number], *self.moments[number])
            for number in range(len(trained))
            if number not in self.gated
        }

    def _segments(self) -> list[Gating]:
        settings = [settings_of(protocol) for protocol in self.protocols_in(0)]
        found, first = [], 0
        for (family, _), alike in itertools.groupby(settings, _segment_of):
            rows = slice(first, first + len(list(alike)))
            found.append(
                family(
                    settings[rows],
                    rows,
                    self.replicas[rows],
                    [self.layers[n] for n in self.gated],
                    [self.weights[n][rows] for n in self.gated],
                    [(self.moments[n][0][rows], self.moments[n][1][rows]) for n in self.gated],
                    self.rule,
                    self.protocol.root_seed,
                    self.steps,
                    len(self.examples.rows),
                )
            )
            first = rows.stop
        return found

    def _make_buffers(self) -> None:
        count, device = len(self.units), self.device
        noisy = [segment for segment in self.segments if isinstance(segment, NoisyWeights)]
        self.noisy = noisy
        # What a step uses of gated weights. Where the weights themselves are used, there is nothing to draw.
        self.used = {n: torch.empty_like(self.weights[n]) for n in self.gated}
        self.variances = [[torch.empty_like(one.weight) for one in segment.synapses] for segment in noisy]
        self.now = torch.zeros((count, len(kernels.COLUMNS)), device=device, dtype=self.dtype)
        self.table = torch.zeros((self.batches, *self.now.shape), device=device, dtype=self.dtype)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.position = torch.zeros_like(self.step)
        self.loss_sum = torch.zeros(count, device=device, dtype=self.dtype)
        self.order = torch.zeros((count, len(self.examples.rows)), dtype=torch.int64, device=device)
        self._columns = torch.arange(self.protocol.training.batch_size, device=device)
        rates = [rate for segment in self.segments for rate in segment.dropout_rates]
        self.dropout_keep = 1.0 - torch.tensor(rates, device=device, dtype=self.dtype) if any(rates) else None
        self._events: dict[int, list[Gating]] = {}
        for segment in self.segments:
            for step in segment.event_steps:
                self._events.setdefault(step, []).append(segment)

    def _front(self) -> Front | None:
        """The convolutions that go through the kernels of the paper's network: those without noise of their own."""
        front = supported_front(self.shape, self.device, self.input_dtype)
        noisy = bool(self.noisy) or self.dropout_keep is not None
        if front is None or (noisy and any(number < front.weight_layers for number in self.gated)):
            return None
        return front

    # ---------------------------------------------------------------------------------------- training

    def train_epoch(self) -> Tensor:
        """One pass over the training examples; the mean loss of each replica (R,), in nats per example."""
        self.shuffle()
        self.train_batches()
        self.epoch += 1
        self.batch = 0
        self._count_steps()
        if self.epoch == self.protocol.training.epochs:
            self._act(self.steps)
        return self.loss_sum / self.batches

    def shuffle(self) -> None:
        """Draw the order of examples of the next epoch, and lay out the settings of its steps."""
        order = Stream(self.protocol.root_seed, "order")
        self.order.copy_(order.permutation(self.replicas, self.epoch, self.order.shape[1]))
        protocols = self.protocols_in(self.epoch)
        self._follow(protocols)
        self.table.copy_(torch.from_numpy(self._table(protocols)))

    def protocols_in(self, epoch: int) -> list[Protocol]:
        """Each replica's protocol with the settings of an epoch."""
        return [unit.protocol.in_epoch(epoch) for unit in self.units]

    def _follow(self, protocols: Sequence[Protocol]) -> None:
        """Give the gates the settings of an epoch."""
        for segment in self.segments:
            segment.follow([settings_of(one) for one in protocols[segment.rows]])

    def _table(self, protocols: Sequence[Protocol]) -> Any:
        training, first = self.protocol.training, self.epoch * self.batches
        table = np.zeros(self.table.shape)
        sizes = np.array([protocol.training.step_size for protocol in protocols])
        taken = np.arange(first + 1, first + self.batches + 1)  # Adam counts from 1
        factors = np.array([step_factor(training, step / self.steps) for step in range(first, first + self.batches)])
        table[:, :, kernels.LR] = factors[:, None] * sizes
        table[:, :, kernels.CORRECTION1] = (1.0 - kernels.BETA1**taken)[:, None]
        table[:, :, kernels.CORRECTION2] = (1.0 - kernels.BETA2**taken)[:, None]
        for segment in self.segments:
            segment.columns(first, self.batches, table[:, segment.rows])
        table[:, :, kernels.KL] /= len(self.examples.rows)
        return table

    def train_batches(self) -> None:
        """Take a step on each batch that is left of the epoch, in order."""
        if not self.batch:
            self.position.zero_()
            self.loss_sum.zero_()
        first = self.epoch * self.batches
        with fast_products(self.device, self.dtype):
            for done in range(self.batch, self.batches):
                self._act(first + done)
                self._run_step()
                self.batch = done + 1
                if self.on_batch is not None and (done + 1) % TOLD_EVERY == 0:
                    self.on_batch((done + 1) / self.batches)

    def _act(self, step: int) -> None:
        """What is to be done before a step."""
        for segment in self._events.get(step, ()):
            segment.before_step(step)

    def _run_step(self) -> None:
        if self._use_graph and self._steps_here >= EAGER_STEPS:
            if self._graph is None:
                torch.cuda.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._one_step()
            self._graph.replay()
        else:
            self._one_step()
        self._steps_here += 1

    def _one_step(self) -> None:
        chosen = self.order.index_select(1, self.position * len(self._columns) + self._columns)  # (R, B)
        images, labels = self.examples.gather(chosen, self.input_dtype)
        self.now.copy_(self.table.index_select(0, self.position.view(1))[0])
        for segment in self.segments:
            self.now[segment.rows, kernels.KL].mul_(segment.kl_weights)
            segment.brake(self.now[segment.rows])
        losses, gradients = self.gradients(images, labels)
        self._update(gradients)
        self.loss_sum += losses
        self.position += 1
        self.step += 1

    def draw(self) -> None:
        """The weights that the step uses, by the gates of each segment."""
        for segment in self.segments:
            local = self.noisy.index(segment) if isinstance(segment, NoisyWeights) else None
            for place, number in enumerate(self.gated):
                out = self.used[number][segment.rows]
                if local is not None:
                    out.copy_(self.weights[number][segment.rows])
                    out = self.variances[local][place]
                segment.draw(place, self.now[segment.rows], self.step, out)

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Mean losses (R,) of a step, and the gradients by used weights, biases and variances, in this order."""
        with torch.no_grad():
            self.draw()
        used = [self.used.get(n, weight) for n, weight in enumerate(self.weights)]
        leaves = [*used, *self.biases, *itertools.chain.from_iterable(self.variances)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        count = len(self.layers)
        weights, biases, variances = leaves[:count], leaves[count : 2 * count], leaves[2 * count :]
        with torch.enable_grad():
            affine, front = self._affine(weights, biases, variances), self.front
            maps = images if front is None else front.run(images, weights, biases)
            logits = run_layers(self.shape, maps, affine, biases, 0 if front is None else front.layers)
            flat = cross_entropy(logits.to(self.dtype).flatten(0, 1), labels.flatten(), reduction="none")
            losses = flat.view(labels.shape).mean(1)
            found = torch.autograd.grad(losses.sum(), leaves)
        return losses.detach(), list(found)

    def _affine(
        self, weights: list[Tensor], biases: list[Tensor], variances: list[Tensor]
    ) -> Callable[[int, Tensor, bool], Tensor]:
        def affine(number: int, x: Tensor, with_bias: bool) -> Tensor:
            one, bias = self.layers[number], biases[number] if with_bias else None
            gated = number in self.used
            if gated and number and self.dropout_keep is not None:
                x = self._drop_inputs(one.name, x)
            out = apply_weights(one, x, weights[number], bias)
            return self._add_noise(number, x, out, variances) if gated and self.noisy else out

        return affine

    def _drop_inputs(self, name: str, x: Tensor) -> Tensor:
        assert self.dropout_keep is not None
        keep = self.dropout_keep.view(-1, *[1] * (x.ndim - 1))
        like = torch.empty(x.shape, device=x.device, dtype=self.dtype)
        noise = draw_uniform(Stream(self.protocol.root_seed, f"dropout:{name}"), like, self.replicas, self.step)
        return x * ((noise < keep) / keep).to(x.dtype)

    def _add_noise(self, number: int, x: Tensor, out: Tensor, variances: list[Tensor]) -> Tensor:
        """Local noise for the segments that have it."""
        place, pieces, last = self.gated.index(number), [], 0
        for own, segment in enumerate(self.noisy):
            rows = segment.rows
            if rows.start > last:
                pieces.append(out[last : rows.start])
            variance = apply_weights(
                self.layers[number], x[rows].square(), variances[own * len(self.gated) + place], None
            )
            pieces.append(segment.add_noise(place, out[rows], variance, self.step))
            last = rows.stop
        if last < len(out):
            pieces.append(out[last:])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @torch.no_grad()
    def _update(self, gradients: list[Tensor]) -> None:
        count = len(self.layers)
        for number, synapses in self.plain.items():
            kernels.update(synapses, self.now, self.replicas, self.step, gradients[number])
        for segment in self.segments:
            own = self.noisy.index(segment) if isinstance(segment, NoisyWeights) else None
            for place, number in enumerate(self.gated):
                variance = None if own is None else gradients[2 * count + own * len(self.gated) + place]
                segment.update(place, self.now[segment.rows], self.step, gradients[number][segment.rows], variance)

    def _count_steps(self) -> None:
        for segment in self.segments:
            segment.step = self.epoch * self.batches

    # ---------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """All that training resumes from, on the CPU."""
        tensors = [*self.weights, *self.biases, *itertools.chain.from_iterable(self.moments)]
        return {
            "epoch": self.epoch,
            "step": int(self.step),
            "tensors": [value.detach().cpu().clone() for value in tensors],
            "segments": [segment.state() for segment in self.segments],
            "batch": self.batch,
            "loss_sum": self.loss_sum.cpu().clone(),
        }

    @property
    def state_bytes(self) -> int:
        """Roughly the size of `state`."""
        numbers = 3 * sum(value.numel() for value in [*self.weights, *self.biases])
        gates = [one for segment in self.segments for s in segment.synapses for one in (s.gate,) if one is not None]
        return (numbers + 3 * sum(gate.numel() for gate in gates)) * self.now.element_size()

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from what `state` gave, for the same units."""
        self.epoch = state["epoch"]
        self.step.fill_(state["step"])
        if batch := state.get("batch", 0):  # an epoch was interrupted
            self.batch = batch
            self.position.fill_(batch)
            self.loss_sum.copy_(state["loss_sum"])
        tensors = [*self.weights, *self.biases, *itertools.chain.from_iterable(self.moments)]
        for value, known in zip(tensors, state["tensors"], strict=True):
            value.copy_(known)
        for segment, known in zip(self.segments, state["segments"], strict=True):
            segment.load_state(known)
        if not self.batch and self.epoch:
            self._follow(self.protocols_in(self.epoch - 1))  # measured as trained
        self._count_steps()


def step_factor(training: Training, share: float) -> float:
    """What the step size is multiplied by when a share of the steps is over.

    >>> [step_factor(Training(schedule="second-half"), share) for share in (0.0, 0.5, 0.75, 1.0)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if training.schedule == "second-half":
        return min(1.0, 2.0 * (1.0 - share))
    return 0.5 * (1.0 + math.cos(math.pi * share)) if training.schedule == "cosine" else 1.0
