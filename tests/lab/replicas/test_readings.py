"""Readings of the paper beside the usual one: masks for each example, 1/p scaling, Adam, settings by epoch, pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from stack_cases import (
    CPU,
    METHODS,
    assert_close,
    assert_equal,
    assert_fused_is_plain,
    bright,
    settings,
    stack_of,
    tensors_of,
    trained,
)

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.modules import to_module
from dropconnectpp.lab.replicas.network import Shape, Unit
from dropconnectpp.lab.replicas.stack import Stack

EXAMPLE = Method(kind="dropconnect", rate=0.4, mask="example")
SCALED = Method(kind="dropconnect", rate=0.4, scaling="training")
RISE = ByEpoch(at=(0, 2), rate=(0.2, 0.8), step_size=(0.05, 0.01), between="linear")
PRICED = ByEpoch(at=(0, 1), kl_weight=(2.0, 30.0))


def by_epoch(method: Method, schedule: ByEpoch, **training: Any) -> Protocol:
    base = settings(replace(method, rate=None), **{"epochs": 3, **training})
    step = None if schedule.step_size else base.training.step_size
    return replace(base, by_epoch=schedule, training=replace(base.training, step_size=step))


# ------------------------------------------------------------------------------------------- by epoch


@pytest.mark.parametrize("name", ["dropout", "dropconnect"])
def test_each_epoch_trains_with_its_own_step_size_and_rate(name):
    protocol = by_epoch(METHODS[name], RISE)
    whole = trained([Unit(protocol, 3)], epochs=3)
    pieces = stack_of(Unit(protocol, 3))
    for epoch, (rate, step) in enumerate([(0.2, 0.05), (0.5, 0.03), (0.8, 0.01)]):
        fixed = settings(replace(METHODS[name], rate=rate), epochs=3, step_size=step)
        one = stack_of(Unit(fixed, 3))
        one.load_state(pieces.state())
        one.train_epoch()
        assert one.epoch == epoch + 1
        pieces.load_state(one.state())
    assert_close(tensors_of(pieces, 0), tensors_of(whole, 0), 1e-12)


def test_the_weight_of_the_kl_changes_too_and_keeps_its_warm_up():
    method = replace(METHODS["straight-through"], kl_weight=1.0, kl_warmup=2)
    stack = stack_of(Unit(by_epoch(method, PRICED), 0))
    found = []
    for _ in range(3):
        stack.train_epoch()
        found.append(float(stack.segments[0].regulariser.kl_scale * len(stack.examples.rows)))
    assert found == pytest.approx([0.0, 15.0, 30.0])


def test_settings_change_in_place_as_a_cuda_graph_needs_it():
    stack = stack_of(Unit(by_epoch(METHODS["dropconnect"], RISE), 0))
    regulariser = stack.segments[0].regulariser
    tensors = [
        stack.step_sizes,
        regulariser.rates,
        regulariser.keep,
        regulariser.kl_scale,
        stack.segments[0].gate_sizes,
    ]
    before = [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        stack.train_epoch()
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert [stack.step_sizes.item(), regulariser.rates.item()] == pytest.approx([0.03, 0.5])


def test_the_fused_step_follows_settings_by_epoch():
    units = [Unit(by_epoch(METHODS["dropconnect"], RISE), r) for r in range(2)]
    assert_fused_is_plain([*units, Unit(settings(METHODS["dropconnect"], epochs=3), 7)], batch_size=4)


def test_a_network_is_measured_with_the_settings_of_its_last_epoch():
    protocol = by_epoch(METHODS["dropconnect"], RISE)
    stack = trained([Unit(protocol, 0)], epochs=3)
    resumed = stack_of(Unit(protocol, 0))
    resumed.load_state(stack.state())
    one, other = (evaluation.along_the_way(each, protocol.evaluation) for each in (stack, resumed))
    assert one == other
    assert stack.segments[0].regulariser.rates.item() == pytest.approx(0.8)
    x = torch.randn(5, *stack.examples.images.shape[1:], dtype=torch.float64)
    module = to_module(stack, 0)
    assert module.dense.fixed_keep_probability == pytest.approx(0.2)
    assert module(x).shape == (5, 3)


# ------------------------------------------------------------------------------- a mask for each example


def test_masks_of_examples_are_drawn_with_the_rate_and_differ():
    stack = stack_of(Unit(settings(replace(EXAMPLE, rate=0.75)), 0))
    regulariser = stack.segments[0].regulariser
    units, inputs = stack.shape.dense
    x = torch.eye(inputs, dtype=torch.float64).expand(1, -1, -1)
    weight, bias = torch.ones(1, units, inputs, dtype=torch.float64), torch.zeros(1, units, dtype=torch.float64)
    hidden = regulariser.train_pass(x, weight, bias, torch.tensor(0), 0)
    assert set(hidden.unique().tolist()) == {0.0, 1.0}
    # 4 * 48 draws of 1/4: five standard deviations are 0.156
    assert hidden.mean().item() == pytest.approx(0.25, abs=0.156)
    same = x[:, :1].expand(-1, 40, -1)
    assert len(regulariser.train_pass(same, weight, bias, torch.tensor(0), 0)[0].unique(dim=0)) > 1


@pytest.mark.parametrize("method", [EXAMPLE, SCALED])
def test_a_replica_of_a_reading_does_not_know_its_neighbours(method):
    units = [Unit(settings(method), 0), Unit(settings(METHODS["dropconnect"]), 1), Unit(settings(method), 5)]
    stack = trained(units)
    for row, unit in enumerate(units):
        assert_close(tensors_of(stack, row), tensors_of(trained([unit]), 0), 1e-12)


@pytest.mark.parametrize("method", [EXAMPLE, SCALED])
def test_a_reading_resumes_bit_for_bit(method):
    unit = Unit(settings(method), 0)
    whole, first, second = trained([unit], epochs=3), trained([unit], epochs=1), stack_of(unit)
    second.load_state(first.state())
    for _ in range(2):
        second.train_epoch()
    assert_equal(tensors_of(second, 0), tensors_of(whole, 0))


@pytest.mark.parametrize("method", [EXAMPLE, SCALED, replace(SCALED, evaluation="gaussian")])
def test_a_reading_becomes_a_module_that_predicts_alike(method):
    stack = trained([Unit(settings(method), 0)])
    module, images = to_module(stack, 0), stack.examples.test_images
    logits = stack.predict_segment(stack.segments[0], stack.features_of(images))[0]
    torch.testing.assert_close(module(stack.examples.standardise(images, torch.float64)), logits)


def test_the_fused_step_scales_in_training_too():
    units = [Unit(settings(replace(SCALED, rate=rate)), r) for r, rate in enumerate((0.2, 0.7))]
    assert_fused_is_plain([*units, Unit(settings(METHODS["dropconnect"]), 7)], batch_size=4)


def test_what_kernels_do_not_cover_is_left_to_the_plain_step():
    assert stack_of(Unit(settings(EXAMPLE), 0)).segments[0].regulariser.gate() is None
    assert stack_of(Unit(settings(METHODS["dropconnect"]), 0)).segments[0].regulariser.gate() is not None


# ----------------------------------------------------------------------------------------- 1/p scaling


def test_scaling_in_training_is_the_usual_one_with_weights_and_steps_as_large():
    """Under Adagrad: V = W / p starts 1/p times as far out, and moves by 1/p times as much."""
    keep = 0.6
    scaled = stack_of(Unit(settings(SCALED), 0))
    usual = stack_of(Unit(settings(Method(kind="dropconnect", rate=0.4)), 0))
    for name in ("dense.weight", "dense.bias"):
        usual.parameters[name].div_(keep)
    batch, labels = scaled.examples.images[:4][None].double(), scaled.examples.labels[:4][None]
    rewards, gradients = scaled._gradients(batch, labels)
    other_rewards, others = usual._gradients(batch, labels)
    torch.testing.assert_close(rewards, other_rewards)
    torch.testing.assert_close(gradients["dense.weight"], others["dense.weight"] / keep)
    torch.testing.assert_close(gradients["output.weight"], others["output.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "example", "num_samples": 2}, "mask 'example' goes with one sample"),
        ({"mask": "example", "slab": 0.1}, "mask 'example' goes with one sample"),
        ({"scaling": "training", "slab": 0.1}, "scaling 'training' goes without a slab"),
        ({"kind": "dropout", "mask": "example"}, "mask = 'example' does nothing for dropout"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ProtocolError, match=message):
        Method(**{"kind": "dropconnect", "rate": 0.5, **options})


# ------------------------------------------------------------------------------------------------ Adam

ADAM = {"optimiser": "adam", "step_size": 0.01}


def test_adam_is_torchs():
    unit = Unit(settings(METHODS["none"], **ADAM), 0)
    stack = stack_of(unit)
    values = {name: value[0].clone().requires_grad_() for name, value in stack.parameters.items()}
    optimizer = torch.optim.Adam(values.values(), lr=0.01)
    for step in range(3):
        gradients = {name: torch.full_like(value, 0.1 * (step - 1.5)) for name, value in values.items()}
        for name, value in values.items():
            value.grad = gradients[name]
        optimizer.step()
        stack.update({name: value[None] for name, value in gradients.items()})
        stack.step += 1
    for name, value in values.items():
        torch.testing.assert_close(stack.parameters[name][0], value.detach())


@pytest.mark.parametrize("name", METHODS)
def test_networks_trained_by_adam_do_not_know_each_other_and_resume(name):
    units = [Unit(settings(METHODS[name], **ADAM), 0), Unit(settings(METHODS[name], **ADAM | {"step_size": 0.02}), 4)]
    whole, first, second = trained(units, epochs=2), trained(units, epochs=1), stack_of(*units)
    second.load_state(first.state())
    second.train_epoch()
    for row, unit in enumerate(units):
        assert_equal(tensors_of(second, row), tensors_of(whole, row))
        assert_close(tensors_of(trained([unit]), 0), tensors_of(whole, row), 1e-12)


def test_adam_learns_and_moves_the_posterior():
    unit = Unit(settings(METHODS["straight-through"], **ADAM), 0)
    stack = stack_of(unit, dataset=bright(train=80))
    losses = [stack.train_epoch().item() for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]
    assert stack.segments[0].regulariser.keep_probability("weight").std() > 0.01


def test_adam_takes_no_late_start():
    with pytest.raises(ProtocolError, match="learn_after is for Adagrad"):
        settings(Method(learn_after=2), **ADAM)


# ------------------------------------------------------------------------------------------- the others


def test_pooling_after_all_three_layers_leaves_a_quarter_of_the_synapses():
    everywhere = Architecture(pooled=(True, True, True))
    assert Shape(everywhere, 3, 32, 10).synapses == 65_600
    one = replace(settings(METHODS["dropconnect"]), architecture=replace(everywhere, maps=(2, 2, 3), hidden=4))
    stack = Stack([Unit(one, 0)], bright(side=16), CPU)
    assert stack.shape.dense == (4, 3 * 2 * 2)
    assert torch.isfinite(stack.train_epoch()).all()


def test_eq_16_with_the_baseline_of_the_same_sample_trains():
    method = Method(estimator="eq16", baseline="same-sample", logit_step=30.0)
    stack = trained([Unit(settings(method), 0)])
    assert stack.segments[0].regulariser.keep_probability("weight").std() > 0.0


# --------------------------------------------------------------------------------------------------- a GPU


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @staticmethod
    def stack(protocols: list[Protocol], precision: str, graph: bool = True) -> Stack:
        units = [Unit(replace(one, precision=precision), row) for row, one in enumerate(protocols)]
        return Stack(units, bright(), torch.device("cuda"), graph=graph)

    @pytest.mark.parametrize("precision", ["float64", "mixed"])
    def test_a_graph_follows_rates_and_step_sizes_by_epoch(self, precision):
        protocols = [by_epoch(METHODS[name], RISE) for name in ("dropout", "dropconnect")]
        graph, eager, stale = (self.stack(protocols, precision, graph=graph) for graph in (True, False, True))
        stale.begin_epoch = lambda: None  # type: ignore[method-assign]
        assert graph.fused == (precision == "mixed")
        graphs = []
        for _ in range(3):
            for stack in (graph, eager, stale):
                stack.train_epoch()
            graphs.append(graph._graph)
        assert graphs[0] is not None
        assert all(one is graphs[0] for one in graphs), "captured once"
        tolerance = {"float64": 1e-9, "mixed": 5e-2}[precision]
        for row in range(len(protocols)):
            assert_close(tensors_of(graph, row), tensors_of(eager, row), tolerance)
        apart = (stale.parameters["output.weight"] - graph.parameters["output.weight"]).abs()
        assert apart.max() > tolerance, "a graph that reads the first epoch's numbers would be caught"

    @pytest.mark.parametrize("precision", ["float32", "float64"])
    def test_readings_train_in_a_graph_as_on_a_cpu(self, precision):
        protocols = [settings(method, step_size=0.005) for method in (EXAMPLE, SCALED)]
        graph, cpu = self.stack(protocols, precision), self.stack_on_cpu(protocols, precision)
        for stack in (graph, cpu):
            stack.train_epoch()
        assert graph._graph is not None
        tolerance = {"float64": 1e-9, "float32": 2e-2}[precision]
        torch.testing.assert_close(graph.loss_sum.cpu(), cpu.loss_sum, rtol=tolerance, atol=0)
        if precision == "float64":
            for row in range(len(protocols)):
                assert_close(tensors_of(graph, row), tensors_of(cpu, row), tolerance)

    def test_scaling_in_training_goes_through_the_fused_step(self):
        images = bright(train=160, channels=3, side=32)
        protocol = settings(SCALED, step_size=0.0005, batch_size=16)
        protocol = replace(protocol, architecture=Architecture(), precision="mixed")
        fused, plain = (Stack([Unit(protocol, r) for r in range(2)], images, torch.device("cuda")) for _ in range(2))
        assert fused.fused
        plain.fused = False
        for stack in (fused, plain):
            stack.train_epoch()
        torch.testing.assert_close(fused.loss_sum, plain.loss_sum, rtol=0.02, atol=0)
        for name, value in plain.parameters.items():
            assert (fused.parameters[name] - value).abs().median() <= 1e-3, name

    def test_adam_trains_in_a_graph_as_on_a_cpu(self):
        protocols = [settings(method, **ADAM) for method in METHODS.values()]
        graph, cpu = self.stack(protocols, "float64"), self.stack_on_cpu(protocols, "float64")
        for stack in (graph, cpu):
            for _ in range(2):
                stack.train_epoch()
        assert not self.stack(protocols, "mixed").fused
        for row in range(len(protocols)):
            assert_close(tensors_of(graph, row), tensors_of(cpu, row), 1e-9)

    @staticmethod
    def stack_on_cpu(protocols: list[Protocol], precision: str) -> Stack:
        units = [Unit(replace(one, precision=precision), row) for row, one in enumerate(protocols)]
        return Stack(units, bright(), CPU)
