"""Training a stack of replicas: protocols in, trained parameters and losses out; nothing is written.

Shapes: R replicas, B batch, N training examples. The data set stays on the device as uint8, and a step
never touches the host, so that on a GPU it is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.data.normalisation import ChannelStatistics, channel_statistics, standardise
from dropconnectpp.lab.device import as_tensor
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.kernels.images import gather_standardised
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas import fused_step
from dropconnectpp.lab.replicas.convolutions import features
from dropconnectpp.lab.replicas.network import Networks, Shape, Unit, check_units, log_likelihoods

EAGER_STEPS = 3
"""Steps before a CUDA graph is captured: libraries set themselves up in the first ones."""


class Examples:
    """A data set on a device: what is trained on and what is evaluated on."""

    def __init__(self, dataset: Dataset, protocol: Protocol, device: torch.device) -> None:
        self.images = as_tensor(dataset.train.images, device)
        self.labels = as_tensor(dataset.train.labels, device)
        count, holdout = len(dataset.train), protocol.training.holdout
        if not 0 <= holdout < count:
            raise ProtocolError(f"holdout must be less than the {count} training examples, got {holdout}.")
        self.rows = torch.arange(count, device=device)
        if holdout:
            # The same examples for all replicas and methods, which are compared on them.
            shuffled = Stream(protocol.root_seed, "holdout").permutation(torch.zeros_like(self.rows[:1]), 0, count)[0]
            self.rows = shuffled[holdout:]
            self.test_images, self.test_labels = self.images[shuffled[:holdout]], self.labels[shuffled[:holdout]]
        else:
            self.test_images = as_tensor(dataset.test.images, device)
            self.test_labels = as_tensor(dataset.test.labels, device)
        self.normalisation = protocol.normalisation
        self.statistics: ChannelStatistics | None = None
        if protocol.normalisation.scope == "data-set":
            self.statistics = channel_statistics(self.images[self.rows])

    def gather(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:  # (R, B) -> (R, B, C, H, W)
        """Images of each replica's batch as the networks see them."""
        return gather_standardised(self.images, chosen, self.normalisation, self.statistics, dtype)

    def standardise(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images as the network sees them."""
        return standardise(images, self.normalisation, statistics=self.statistics, dtype=dtype)


class Stack(Networks):
    """Networks with the data set that they train on."""

    def __init__(self, units: Sequence[Unit], dataset: Dataset, device: torch.device, *, graph: bool = True) -> None:
        check_units(units)
        protocol = units[0].protocol
        self.examples = Examples(dataset, protocol, device)
        channels, side, width = dataset.shape
        if side != width:
            raise ProtocolError(f"images must be square, got {side} x {width}.")
        shape = Shape(protocol.architecture, channels, side, len(dataset.classes))
        whole, few = len(self.examples.rows), protocol.training.examples
        if few > whole:
            raise ProtocolError(f"examples is {few} and there are only {whole} training examples. 0 takes all.")
        count = few or whole
        super().__init__(units, shape, count, device)
        self.position = torch.zeros_like(self.step)
        self.loss_sum = torch.zeros(len(self.units), device=device, dtype=self.dtype)
        self.on_batch: Callable[[float], None] | None = None  # told the share of the epoch that is done, and may raise
        self.chunk: int | None = None  # images evaluated at a time, where the usual number does not fit the memory
        batch = protocol.training.batch_size
        if count < batch:
            raise ProtocolError(f"batch_size is {batch} and there are only {count} training examples.")
        self.batches = [batch] * (count // batch)
        if protocol.training.last_batch == "keep" and count % batch:
            self.batches.append(count % batch)
        self.order = torch.zeros((len(self.units), count), dtype=torch.int64, device=device)
        self._subset: Tensor | None = None
        """Where the examples of each replica are, (R, N), if they are not all."""
        if few:
            self._subset = Stream(protocol.root_seed, "subset").permutation(self.replicas, 0, whole)[:, :count]
        self._columns = torch.arange(batch, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._use_graph = graph and device.type == "cuda"
        self.fused = fused_step.supported(self)
        self._steps_here = 0

    # -------------------------------------------------------------------------------------- training

    def train_epoch(self) -> Tensor:
        """One pass over the training examples; the mean loss of each replica (R,), in nats per example."""
        self.begin_epoch()
        self.shuffle()
        self.train_batches()
        self.epoch += 1
        self.batch = 0
        return self.loss_sum / sum(self.batches)

    def shuffle(self) -> None:
        """Draw the order of examples of the next epoch."""
        stream = Stream(self.protocol.root_seed, "order")
        order = stream.permutation(self.replicas, self.epoch, self.order.shape[1])
        self.order.copy_(order if self._subset is None else self._subset.gather(1, order))

    def train_batches(self) -> None:
        """Take a step on each batch that is left of the epoch, in order."""
        if not self.batch:
            self.position.zero_()
            self.loss_sum.zero_()
        with fast_products(self.device, self.dtype):
            for done, batch in enumerate(self.batches[self.batch :], self.batch + 1):
                self._run_step(batch)
                self.batch = done
                if self.on_batch is not None:
                    self.on_batch(done / len(self.batches))

    def repeat_batches(self) -> None:
        """Take every step of an epoch once more, in the same order: to time them."""
        self.batch = 0
        self.train_batches()

    def _run_step(self, batch: int) -> None:
        whole = batch == self.protocol.training.batch_size
        if self._use_graph and whole and self._steps_here >= EAGER_STEPS:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._one_step(batch)
            self._graph.replay()
        else:
            self._one_step(batch)
        self._steps_here += 1

    def _one_step(self, batch: int) -> None:
        chosen = self.examples.rows[self.order[:, self.position + self._columns[:batch]]]  # (R, B)
        images = self.examples.gather(chosen, self.input_dtype)
        labels = self.examples.labels[chosen]
        rewards = fused_step.take(self, images, labels) if self.fused else self._plain_step(images, labels)
        for segment in self.segments:
            segment.regulariser.after_step()
        self.loss_sum.sub_(rewards, alpha=batch)  # the last batch may be smaller
        self.position += batch
        self.step += 1

    def _plain_step(self, images: Tensor, labels: Tensor) -> Tensor:
        rewards, gradients = self._gradients(images, labels)
        self.update(gradients)
        return rewards

    def _gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean log-likelihoods (R,) of the random passes, and the gradient of the loss for all that is trained."""
        leaves = {name: value.requires_grad_() for name, value in self._trained()}
        with torch.enable_grad():
            inputs = features(images, self.parameters, self.shape.architecture).to(self.dtype)
            names = ("dense.weight", "dense.bias", "output.weight", "output.bias")
            pieces = zip(*(self.split(name) for name in names), strict=True)
            rewards, slabs = [], []
            for segment, (weight, bias, *output) in zip(self.segments, pieces, strict=True):
                x, y, regulariser = inputs[segment.rows], labels[segment.rows], segment.regulariser
                passes = [
                    log_likelihoods(linear(regulariser.train_pass(x, weight, bias, self.step, p), *output), y).mean(1)
                    for p in range(regulariser.passes)
                ]
                rewards.append(torch.stack(passes))  # (P, R)
                slabs += [regulariser.slab_loss(n, v) for n, v in (("weight", weight), ("bias", bias))]
            mean_rewards = torch.cat([r.mean(0) for r in rewards])
            loss = sum((slab for slab in slabs if slab is not None), start=-mean_rewards.sum())
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = {name: value for name, value in zip(leaves, found, strict=True) if value is not None}
        with torch.no_grad():
            self._add_posterior_gradients(gradients, inputs.detach(), labels, rewards)
        return mean_rewards.detach(), gradients

    def _add_posterior_gradients(
        self, gradients: dict[str, Tensor], inputs: Tensor, labels: Tensor, rewards: list[Tensor]
    ) -> None:
        for number, segment in enumerate(self.segments):
            regulariser, mean_reward = segment.regulariser, None
            if regulariser.needs_mean_network:
                logits = self.predict_segment(segment, inputs[segment.rows])
                mean_reward = log_likelihoods(logits, labels[segment.rows]).mean(1)
            added = regulariser.gradients(rewards[number].detach(), mean_reward)
            for name, value in added.items():
                key = f"segment{number}.{name}"
                gradients[key] = gradients[key] + value if key in gradients else value

    # ------------------------------------------------------------------------------------ prediction

    @torch.no_grad()
    def features_of(self, images: Tensor) -> Tensor:  # (b, C, H, W) of uint8 -> (R, b, I)
        """What each replica's convolutions make of the same images."""
        x = self.examples.standardise(images, self.dtype).to(self.input_dtype)
        with fast_products(self.device, self.dtype):
            stacked = x.expand(len(self.units), *x.shape)
            return features(stacked, self.parameters, self.shape.architecture).to(self.dtype)

    # ------------------------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """All that training resumes from, on the CPU."""
        tensors = {name: value.detach().cpu().clone() for name, value in self._trained()}
        sums = {name: value.cpu().clone() for name, value in self.accumulators.items()}
        moments = [
            None if s.regulariser.moments is None else s.regulariser.moments.cpu().clone() for s in self.segments
        ]
        state = {"epoch": self.epoch, "step": int(self.step), "tensors": tensors, "sums": sums, "moments": moments}
        if self.averages:
            state["averages"] = {name: value.cpu().clone() for name, value in self.averages.items()}
        return state | {"batch": self.batch, "loss_sum": self.loss_sum.cpu().clone()}

    @property
    def state_bytes(self) -> int:
        """Roughly the size of `state`: the parameters and what the optimiser remembers of each."""
        return (3 if self.averages else 2) * sum(value.numel() * value.element_size() for _, value in self._trained())

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from what `state` gave, for the same units."""
        self.epoch = state["epoch"]
        self.step.fill_(state["step"])
        if batch := state.get("batch", 0):  # an epoch was interrupted
            self.batch = batch
            self.position.fill_(sum(self.batches[:batch]))
            self.loss_sum.copy_(state["loss_sum"])
        for name, value in self._trained():
            value.copy_(state["tensors"][name])
            self.accumulators[name].copy_(state["sums"][name])
            if self.averages:
                self.averages[name].copy_(state["averages"][name])
        for segment, moments in zip(self.segments, state["moments"], strict=True):
            if segment.regulariser.moments is not None:
                segment.regulariser.moments.copy_(moments)


@contextmanager
def fast_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """float32 products on tensor cores (TF32) while inside, on a GPU that has them."""
    if device.type != "cuda" or dtype != torch.float32:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
