"""Stacks of networks given as layers: replicas alone and together, stopped and resumed, on a GPU, as modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layered_cases import LAYERS, METHODS, PROTOCOL, stack_of, train, unit
from tiny_cases import tiny
from torch import Tensor
from torch.nn.functional import cross_entropy

import dropconnectpp
from dropconnectpp.inference.schedule import Steering
from dropconnectpp.lab.config.protocol import Architecture, Normalisation, Training
from dropconnectpp.lab.replicas import layered_deployment, layered_evaluation, layered_modules, layered_stack
from dropconnectpp.lab.replicas.layered_stack import LayeredStack, step_factor
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.pruning.plan import PlannedGates

ALL = [unit(name) for name in METHODS]


@pytest.fixture(scope="module")
def trained() -> LayeredStack:
    return train(stack_of(*ALL))


def numbers(stack: LayeredStack, row: int) -> list[Tensor]:
    weights = layered_evaluation.stacked_weights(stack, True) + layered_evaluation.stacked_weights(stack, False)
    return [value[row] for value in [*stack.weights, *stack.biases, *weights]]


@pytest.mark.parametrize("name", METHODS)
def test_a_replica_does_not_know_its_neighbours(trained: LayeredStack, name: str) -> None:
    alone = train(stack_of(unit(name)))
    for one, other in zip(numbers(alone, 0), numbers(trained, list(METHODS).index(name)), strict=True):
        assert torch.equal(one, other)


def test_methods_share_start_and_order() -> None:
    stack = stack_of(*ALL)
    stack.shuffle()
    for value in (*stack.weights, stack.order):
        assert bool((value == value[:1]).all())
    other = stack_of(unit("none", 1))
    assert not torch.equal(other.weights[0][0], stack.weights[0][0])


def test_training_resumes_bit_for_bit(trained: LayeredStack, tmp_path) -> None:
    first = train(stack_of(*ALL), 2)
    torch.save(first.state(), tmp_path / "state.pt")
    second = stack_of(*ALL)
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    train(second, 3)
    for row in range(len(ALL)):
        for one, other in zip(numbers(second, row), numbers(trained, row), strict=True):
            assert torch.equal(one, other)


class Stop(Exception):
    pass


@pytest.mark.parametrize("steps", [2, 9, 20])
def test_interrupted_between_two_batches_it_resumes_bit_for_bit(
    trained: LayeredStack, tmp_path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    def stop(_: float) -> None:
        if int(first.step) == steps:
            raise Stop

    monkeypatch.setattr(layered_stack, "TOLD_EVERY", 1)
    first, second = stack_of(*ALL), stack_of(*ALL)
    first.on_batch = stop
    with pytest.raises(Stop):
        train(first)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    losses = second.train_epoch()
    train(second, 5 - second.epoch)
    for row in range(len(ALL)):
        for one, other in zip(numbers(second, row), numbers(trained, row), strict=True):
            assert torch.equal(one, other), ALL[row].protocol.label
    assert torch.equal(losses, train(stack_of(*ALL), (steps - 1) // 4 + 1).loss_sum / 4)


def test_a_plain_replica_is_what_torch_trains() -> None:
    stack = stack_of(unit("none"))
    module = layered_modules.to_module(stack, 0)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    for epoch in range(5):
        stack.shuffle()
        for batch, chosen in enumerate(stack.order[0].split(16)):
            images = stack.examples.images[stack.examples.rows[chosen]].permute(0, 3, 1, 2)
            loss = cross_entropy(module(images), stack.examples.labels[stack.examples.rows[chosen]])
            optimiser.zero_grad()
            loss.backward()
            for group in optimiser.param_groups:
                group["lr"] = 0.01 * step_factor(PROTOCOL.training, (4 * epoch + batch) / 20)
            optimiser.step()
        stack.train_epoch()
    for one, other in zip(layered_modules.to_module(stack, 0).parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_shares_are_what_was_asked_for(trained: LayeredStack) -> None:
    results = dict(zip(METHODS, layered_evaluation.final(trained, PROTOCOL.evaluation), strict=True))
    sizes = [27, 288, 18]
    assert results["none"]["weights"] == results["none"]["weights_kept"] == sum(sizes)

    def kept(name: str) -> list[int]:
        return [layer["kept"] for layer in results[name]["layers"]]

    gated = sum(sizes[:2])
    asked = {"gradual": 0.25, "one-shot": 0.2, "no learning": 0.2, "vd ranked": 0.1, "l0 ranked": 0.1}
    for name, share in asked.items():
        assert sum(kept(name)[:2]) == round(share * gated), name
    assert kept("by layer") == [round(0.3 * 27), round(0.3 * 288), 18]
    assert kept("one-shot")[0] >= 3
    assert kept("random") == [14, 29, 18]
    # Learned supports: some is lost and some is kept, and controls keep the same number.
    for name in ("price", "by size", "any", "groups", "units"):
        assert 0 < sum(kept(name)[:2]) < gated, name
    assert kept("by size") != [27, 288, 18]
    assert results["price"]["price"] == 3.0
    assert results["price"]["kl"] > 0


def test_weights_outside_the_support_are_zero_and_modules_predict_the_same(trained: LayeredStack) -> None:
    weights = layered_evaluation.stacked_weights(trained, True)
    for weight, support in zip(weights, layered_evaluation.supports(trained), strict=True):
        assert bool((weight[~support] == 0).all())
        assert bool((weight[support] != 0).any())
    logits = layered_evaluation.logits_of(trained, weights)
    images = trained.examples.test_images.permute(0, 3, 1, 2)
    for row in range(len(ALL)):
        with torch.no_grad():
            found = layered_modules.to_module(trained, row)(images).double()
        torch.testing.assert_close(found, logits[row], rtol=1e-4, atol=1e-5)


def test_a_group_is_on_or_off_as_a_whole(trained: LayeredStack) -> None:
    conv, dense, _ = layered_evaluation.supports(trained)
    inputs, units = (list(METHODS).index(name) for name in ("groups", "units"))
    for mask in (conv[inputs].view(9, 1, 3).transpose(0, 1).flatten(1), dense[inputs], conv[units].T, dense[units].T):
        assert bool((mask.all(1) | ~mask.any(1)).all())


def test_what_whole_networks_weigh_without_their_units(trained: LayeredStack) -> None:
    found = dict(zip(METHODS, layered_deployment.measure(trained, rounds=1), strict=True))
    assert found["none"] is None
    for name in ("groups", "units"):
        deployment = found[name]
        assert deployment is not None
        sizes = deployment.sizes
        assert sizes["parameters"][0] == sum((27, 288, 18)) + 12
        assert sizes["bytes"][0] == 4 * sizes["parameters"][0]
        assert sizes["bytes"][1] < sizes["bytes"][0]
        assert all(ms > 0.0 for ms in deployment.passes["ms"])
        row = list(METHODS).index(name)
        whole = layered_modules.to_module(trained, row)
        small: Any = dropconnectpp.compact(whole)
        assert list(small.compaction.parameters) == sizes["parameters"]
        images = trained.examples.test_images.permute(0, 3, 1, 2)
        torch.testing.assert_close(small(images), whole(images), rtol=1e-5, atol=1e-6)


def test_a_network_that_diverged_has_no_size() -> None:
    stack = train(stack_of(unit("units")), 1)
    stack.biases[0][0, 0] = torch.nan
    assert layered_deployment.measure(stack, rounds=1) == [None]


def test_the_plans_support_does_not_change_once_it_is_fixed() -> None:
    stack = train(stack_of(unit("plan")), 4)  # fixed after 16 of 20 steps
    before = [one.clone() for one in layered_evaluation.supports(stack)]
    weights = [one.clone() for one in stack.weights]
    train(stack, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, layered_evaluation.supports(stack), strict=True))
    assert not torch.equal(weights[1], stack.weights[1])


def test_the_plan_steers_by_the_librarys_schedule() -> None:
    stack = stack_of(unit("plan"))
    (segment,) = stack.segments
    assert isinstance(segment, PlannedGates)
    schedule, state = segment.schedules[0], segment.schedules[0].start()
    for step in range(1, 17):
        if (step - 1) % 4 == 0:
            stack.shuffle()
            stack.position.zero_()
        stack._act(step - 1)
        stack._one_step()
        if step % 4 == 0:
            stack.epoch += 1
        segment.step = step
        share = sum(segment.counts()[0]) / segment.total
        if schedule.reads(step):
            state = schedule.steer(state, step, share)
            segment.before_step(step)
            assert segment.steerings == [Steering(*state)]
        if step < 16:
            expected = schedule.kl_weight_at(state, step, 1.0, 99.0) / schedule.kl_factor(step)
            assert float(segment.kl_weights) == pytest.approx(expected, rel=1e-5)


def test_learning_lowers_the_loss() -> None:
    """Classes that differ in a corner are told apart by a network of which a fifth is left."""
    dataset = tiny()
    for split in (dataset.train, dataset.test):
        split.images[:, :, :4, :4] = 120 * split.labels[:, None, None, None]
    training = Training(step_size=0.02, optimiser="adam", batch_size=16, epochs=20)
    protocol = replace(PROTOCOL, training=training)
    units = [unit(name, 0, protocol) for name in ("none", "gradual", "no learning")]
    stack = train(LayeredStack(units, dataset, torch.device("cpu")))
    for result in layered_evaluation.final(stack, protocol.evaluation):
        assert result["accuracy"] > 80.0


def test_held_out_images_are_the_last_and_given_numbers_standardise() -> None:
    protocol = replace(
        PROTOCOL,
        training=replace(PROTOCOL.training, holdout=10, holdout_kind="last"),
        normalisation=Normalisation(scope="given", mean=0.5, standard_deviation=0.25, crop=1),
    )
    dataset = tiny()
    examples = LayeredStack([Unit(protocol, 0)], dataset, torch.device("cpu")).examples
    assert examples.rows.tolist() == list(range(54))
    right = (torch.from_numpy(dataset.train.images[-10:, 0, 1:-1, 1:-1]) / 255.0 - 0.5) / 0.25
    torch.testing.assert_close(examples.test_images[..., 0], right)
    assert examples.shape == (1, 6)


def test_units_that_are_cut_off_are_counted() -> None:
    shape = Architecture(layers=LAYERS).shape(1, 8, 3)
    layers = shape.weight_layers()
    masks = [torch.ones(one.fan_in, one.units, dtype=torch.bool) for one in layers]
    masks[0][:, 0] = False  # map 0 has nothing coming in
    masks[1].view(16, 3, 6)[:, 1] = False  # map 1 goes nowhere
    masks[1][:, 5] = False  # unit 5 has nothing coming in
    masks[2][4] = False  # unit 4 goes nowhere
    first, second, third = layered_evaluation.layers_left(layers, masks)
    assert (first["units_left"], first["kept"], first["connected"]) == (1, 18, 9)
    assert (second["inputs_left"], second["units_left"], second["connected"]) == (16, 4, 64)
    assert (third["inputs_left"], third["units_left"], third["connected"], third["kept"]) == (4, 3, 12, 15)


def test_what_is_kept_is_counted_by_place_map_and_unit() -> None:
    conv, _, dense = stack_of(unit("none")).layers
    mask = torch.zeros(9, 3, dtype=torch.bool)
    mask[2, 1] = mask[8, 1] = mask[8, 0] = True
    found = layered_evaluation.kept_along(conv, mask)
    assert found == {"by_place": [0, 0, 1, 0, 0, 0, 0, 0, 2], "by_map": [3], "by_unit": [1, 2, 0]}
    assert layered_evaluation.kept_along(dense, torch.zeros(6, 3, dtype=torch.bool)) == {}, "it has no gates"
    assert layered_evaluation.kept_along(conv, torch.ones(9, 3, dtype=torch.bool)) == {}, "it is whole"


def test_a_dense_layers_places_are_those_of_the_maps_it_reads() -> None:
    dense = stack_of(unit("none")).layers[1]  # 4 x 4 places of 3 maps
    mask = torch.zeros(48, 6, dtype=torch.bool)
    mask[3 * 5 + 2, 4] = True
    found = layered_evaluation.kept_along(dense, mask)
    assert [found[name].index(1) for name in ("by_place", "by_map", "by_unit")] == [5, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_trains_what_the_cpu_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 products: few weights may differ, those whose gradient is rounding alone."""
    monkeypatch.setattr(layered_stack, "fast_products", lambda *_: torch.no_grad())
    protocol = replace(PROTOCOL, precision="float32")
    ours, theirs = (stack_of(unit(name, 0, protocol), unit(name, 1, protocol), device=d) for d in ("cuda", "cpu"))
    for _ in range(2):
        torch.testing.assert_close(ours.train_epoch().cpu(), theirs.train_epoch(), rtol=2e-3, atol=2e-3)
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        assert float(((one.cpu() - other).abs() > 1e-4).float().mean()) < 0.02


@pytest.mark.gpu
def test_a_graph_repeats_the_step() -> None:
    one, other = (train(stack_of(*ALL, device="cuda", graph=graph)) for graph in (True, False))
    for row in range(len(ALL)):
        for a, b in zip(numbers(one, row), numbers(other, row), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
