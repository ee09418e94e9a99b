"""Stacks of replicas: each trains as it would alone and as an ordinary module does, and resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stack_cases import (
    CPU,
    ESTIMATORS,
    LATE,
    METHODS,
    VARIED,
    assert_close,
    assert_equal,
    assert_fused_is_plain,
    bright,
    each_method,
    settings,
    stack_of,
    tensors_of,
    trained,
    varied,
)
from tiny_cases import TWO_LAYERS
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab import data, device
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Normalisation, Protocol, Training
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset, Split
from dropconnectpp.lab.data.normalisation import channel_statistics
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas import stack as stack_module
from dropconnectpp.lab.replicas.convolutions import features
from dropconnectpp.lab.replicas.network import Unit, start
from dropconnectpp.lab.replicas.stack import EAGER_STEPS, Stack

# ------------------------------------------------------------------------- replicas do not know each other

MIXED = [
    Unit(settings(METHODS["none"]), 0),
    Unit(settings(METHODS["none"], step_size=0.01), 1),
    Unit(settings(METHODS["dropout"]), 2),
    Unit(settings(Method(kind="dropout", rate=0.2)), 3),
    Unit(settings(METHODS["dropconnect"]), 4),
    Unit(settings(Method(kind="dropconnect", rate=0.6), step_size=0.02), 5),
    Unit(settings(METHODS["bbvi"]), 6),
    Unit(settings(METHODS["bbvi"], step_size=0.005), 17),
    *(Unit(settings(method), 20 + number) for number, method in enumerate(ESTIMATORS.values())),
    Unit(settings(METHODS["straight-through"]), 8),
    *(Unit(settings(method), 30 + number) for number, method in enumerate(LATE.values())),
    *(Unit(settings(method), 40 + number) for number, method in enumerate(VARIED[1:4])),
]


class Recorder:
    """Every mask that is drawn, by purpose, replica, step and sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: dict[tuple[str, int, int, int], Tensor] = {}
        drawing = Stream.bernoulli

        def bernoulli(stream: Stream, keep: Tensor, replicas: Tensor, step: Any, draw: Any = 0) -> Tensor:
            masks = drawing(stream, keep, replicas, step, draw)
            for replica, mask in zip(replicas.tolist(), masks, strict=True):
                self.masks[stream.purpose, replica, int(step), int(draw)] = mask
            return masks

        monkeypatch.setattr(Stream, "bernoulli", bernoulli)

    def of(self, replica: int) -> dict[Any, Tensor]:
        return {key: mask for key, mask in self.masks.items() if key[1] == replica}


def test_a_replica_among_many_equals_the_replica_alone(monkeypatch):
    recorder = Recorder(monkeypatch)
    together = trained(MIXED)
    among = dict(recorder.masks)
    for row, unit in enumerate(MIXED):
        recorder.masks.clear()
        alone = trained([unit])
        assert torch.equal(together.order[row], alone.order[0])
        assert_equal({key: among[key] for key in recorder.of(unit.replica)}, recorder.of(unit.replica))
        if unit.protocol.method in (METHODS["bbvi"], METHODS["dropconnect"]):
            assert len(recorder.of(unit.replica)) == 2 * 20, "a mask of weights and of biases for each of 20 steps"
        assert_close(tensors_of(together, row), tensors_of(alone, 0), 1e-11)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        Method(),
        Method(hyper="optimal"),
        Method(hyper="optimal", alpha=0.6, num_samples=2, slab=0.1),
        Method(estimator="straight-through", alpha=1.5, slab=0.1),
        Method(estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7),
        Method(estimator="eq16"),
        Method(estimator="disarm", parameterisation="probability"),
    ],
)
def test_replicas_with_their_own_kl_and_gate_step_share_a_segment_and_train_as_alone(method, fused):
    def after_four_epochs(*units: Unit) -> Stack:
        stack = stack_of(*units, dataset=bright(train=20))
        stack.fused = fused
        for _ in range(4):
            stack.train_epoch()
        return stack

    units = [Unit(settings(one), 3) for one in varied(method)]
    if fused and stack_of(*units).segments[0].regulariser.gate() is None:
        return
    together = after_four_epochs(*units)
    assert [segment.rows for segment in together.segments] == [slice(0, len(units))]
    for row, unit in enumerate(units):
        assert_close(tensors_of(together, row), tensors_of(after_four_epochs(unit), 0), 1e-12)
    keep = together.segments[0].regulariser.keep_probability()
    for row, other in combinations(range(len(units)), 2):
        assert (keep[row] - keep[other]).abs().max() > 1e-3, "every number matters"


def test_the_loss_of_a_replica_does_not_depend_on_its_neighbours():
    together = stack_of(*MIXED)
    losses = together.train_epoch()
    for row in (0, 3, 5, 7):
        torch.testing.assert_close(stack_of(MIXED[row]).train_epoch()[0], losses[row], rtol=1e-12, atol=0)


def test_a_replica_that_diverges_does_not_disturb_its_neighbours():
    def around(step_size: float) -> Stack:
        units = [
            Unit(replace(unit.protocol, training=replace(unit.protocol.training, step_size=step_size)), unit.replica)
            if row in (3, 6)
            else unit
            for row, unit in enumerate(MIXED)
        ]
        return trained(units)

    calm, wild = around(0.05), around(1e200)
    for row in range(len(MIXED)):
        if row in (3, 6):
            assert not wild.parameters["dense.weight"][row].isfinite().all()
        else:
            assert_equal(tensors_of(wild, row), tensors_of(calm, row))


def test_methods_share_start_and_order_so_that_they_pair():
    names = list(METHODS)
    units = [Unit(settings(METHODS[name], step_size=0.01 * (n + 1)), 3) for n, name in enumerate(names)]
    stack = stack_of(*units, Unit(settings(METHODS["none"]), 4))
    for value in stack.parameters.values():
        assert (value[:5] == value[:1]).all()
        assert not value.any() or (value[5] != value[0]).any(), "another replica starts elsewhere"
    stack.train_epoch()
    assert (stack.order[:5] == stack.order[:1]).all()
    assert (stack.order[5] != stack.order[0]).any()
    first = stack.order[0].clone()
    stack.train_epoch()
    assert (stack.order[0] != first).any(), "each epoch has its own order"


def test_the_start_is_glorots_with_zero_biases():
    stack = Stack([Unit(settings(), r) for r in range(40)], bright(), CPU)
    for name, value in start(stack.shape, 5, stack.replicas, torch.float64).items():
        assert torch.equal(value, stack.parameters[name])
        if name.endswith("bias"):
            assert not value.any()
            continue
        out, into, *field = value.shape[1:]
        limit = (6 / ((out + into) * int(np.prod(field)))) ** 0.5
        assert limit * 0.98 < value.abs().max() <= limit
        count = value.numel()
        assert abs(value.mean()) < 5 * limit / (3 * count) ** 0.5
        assert abs(value.square().mean() - limit**2 / 3) < 5 * limit**2 * (4 / 45 / count) ** 0.5


# ------------------------------------------------------------------------------ against an ordinary module


class Reference(nn.Module):
    """The same network as one would write it by hand, for one replica."""

    def __init__(self, dense: nn.Module, dataset: Dataset) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(dataset.shape[0], 2, 3, padding=1)
        self.conv1 = nn.Conv2d(2, 3, 3, padding=1)
        self.dense = dense
        self.output = nn.Linear(4, len(dataset.classes))
        self.scale: Tensor | float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv0(x)), 3, 2, ceil_mode=True)
        x = F.relu(self.conv1(x)).flatten(1)
        return self.output(F.relu(self.dense(x)) * self.scale)


def dense_of(method: Method, inputs: int) -> nn.Module:
    kinds = {"dropconnect": dcpp.DropConnectLinear, "dropconnect++": dcpp.DropConnectPPLinear}
    return kinds.get(method.kind, nn.Linear)(inputs, 4, **method.layer_options())


def batches(protocol: Protocol, dataset: Dataset, replica: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of each step, standardised by numpy."""
    images = dataset.train.images.astype(np.float64)
    images = (images - images.mean((1, 2, 3), keepdims=True)) / images.std((1, 2, 3), keepdims=True)
    for epoch in range(epochs):
        order = Stream(protocol.root_seed, "order").permutation(torch.tensor([replica]), epoch, len(images))[0]
        for rows in np.split(
            order.numpy(), range(protocol.training.batch_size, len(images), protocol.training.batch_size)
        ):
            yield torch.from_numpy(images[rows]), torch.from_numpy(dataset.train.labels[rows])


def reference(protocol: Protocol, dataset: Dataset, replica: int, epochs: int = 2) -> dict[str, Tensor]:
    """Train the ordinary module through the library's ELBO with the streams' masks forced into it."""
    method, training = protocol.method, protocol.training
    numbers = torch.tensor([replica])
    shape = stack_of(Unit(protocol, replica), dataset=dataset).shape
    model = Reference(dense_of(method, shape.dense[1]), dataset).double()
    model.load_state_dict(
        {name: value[0] for name, value in start(shape, protocol.root_seed, numbers, torch.float64).items()},
        strict=method.kind != "dropconnect++",
    )
    if method.kind == "dropconnect++":
        model.dense.reset_posterior()
    elbo = dcpp.ELBO(model, dcpp.categorical, len(dataset.train))
    optimizer = torch.optim.Adagrad(dcpp.parameter_groups(model, training.step_size), eps=training.epsilon)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step, (x, y) in enumerate(batches(protocol, dataset, replica, epochs)):
        forced: Any = nullcontext()
        if method.kind == "dropout":
            keep = torch.full((1, len(x), 4), 1 - method.rate, dtype=torch.float64)
            mask = Stream(protocol.root_seed, "dropout").bernoulli(keep, numbers, step)[0]
            model.scale = mask / keep[0]
        elif method.kind != "none":
            masks = {
                f"dense.{name}": Stream(protocol.root_seed, f"mask:{name}").bernoulli(
                    model.dense.keep_probability(name).detach()[None].double(), numbers, step
                )[0]
                for name in ("weight", "bias")
            }
            forced = dcpp.forced_masks(model, masks)
        optimizer.zero_grad()
        with forced:
            elbo(x, target=y).loss.backward()
        if not training.epsilon_inside:
            optimizer.step()
            continue
        for name, parameter in model.named_parameters():
            posterior = name.endswith(("_logit", "_alpha", "_beta"))
            size = training.step_size * (method.logit_step if posterior else 1.0)
            sums[name] += parameter.grad**2
            parameter.data -= size * parameter.grad / (sums[name] + training.epsilon).sqrt()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | dict(zip(("moments",), elbo.moments.buffers(), strict=False))


@each_method
@pytest.mark.parametrize("inside", [True, False])
def test_a_replica_equals_an_ordinary_module_trained_by_the_library(name, inside):
    protocol = settings(METHODS[name], epsilon_inside=inside, epsilon=1e-6 if inside else 1e-8)
    stack = trained([Unit(protocol, 2), Unit(protocol, 9)])
    assert int(stack.step) == 20
    expected = reference(protocol, bright(), replica=9)
    assert_close(tensors_of(stack, 1), expected, 1e-9)
    started = start(stack.shape, protocol.root_seed, torch.tensor([9]), torch.float64)["dense.weight"][0]
    assert (expected["dense.weight"] - started).abs().max() > 1e-2, "twenty steps leave the start"


@pytest.mark.parametrize("count", [42, 41])
def test_a_small_last_batch_trains_as_in_an_ordinary_module(count):
    protocol, dataset = settings(METHODS["bbvi"], last_batch="keep"), bright(count)
    stack = trained([Unit(protocol, 9)], dataset=dataset)
    assert int(stack.step) == 22
    assert_close(tensors_of(stack, 0), reference(protocol, dataset, replica=9), 1e-9)


GOLDEN = [
    2.277978425292308,
    2.505512367062332,
    2.4741805541276,
    2.2863865207578216,
    2.2612779810625585,
    2.2497046826909886,
    2.1700825472465604,
    2.0948643514296754,
    2.015224066304746,
    1.9698888944211066,
    2.0206936261114645,
    2.1093560661085884,
    1.9219637342069784,
    1.8507349647706246,
    1.7808598820439654,
    1.8495610357128958,
    1.9130227346504614,
    1.847712112328225,
    1.808046963636407,
    1.683757569246666,
]


def test_twenty_steps_on_real_images_are_what_they_were():
    architecture = replace(TWO_LAYERS, maps=(3, 4), pooled=(True, True))
    protocol = replace(settings(METHODS["bbvi"], batch_size=300), data="fashion-mini", architecture=architecture)
    stack = stack_of(Unit(protocol, 1), dataset=data.load("fashion-mini"))
    trace = recorded(stack, lambda images, labels, rewards: -float(rewards[0]))
    stack.train_epoch()
    assert trace == pytest.approx(GOLDEN, abs=1e-9)


def recorded(stack: Stack, measure: Any) -> list[Any]:
    """A list that grows by ``measure(images, labels, rewards)`` with every step."""
    found: list[Any] = []
    gradients = stack._gradients

    def recording(images: Tensor, labels: Tensor) -> Any:
        rewards, by = gradients(images, labels)
        found.append(measure(images, labels, rewards))
        return rewards, by

    stack._gradients = recording  # type: ignore[method-assign]
    return found


# --------------------------------------------------------------------------------------------- checkpoints


def test_training_resumes_bit_for_bit():
    whole = trained(MIXED, epochs=1)
    saved = whole.state()
    losses = whole.train_epoch()
    second = stack_of(*MIXED)
    second.load_state(saved)
    assert torch.equal(second.train_epoch(), losses)
    found, expected = second.state(), whole.state()
    assert (found["epoch"], found["step"]) == (expected["epoch"], expected["step"]) == (2, 20)
    for part in ("tensors", "sums"):
        assert_equal(found[part], expected[part])
    for one, other in zip(found["moments"], expected["moments"], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert sum(moments is not None for moments in found["moments"]) == 4, "bbvi, three times, and eq16 keep moments"


@pytest.mark.parametrize("fused", [False, True])
def test_training_resumes_bit_for_bit_whatever_the_epoch_changes(fused):
    def ready() -> Stack:
        stack = stack_of(*(Unit(settings(method), 3) for method in (*LATE.values(), *VARIED)))
        assert len(stack.segments) == len(LATE) + 3
        stack.fused = fused
        return stack

    whole, resumed = ready(), ready()
    for epoch in range(4):
        losses = whole.train_epoch()
        assert torch.equal(resumed.train_epoch(), losses)
        saved, resumed = resumed.state(), ready()
        resumed.load_state(saved)
        assert resumed.epoch == epoch + 1
    for part in ("tensors", "sums"):
        assert_equal(resumed.state()[part], whole.state()[part])


@pytest.mark.parametrize("fused", [False, True])
def test_training_interrupted_between_two_batches_resumes_bit_for_bit(fused):
    def ready() -> Stack:
        stack = stack_of(*(Unit(settings(method), 3) for method in (*LATE.values(), *VARIED)))
        stack.fused = fused
        return stack

    def stop(_: float) -> None:
        if int(resumed.step) % 7 == 0:
            raise InterruptedError

    whole, resumed = ready(), ready()
    for _ in range(3):
        losses = whole.train_epoch()
        while resumed.epoch < whole.epoch:
            resumed.on_batch = stop
            try:
                assert torch.equal(resumed.train_epoch(), losses)
            except InterruptedError:
                saved, resumed = resumed.state(), ready()
                resumed.load_state(saved)
    for part in ("tensors", "sums"):
        assert_equal(resumed.state()[part], whole.state()[part])


def test_a_saved_state_does_not_change_as_training_goes_on():
    stack = trained(MIXED[:7], epochs=1)
    saved = stack.state()
    copies = {name: value.clone() for name, value in saved["tensors"].items()}
    stack.train_epoch()
    assert_equal(saved["tensors"], copies)


# -------------------------------------------------------------------------------------- what is trained on


def identified(train: int = 42) -> Dataset:
    """Each example is a class of its own: labels tell which were used."""
    return bright(train, test=5, classes=train)


def test_a_small_last_batch_is_dropped_or_kept():
    for rule, sizes in (("drop", [4] * 10), ("keep", [4] * 10 + [2])):
        stack = stack_of(Unit(settings(last_batch=rule), 0), dataset=identified())
        seen = recorded(stack, lambda images, labels, rewards: labels[0].tolist())
        stack.train_epoch()
        assert [len(batch) for batch in seen] == sizes
        used = [label for batch in seen for label in batch]
        assert len(set(used)) == len(used) == sum(sizes), "each example at most once"
        assert used == stack.order[0, : sum(sizes)].tolist()


def test_the_loss_of_an_epoch_is_the_mean_over_examples():
    stack = stack_of(Unit(settings(METHODS["dropconnect"], last_batch="keep"), 0), dataset=identified())
    seen = recorded(stack, lambda images, labels, rewards: (labels.shape[1], float(rewards[0])))
    loss = float(stack.train_epoch()[0])
    assert loss == pytest.approx(-sum(count * reward for count, reward in seen) / 42, rel=1e-12)


def test_held_out_examples_are_never_trained_on_and_are_the_same_for_all():
    held: list[Tensor] = []
    for name in METHODS:
        units = [Unit(settings(METHODS[name], holdout=12), r) for r in (0, 8)]
        stack = stack_of(*units, dataset=identified())
        held.append(stack.examples.test_labels)
        seen = recorded(stack, lambda images, labels, rewards: labels)
        for _ in range(2):
            stack.train_epoch()
        used = torch.cat(seen, 1)
        assert len(stack.examples.rows) == 30
        assert not torch.isin(used, held[0]).any()
        assert all(len(set(row.tolist())) > 28 for row in used), "all the others are"
    assert len(set(held[0].tolist())) == 12
    assert all(torch.equal(one, held[0]) for one in held)
    assert held[0].tolist() != list(range(12)), "they are drawn, not the first"
    dataset = identified()
    assert torch.equal(stack.examples.test_images, torch.from_numpy(dataset.train.images[held[0].numpy()]))


def test_without_a_holdout_the_test_set_is_evaluated_on():
    dataset = bright()
    stack = stack_of(Unit(settings(), 0), dataset=dataset)
    assert torch.equal(stack.examples.test_images, torch.from_numpy(dataset.test.images))
    assert torch.equal(stack.examples.test_labels, torch.from_numpy(dataset.test.labels))


def test_statistics_over_the_data_set_leave_out_what_is_held_out():
    protocol = replace(settings(holdout=12), normalisation=Normalisation(scope="data-set"))
    examples = trained([Unit(protocol, 0)], epochs=1).examples
    assert examples.statistics == channel_statistics(examples.images[examples.rows])
    assert examples.statistics != channel_statistics(examples.images)


def test_the_kl_is_weighed_against_the_examples_that_are_trained_on():
    stack = stack_of(*(Unit(settings(METHODS[name], holdout=12), 0) for name in ("bbvi", "straight-through")))
    stack.train_epoch()
    assert [s.regulariser.kl_scale.tolist() for s in stack.segments] == [[1 / 28], [2 / 28]]


# -------------------------------------------------------------------------------------------------- errors


def changed(**options: Any) -> Unit:
    return Unit(replace(settings(), **options), 1)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([], "a stack holds at least one replica, got none"),
        (
            [Unit(settings(step_size=None), 0)],
            "No regularization: step size, rate or logit step is not chosen yet. Select it",
        ),
        (
            [Unit(settings(Method(kind="dropconnect")), 0)],
            "DropConnect: step size, rate or logit step is not chosen yet",
        ),
        ([Unit(settings(), 0), changed(root_seed=6)], "may differ in method and step size only"),
        ([Unit(settings(), 0), changed(training=Training(step_size=0.05, batch_size=5))], "may differ in method"),
        ([Unit(settings(), 0), Unit(settings(), 0)], "a stack holds each replica of a protocol once"),
        ([Unit(settings(batch_size=41), 0)], "batch_size is 41 and there are only 40 training examples"),
        ([Unit(settings(batch_size=31, holdout=10), 0)], "batch_size is 31 and there are only 30 training examples"),
        ([Unit(settings(holdout=40), 0)], "holdout must be less than the 40 training examples, got 40"),
        ([changed(architecture=replace(TWO_LAYERS, padding=0, filter_size=9))], "the images are too small"),
    ],
)
def test_a_stack_that_cannot_be_says_why(units, message):
    with pytest.raises(ProtocolError, match=message):
        stack_of(*units)


def test_images_must_be_square():
    dataset = bright()
    flat = replace(dataset, train=Split(dataset.train.images[..., :6], dataset.train.labels))
    with pytest.raises(ProtocolError, match="images must be square, got 8 x 6"):
        stack_of(Unit(settings(), 0), dataset=flat)


def test_a_unit_is_known_by_digest_and_replica():
    assert Unit(settings(), 3).key == (settings().digest, 3)


# ------------------------------------------------------------------------------------------------- devices


def test_mixed_precision_is_float32_where_there_are_no_tensor_cores():
    stack = stack_of(Unit(replace(settings(METHODS["bbvi"]), precision="mixed"), 0))
    assert stack.input_dtype == stack.dtype == torch.float32
    assert stack.train_epoch().isfinite().all()


@pytest.mark.parametrize("name", ["gpu", "meta", "", "cuda:x"])
def test_an_unknown_device_is_an_error(name):
    with pytest.raises(device.DeviceError, match="device must be auto, cpu, cuda or cuda:N"):
        device.choose(name)


def test_devices_are_chosen_by_name(monkeypatch):
    assert device.choose("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == CPU
    with pytest.raises(device.DeviceError, match="torch sees no GPU"):
        device.choose("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.choose("auto") == torch.device("cuda")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert device.choose("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(device.DeviceError, match="torch sees 2 GPUs"):
        device.choose("cuda:2")


def test_a_cpu_says_its_name_and_threads():
    assert device.describe(CPU).endswith(f", {torch.get_num_threads()} threads")
    assert not device.tensor_cores(CPU)


def test_a_read_only_array_is_shared_without_a_warning():
    array = np.arange(6, dtype=np.uint8)
    array.flags.writeable = False
    found = device.as_tensor(array, CPU)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.data_ptr() == array.ctypes.data


# ----------------------------------------------------------------------------------- the loss as it is written

WRITTEN = {
    "dropconnect": Method(kind="dropconnect", rate=0.3, slab=0.2),
    "dropconnect, three masks": Method(kind="dropconnect", rate=0.3, num_samples=3),
    "learned": Method(estimator="straight-through", alpha=1.5, slab=0.2, kl_weight=3.0, kl_warmup=3),
    "optimal": Method(
        estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7, slab=0.2, num_samples=2, kl_warmup=3
    ),
    "uniform": Method(estimator="straight-through", hyper="optimal", kl_weight=3.0, kl_warmup=3),
    "probability": Method(estimator="straight-through", parameterisation="probability", alpha=2.0, slab=0.2),
    "score": Method(hyper="optimal", alpha=2.0, beta=0.7, slab=0.2, kl_weight=3.0, kl_warmup=3),
    "score, learned": Method(slab=0.2, num_samples=2, kl_warmup=3),
}


def written_kl(pi: Tensor, alpha: Tensor, beta: Tensor, prior: tuple[float, float]) -> Tensor:
    """Eq. (20) + Eq. (21)."""
    total = alpha + beta
    log_pi, log_rest = (torch.digamma(value) - torch.digamma(total) for value in (alpha, beta))
    bernoulli = pi * (pi.log() - log_pi) + (1 - pi) * ((1 - pi).log() - log_rest)
    log_b = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(total)
    log_b_prior = (
        torch.lgamma(torch.tensor([*prior, sum(prior)], dtype=torch.float64)) @ torch.tensor([1.0, 1, -1]).double()
    )
    return (bernoulli + log_b_prior - log_b + (alpha - prior[0]) * log_pi + (beta - prior[1]) * log_rest).sum()


def written_loss(stack: Stack, images: Tensor, labels: Tensor, kl_share: float) -> Tensor:
    """Of all replicas, with a score that no baseline weighs yet: of it the KL and the slab are left."""
    (segment,), method, values = stack.segments, stack.protocol.method, stack.parameters
    own, count, loss, gated = segment.regulariser.parameters, len(stack.examples.rows), torch.zeros(()).double(), {}
    x = features(images, values, TWO_LAYERS)
    for name in ("weight", "bias"):
        value = values[f"dense.{name}"]
        pi = torch.full_like(value, 1 - (method.rate or 0.0))
        if method.kind == "dropconnect++":
            pi = own[f"{name}_probability"] if f"{name}_probability" in own else torch.sigmoid(own[f"{name}_logit"])
            alpha, beta = method.alpha + pi, method.beta + 1 - pi
            if method.hyper == "learned":
                alpha, beta = F.softplus(own[f"{name}_alpha"]), F.softplus(own[f"{name}_beta"])
            kl = written_kl(pi, alpha, beta, (method.alpha, method.beta))
            loss = loss + kl_share * method.kl_weight / count * kl
        if method.slab is not None:
            loss = loss + (pi * value.square() / (2 * method.slab**2)).sum() / count
        through = pi - pi.detach() if method.estimator == "straight-through" else 0.0
        stream = Stream(stack.protocol.root_seed, f"mask:{name}")
        gated[name] = [
            value * (stream.bernoulli(pi.detach(), stack.replicas, stack.step, sample) + through)
            for sample in range(method.num_samples)
        ]
    for weight, bias in zip(gated["weight"], gated["bias"], strict=True):
        hidden = F.relu(x @ weight.mT + bias[:, None])
        logits = hidden @ values["output.weight"].mT + values["output.bias"][:, None]
        loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
            labels.shape[1] * method.num_samples
        )
    return loss


def away_from_the_start(method: Method) -> tuple[Stack, Tensor, Tensor]:
    """Two replicas in their second epoch with parameters that are not all alike, and their next batch."""
    stack = stack_of(Unit(settings(method), 2), Unit(settings(method), 5))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in (stack.parameters["dense.bias"], *stack.segments[0].regulariser.parameters.values()):
            value += 0.2 * torch.rand(value.shape, generator=generator, dtype=value.dtype)
    stack.epoch = 1
    stack.begin_epoch()
    stack.shuffle()
    chosen = stack.order[:, :4]
    return stack, stack.examples.gather(chosen, torch.float64), stack.examples.labels[chosen]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_gradient_is_that_of_the_loss_as_it_is_written(name):
    method = WRITTEN[name]
    stack, images, labels = away_from_the_start(method)
    trained = {key: value.requires_grad_() for key, value in stack._trained()}
    loss = written_loss(stack, images, labels, 1 / 3 if method.kl_warmup else 1.0)
    wanted = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    _, found = stack._gradients(images, labels)
    assert_close(found, wanted, 1e-10)
    stack, *_ = away_from_the_start(method)
    if stack.segments[0].regulariser.gate() is None:
        assert name == "probability"
        return
    stack.fused = True
    stack._one_step(4)
    assert_close(stack.accumulators, {key: value.square() for key, value in wanted.items()}, 1e-10)


# --------------------------------------------------------------------------- what changes from epoch to epoch


def posterior_of(stack: Stack) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in stack._trained() if name.startswith("segment")}


@pytest.mark.parametrize("fused", [False, True])
def test_the_kl_comes_in_as_the_warm_up_says(fused):
    usual = Method(estimator="straight-through", hyper="optimal", kl_weight=50.0, logit_step=10.0)

    def epoch_of(method: Method, state: Any = None) -> Stack:
        stack = stack_of(Unit(settings(method), 3))
        stack.fused = fused
        if state is not None:
            stack.load_state(state)
        stack.train_epoch()
        return stack

    stack, state = epoch_of(replace(usual, kl_warmup=2)), None
    for weight in (0.0, 25.0, 50.0, 50.0):
        same = epoch_of(replace(usual, kl_weight=weight), state)
        assert_equal(posterior_of(stack), posterior_of(same))
        assert (float(stack.segments[0].regulariser.kl_scale), stack.epoch) == (weight / 40, same.epoch)
        state = same.state()
        stack.train_epoch()


@pytest.mark.parametrize(
    "method",
    [
        Method(logit_step=30.0),
        Method(estimator="straight-through", hyper="optimal", logit_step=10.0, slab=0.3),
        Method(estimator="disarm", parameterisation="probability", logit_step=20.0),
    ],
)
def test_a_frozen_posterior_stays_as_it_is_while_the_weights_train_on(method):
    for fused in (False, True):
        stack, free = (stack_of(Unit(settings(one), 3)) for one in (replace(method, freeze_after=2), method))
        if fused and free.segments[0].regulariser.gate() is None:
            continue
        stack.fused = free.fused = fused
        for one in (stack, free):
            one.train_epoch()
            one.train_epoch()
        assert_equal(stack.state()["tensors"], free.state()["tensors"])
        posterior, weight = posterior_of(stack), stack.parameters["dense.weight"].detach().clone()
        for one in (stack, free):
            one.train_epoch()
        assert_equal(posterior_of(stack), posterior)
        assert not any(torch.equal(value, posterior[name]) for name, value in posterior_of(free).items())
        assert not torch.equal(stack.parameters["dense.weight"], weight)


@pytest.mark.parametrize(
    "method",
    [
        Method(logit_step=30.0),
        Method(estimator="straight-through", hyper="optimal", logit_step=10.0),
        Method(estimator="local", hyper="optimal", logit_step=20.0, kl_weight=40.0),
    ],
)
def test_a_posterior_that_learns_late_starts_as_if_it_were_new(method):
    for fused in (False, True):
        late, never, free = (
            stack_of(Unit(settings(one), 3))
            for one in (replace(method, learn_after=2), replace(method, learn_after=9), method)
        )
        late.fused = never.fused = free.fused = fused
        start = posterior_of(late)
        for one in (late, never):
            one.train_epoch()
            one.train_epoch()
        assert_equal(posterior_of(late), start)
        assert_equal(late.state()["tensors"], never.state()["tensors"])
        weight = late.parameters["dense.weight"].detach().clone()
        state = late.state()
        idle = [sums for name, sums in state["sums"].items() if name.startswith("segment")]
        assert any(sums.any() for sums in idle)  # what is added up while nothing moves is forgotten
        for sums in idle:
            sums.zero_()
        free.load_state(state)
        late.train_epoch()
        free.train_epoch()
        assert_equal(late.state()["tensors"], free.state()["tensors"])
        assert_equal(late.state()["sums"], free.state()["sums"])
        moved = [name for name, value in posterior_of(late).items() if not torch.equal(value, start[name])]
        assert moved
        assert not torch.equal(late.parameters["dense.weight"], weight)


def test_a_posterior_that_learns_late_goes_on_from_a_checkpoint_as_if_never_stopped():
    method = Method(estimator="local", hyper="optimal", learn_after=2, logit_step=10.0)
    through = stack_of(Unit(settings(method), 3))
    for _ in range(4):
        through.train_epoch()
    for stop in (1, 2, 3):
        before, after = stack_of(Unit(settings(method), 3)), stack_of(Unit(settings(method), 3))
        for _ in range(stop):
            before.train_epoch()
        after.load_state(before.state())
        for _ in range(4 - stop):
            after.train_epoch()
        assert_equal(after.state()["tensors"], through.state()["tensors"])


# -------------------------------------------------------------------------------------------- the fused step

COVERED = [
    *METHODS.values(),
    Method(hyper="optimal", logit_step=30.0),
    Method(hyper="optimal", baseline="mean-network"),
    Method(estimator="straight-through", alpha=2.0, beta=0.5),
    Method(kind="dropconnect", rate=0.4, num_samples=3),
    Method(kind="dropconnect", rate=0.4, num_samples=2, slab=0.1),
    Method(num_samples=2),
    Method(num_samples=3, hyper="optimal"),
    Method(num_samples=2, baseline="leave-one-out"),
    Method(num_samples=2, baseline="mean-network", hyper="optimal"),
    Method(num_samples=2, estimator="straight-through"),
    *LATE.values(),
    *VARIED,
    Method(hyper="optimal", alpha=2.0, beta=0.7),
    Method(estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7, kl_weight=30.0, logit_step=10.0),
    Method(num_samples=2, slab=0.1),
    Method(reward="random-sign", logit_step=30.0),
    Method(reward="random-sign", num_samples=2, baseline="leave-one-out", hyper="optimal"),
    Method(num_samples=2, slab=0.1, estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7),
]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_fused_step_is_the_plain_one(batch_size):
    units = [Unit(settings(method, batch_size=batch_size), replica) for replica, method in enumerate(COVERED)]
    assert_fused_is_plain(units, batch_size)


@pytest.mark.parametrize(
    "method",
    [
        *(method for name, method in ESTIMATORS.items() if name not in ("leave-one-out", "local")),
        Method(hyper="optimal", alpha=0.1),
        Method(hyper="optimal", estimator="straight-through", beta=0.1),
        Method(parameterisation="probability", num_samples=2),
    ],
)
def test_what_the_kernels_cannot_gate_takes_the_plain_step(method):
    (segment,) = stack_of(Unit(settings(method), 0)).segments
    assert segment.regulariser.gate() is None


# --------------------------------------------------------------------------------------------------- a GPU


def on_gpu(units: Sequence[Unit], precision: str, epochs: int = 2, graph: bool = True) -> Stack:
    chosen = [Unit(replace(unit.protocol, precision=precision), unit.replica) for unit in units]
    stack = Stack(chosen, bright(), torch.device("cuda"), graph=graph)
    for _ in range(epochs):
        stack.train_epoch()
    return stack


@contextmanager
def exact_products(*_: Any) -> Iterator[None]:
    """float32 products in float32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def slowed(protocol: Protocol) -> Protocol:
    return replace(protocol, training=replace(protocol.training, step_size=0.005))


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("tensor_cores", [False, True])
    def test_a_replica_among_many_equals_the_replica_alone_in_float32(self, tensor_cores, monkeypatch):
        if not tensor_cores:
            monkeypatch.setattr(stack_module, "fast_products", exact_products)
        units = [Unit(slowed(unit.protocol), unit.replica) for unit in MIXED]
        together = on_gpu(units, "float32")
        for row, unit in enumerate(units):
            alone = on_gpu([unit], "float32")
            assert torch.equal(together.order[row], alone.order[0])
            if not tensor_cores:
                assert_close(tensors_of(together, row), tensors_of(alone, 0), 2e-3)
                continue
            # TF32 keeps ten bits, and other kernels round them otherwise: most weights stay close, not all.
            torch.testing.assert_close(together.loss_sum[row], alone.loss_sum[0], rtol=0.05, atol=0)
            for name in together.parameters:
                apart = (together.parameters[name][row] - alone.parameters[name][0]).abs()
                assert apart.median() < 5e-3, name

    def test_a_replica_among_many_equals_the_replica_alone_and_on_a_cpu_in_float64(self):
        together, cpu = on_gpu(MIXED, "float64"), trained(MIXED)
        assert torch.equal(together.order.cpu(), cpu.order)
        for row, unit in enumerate(MIXED):
            assert_close(tensors_of(together, row), tensors_of(on_gpu([unit], "float64"), 0), 1e-9)
            assert_close(tensors_of(together, row), tensors_of(cpu, row), 1e-9)

    @pytest.mark.parametrize("precision", ["float32", "float64", "mixed"])
    def test_a_graph_takes_the_steps_that_eager_code_takes(self, precision):
        assert EAGER_STEPS < 20
        graph, eager = on_gpu(MIXED, precision), on_gpu(MIXED, precision, graph=False)
        assert graph._graph is not None
        assert eager._graph is None
        assert int(graph.step) == int(eager.step) == 20
        tolerance = {"float32": 5e-3, "float64": 1e-9, "mixed": 5e-2}[precision]
        for row in range(len(MIXED)):
            assert_close(tensors_of(graph, row), tensors_of(eager, row), tolerance)

    @pytest.mark.parametrize("precision", ["float64", "mixed"])
    def test_a_graph_follows_what_changes_from_epoch_to_epoch(self, precision):
        units = [Unit(settings(method), 3) for method in (*LATE.values(), *VARIED)]
        graph, eager, stale = (on_gpu(units, precision, 0, graph=graph) for graph in (True, False, True))
        stale.begin_epoch = lambda: None  # type: ignore[method-assign]
        assert graph.fused == (precision == "mixed")
        graphs = []
        for _ in range(4):
            for stack in (graph, eager, stale):
                stack.train_epoch()
            graphs.append(graph._graph)
        assert graphs[0] is not None
        assert all(one is graphs[0] for one in graphs), "captured once"
        tolerance = {"float64": 1e-9, "mixed": 5e-2}[precision]
        for row in range(len(units)):
            assert_close(tensors_of(graph, row), tensors_of(eager, row), tolerance)
        apart = (stale.segments[0].regulariser.logit("weight") - graph.segments[0].regulariser.logit("weight")).abs()
        assert apart.median() > 2 * tolerance, "a graph that reads the first epoch's numbers would be caught"

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_frozen_posterior_stays_as_it_is(self, fused):
        methods = [replace(LATE["learned, all"], estimator=e, freeze_after=1) for e in ("bbvi", "straight-through")]
        methods += [LATE["frozen, slab"], replace(LATE["frozen, slab"], kl_weight=2.0, kl_warmup=3)]
        stack = on_gpu([Unit(settings(method), 3) for method in methods], "mixed", 0)
        assert len(stack.segments) == 3
        assert stack.fused
        stack.fused = fused
        stack.train_epoch()
        posterior, weight = posterior_of(stack), stack.parameters["dense.weight"].detach().clone()
        stack.train_epoch()
        assert_equal(posterior_of(stack), posterior)
        assert not torch.equal(stack.parameters["dense.weight"], weight)

    @pytest.mark.parametrize("scope", ["image", "channel", "data-set"])
    @pytest.mark.parametrize("local_contrast", [False, True])
    def test_every_normalisation_trains_as_on_a_cpu(self, scope, local_contrast):
        normalisation = Normalisation(scope=scope, local_contrast=local_contrast, window=3)
        units = [Unit(replace(settings(METHODS["bbvi"]), normalisation=normalisation), 0)]
        assert_close(tensors_of(on_gpu(units, "float64"), 0), tensors_of(trained(units), 0), 1e-9)

    def test_a_small_last_batch_runs_beside_the_graph(self):
        units = [Unit(settings(METHODS["bbvi"], last_batch="keep", batch_size=6), 0)]
        assert_close(tensors_of(on_gpu(units, "float64"), 0), tensors_of(trained(units), 0), 1e-9)

    def test_mixed_precision_stays_close_to_float32_for_a_few_steps(self):
        units = [Unit(settings(method, batch_size=20, step_size=0.005), 0) for method in METHODS.values()]
        mixed, full = on_gpu(units, "mixed", epochs=1), on_gpu(units, "float32", epochs=1)
        assert mixed.input_dtype == torch.bfloat16
        assert mixed.dtype == torch.float32
        for row in range(len(units)):
            # Adagrad's first steps have the gradient's sign alone, so a tiny gradient may go the other way.
            found, expected = tensors_of(mixed, row), tensors_of(full, row)
            for name in ("conv0.weight", "conv1.weight", "dense.weight", "output.weight"):
                apart = (found[name] - expected[name]).abs()
                assert apart.max() < 0.025, name
                assert apart.median() < 1e-3, name
        torch.testing.assert_close(mixed.loss_sum, full.loss_sum, rtol=0.02, atol=0)

    def test_the_fused_step_stays_close_to_the_plain_one(self):
        images = bright(train=160, channels=3, side=32)
        fused, plain = (self.whole_network(COVERED, images, fused) for fused in (True, False))
        torch.testing.assert_close(fused.loss_sum, plain.loss_sum, rtol=0.02, atol=0)
        for row, method in enumerate(COVERED):
            found, expected = tensors_of(fused, row), tensors_of(plain, row)
            if "moments" in expected:
                torch.testing.assert_close(found.pop("moments"), expected.pop("moments"), rtol=0.02, atol=0)
            for name, value in expected.items():
                apart = (found[name] - value).abs()
                # The first steps of Adagrad have the gradient's sign alone; a posterior's steps are larger.
                step = method.logit_step if "_" in name else 1.0
                assert apart.median() <= 1e-3 * step, (method.label, name)

    def test_a_replica_takes_the_same_fused_steps_whatever_its_neighbours(self):
        images = bright(train=160, channels=3, side=32)
        together = self.whole_network(COVERED, images, True)
        for row in (0, 3, 4):
            alone = self.whole_network(COVERED[row : row + 1], images, True, first=row)
            torch.testing.assert_close(together.loss_sum[row], alone.loss_sum[0], rtol=1e-3, atol=0)

    def whole_network(self, methods: Sequence[Method], images: Dataset, fused: bool, first: int = 0) -> Stack:
        """The paper's network after one epoch of ten steps, in mixed precision."""
        protocols = [
            replace(settings(method, step_size=0.0005, batch_size=16), architecture=Architecture(), precision="mixed")
            for method in methods
        ]
        units = [Unit(protocol, first + row) for row, protocol in enumerate(protocols)]
        stack = Stack(units, images, torch.device("cuda"))
        assert stack.fused
        stack.fused = fused
        stack.train_epoch()
        return stack

    def test_masks_and_order_equal_those_on_a_cpu(self):
        cpu, cuda = stack_of(*MIXED), Stack(MIXED, bright(), torch.device("cuda"))
        for one, other in zip(cpu.segments, cuda.segments, strict=True):
            for name in ("weight", "bias"):
                if one.regulariser.method.kind.startswith("dropconnect"):
                    masks = [s.regulariser._mask(name, 11, 1) for s in (one, other)]
                    assert torch.equal(masks[0], masks[1].cpu())
        for stack in (cpu, cuda):
            stack.train_epoch()
        assert torch.equal(cpu.order, cuda.order.cpu())

    def test_training_resumes_bit_for_bit_in_float64(self):
        whole = on_gpu(MIXED, "float64")
        first = on_gpu(MIXED, "float64", epochs=1)
        second = on_gpu(MIXED, "float64", epochs=0)
        second.load_state(first.state())
        second.train_epoch()
        for row in range(len(MIXED)):
            assert_close(tensors_of(second, row), tensors_of(whole, row), 1e-12)

    def test_a_gpu_says_its_name(self):
        assert device.describe(device.choose("auto")) == torch.cuda.get_device_name()
