"""Which masks a pass uses: forced, sampled, drawn once for shared parameters, and put back afterwards."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.passes import MEAN, current, running
from dropconnectpp.layers.sampling import draw_samples
from pass_cases import trace_of

GATED = ["bbvi", "straight-through", "concrete", "local", "disarm"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def readable(mask="batch", **options):
    """A layer of ones whose output for the unit vectors is its mask."""
    layer = dcpp.DropConnectPPLinear(4, 3, bias=False, mask=mask, **options).double()
    nn.init.ones_(layer.weight)
    return layer


def read(layer):
    with torch.no_grad():
        return layer(torch.eye(4, dtype=torch.float64))


class Twice(nn.Module):
    """Calls one layer twice: the difference is zero if both calls use one mask."""

    def __init__(self, **options):
        super().__init__()
        self.fc = readable(**options)

    def forward(self, x):
        return self.fc(x) - self.fc(x)


def pair(mask="batch", share=("weight",), estimator="bbvi"):
    """Two layers that share parameters and all that is known of their gates."""
    first, second = (dcpp.DropConnectPPLinear(3, 3, mask=mask, estimator=estimator).double() for _ in range(2))
    for name in share:
        setattr(second, name, getattr(first, name))
        setattr(second, f"{name}_logit", getattr(first, f"{name}_logit"))
    return nn.Sequential(first, second)


def masks_of(model, batch=40, generator=None):
    """Every mask of one draw: {layer: {name: mask}}."""
    layers = list(masked_layers(model).values())
    arm = draw_samples(layers, 1, generator, relaxed=True)[0].arms[0]
    found = []
    for layer in layers:
        gates = arm[layer]
        if gates.each_example:
            blocks = [part for _, part in layer.example_gates(gates).blocks(batch)]
            found.append({name: torch.cat([block[name] for block in blocks]) for name in layer.synapse_names})
        else:
            found.append(
                {
                    name: gates.draw.mask(getattr(layer, name).shape, layer.synapses(name, gates), gates.mirrored)
                    for name in layer.synapse_names
                }
            )
    return found


@contextmanager
def leaving_no_trace(model):
    """Whatever happens inside, the model and the context are afterwards as before."""
    before = trace_of(model)
    yield
    assert trace_of(model) == before
    assert current() == []


# ------------------------------------------------------------------------------------ forced masks


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("estimator", GATED)
def test_forced_masks_are_used_in_train_and_eval_mode(training, estimator):
    layer = readable(estimator=estimator).train(training)
    mask = torch.randint(2, (3, 4))
    with leaving_no_trace(layer), dcpp.forced_masks(layer, {"weight": mask}):
        for _ in range(2):
            torch.testing.assert_close(read(layer).T, mask.double())


def test_layers_that_are_not_named_go_on_as_usual():
    model = nn.Sequential(readable(), nn.Linear(3, 4), readable()).double().eval()
    with dcpp.forced_masks(model, {"0.weight": torch.ones(3, 4)}):
        torch.testing.assert_close(read(model[0]).T, torch.ones(3, 4, dtype=torch.float64))
        torch.testing.assert_close(read(model[2]).T, torch.full((3, 4), 0.5, dtype=torch.float64))


def test_sequences_are_used_in_turn_and_start_again():
    layer = readable()
    masks = [torch.randint(2, (3, 4), generator=seeded(i)) for i in range(3)]
    seen = []

    def remember(output, target):
        seen.append(output.detach().T)
        return output.sum(1)

    elbo = dcpp.ELBO(layer, remember, num_data=10, num_samples=2)
    with dcpp.forced_masks(layer, [{"weight": mask} for mask in masks]):
        for _ in range(2):
            elbo(torch.eye(4, dtype=torch.float64), target=None)
    for found, mask in zip(seen, [*masks, masks[0]], strict=True):
        torch.testing.assert_close(found, mask.double())


def test_sequences_are_used_in_turn_under_sampling():
    layer = readable().eval()
    masks = [torch.randint(2, (3, 4), generator=seeded(i)) for i in range(2)]
    with dcpp.forced_masks(layer, [{"weight": mask} for mask in masks]), dcpp.sampling(layer):
        for mask in (masks[0], masks[1], masks[0]):
            torch.testing.assert_close(read(layer).T, mask.double())


def test_outside_an_elbo_a_sequence_stays_where_it_is():
    layer = readable()
    with dcpp.forced_masks(layer, [{"weight": torch.ones(3, 4)}, {"weight": torch.zeros(3, 4)}]):
        assert read(layer).bool().all()
        assert read(layer).bool().all()


def test_the_second_arm_changes_the_masks_of_antithetic_layers_alone():
    model = nn.Sequential(readable(estimator="disarm"), nn.Linear(3, 4).double(), readable())
    first, second = (torch.randint(2, (2, 3, 4), generator=seeded(seed)).bool() for seed in (1, 2))
    passes = [{"0.weight": masks[0], "2.weight": masks[1]} for masks in (first, second)]
    with dcpp.forced_masks(model, passes):
        arms = draw_samples(list(masked_layers(model).values()), 1, relaxed=True, arms=2)[0].arms
    assert torch.equal(arms[0][model[0]].weight, first[0])
    assert torch.equal(arms[1][model[0]].weight, second[0])
    assert torch.equal(arms[0][model[2]].weight, first[1])
    assert torch.equal(arms[1][model[2]].weight, first[1])


def test_forced_masks_nest():
    layer = readable()
    with leaving_no_trace(layer), dcpp.forced_masks(layer, {"weight": torch.ones(3, 4)}):
        with dcpp.forced_masks(layer, {"weight": torch.zeros(3, 4)}):
            assert not read(layer).bool().any()
        assert read(layer).bool().all()


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_pruned_synapses_stay_off_whatever_is_forced(mask):
    layer = readable(mask=mask)
    kept = torch.rand(3, 4, generator=seeded(1)) < 0.5
    layer.keep_only("weight", kept)
    forced = torch.ones(4, 3, 4) if mask == "example" else torch.ones(3, 4)
    with dcpp.forced_masks(layer, {"weight": forced}):
        torch.testing.assert_close(read(layer).T, kept.double())


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "forced_masks needs at least one mapping of masks, got an empty sequence."),
        (
            {"1.weight": torch.ones(2, 3)},
            "forced_masks: no masked parameter '1.weight'. There are: 0.weight, 0.bias, 2.weight.",
        ),
        (
            {"2.bias": torch.ones(3)},
            "forced_masks: no masked parameter '2.bias'. There are: 0.weight, 0.bias, 2.weight.",
        ),
        (
            {"weight": torch.ones(3, 2)},
            "forced_masks: no masked parameter 'weight'. There are: 0.weight, 0.bias, 2.weight.",
        ),
        (
            {"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2)},
            "forced_masks: the mask of '0.weight' must have shape (2, 3), got (3, 2).",
        ),
        (
            {"0.weight": torch.ones(5, 2, 3), "0.bias": torch.ones(5, 2)},
            "forced_masks: the mask of '0.weight' must have shape (2, 3), got (5, 2, 3).",
        ),
        (
            {"2.weight": torch.ones(1, 5, 2, 2)},
            "forced_masks: the mask of '2.weight' must have shape (2, 2) with a batch axis before it, "
            "got (1, 5, 2, 2).",
        ),
        ({"0.weight": torch.ones(2, 3)}, "forced_masks: 0.bias missing. Give every mask of a layer."),
        (
            [{"2.weight": torch.ones(2, 2)}, {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}],
            "forced_masks: every mapping of a sequence must name the same parameters.",
        ),
    ],
)
def test_forced_masks_that_do_not_fit(masks, message):
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(3, 2), nn.Tanh(), dcpp.DropConnectPPLinear(2, 2, bias=False, mask="example")
    )
    with (
        leaving_no_trace(model),
        pytest.raises(dcpp.errors.ArgumentError, match=f"^{re.escape(message)}$"),
        dcpp.forced_masks(model, masks),
    ):
        pass


def test_forced_masks_have_one_batch_axis_or_none():
    layer = dcpp.DropConnectPPLinear(2, 3, mask="example")
    message = "forced_masks: the masks of weight and bias must have one batch axis or none, got (5, 3, 2) and (3,)."
    with (
        pytest.raises(dcpp.errors.ArgumentError, match=f"^{re.escape(message)}$"),
        dcpp.forced_masks(layer, {"weight": torch.ones(5, 3, 2), "bias": torch.ones(3)}),
    ):
        pass
    masks = {"weight": torch.ones(5, 3, 2), "bias": torch.ones(5, 3)}
    message = "forced_masks gave 5 masks for a batch of 4 examples."
    with pytest.raises(dcpp.errors.ShapeError, match=f"^{re.escape(message)}$"), dcpp.forced_masks(layer, masks):
        layer(torch.ones(4, 2))


# ---------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("estimator", GATED)
def test_sampling_draws_binary_masks_in_eval_mode_by_its_generator(mask, estimator):
    layer = readable(mask, estimator=estimator).eval()

    def draws(seed):
        with dcpp.sampling(layer, seeded(seed)):
            return torch.stack([read(layer) for _ in range(3)])

    first = draws(1)
    assert torch.equal(first, draws(1))
    assert not torch.equal(first, draws(2))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert set(first.flatten().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(read(layer), torch.full((4, 3), 0.5, dtype=torch.float64))


def test_sampling_without_a_generator_follows_torch():
    layer = readable().eval()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with dcpp.sampling(layer):
            outputs.append(read(layer))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_masks_given_inside_sampling_are_used_and_in_turn():
    layer = readable().eval()
    masks = [torch.randint(2, (3, 4), generator=seeded(i)) for i in range(2)]
    with dcpp.sampling(layer):
        read(layer)
        with dcpp.forced_masks(layer, [{"weight": mask} for mask in masks]):
            for mask in (masks[0], masks[1], masks[0]):
                torch.testing.assert_close(read(layer).T, mask.double())
        assert not torch.equal(read(layer), read(layer))
    with dcpp.sampling(layer), dcpp.forced_masks(layer, [{"weight": mask} for mask in masks]):
        for mask in (masks[0], masks[1], masks[0]):
            torch.testing.assert_close(read(layer).T, mask.double())


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "disarm"])
def test_a_bound_inside_sampling_scores_its_own_masks(estimator):
    """The masks that ran must be those that are scored: the innermost context's."""
    model = nn.Sequential(readable(estimator=estimator), nn.Tanh(), nn.Linear(3, 2)).double()
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def gradients(inside):
        model.load_state_dict(start)
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=9, generator=seeded(3))
        for _ in range(2):
            model.zero_grad()
            if inside:
                with dcpp.sampling(model, seeded(1)):
                    loss = elbo(torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 1, 0])).loss
            else:
                loss = elbo(torch.eye(4, dtype=torch.float64), torch.tensor([0, 1, 1, 0])).loss
            loss.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters()}

    alone = gradients(False)
    for key, gradient in gradients(True).items():
        assert torch.equal(gradient, alone[key]), key


@pytest.mark.parametrize("average", ["activations", "probabilities"])
def test_a_prediction_inside_sampling_is_the_prediction(average):
    model = nn.Sequential(readable(activation=nn.Tanh()), nn.Linear(3, 2).double()).eval()

    def found():
        x = torch.eye(4, dtype=torch.float64)
        found = dcpp.predict(model, x, num_samples=3, average=average, likelihood=dcpp.categorical, generator=seeded(2))
        return found.mean

    with dcpp.sampling(model, seeded(1)):
        inside = found()
    assert torch.equal(inside, found())


def test_sampling_a_part_inside_sampling_the_whole_is_sampling_the_part():
    model = nn.Sequential(readable(), nn.Linear(3, 4).double(), readable()).eval()
    x = torch.eye(4, dtype=torch.float64)
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with dcpp.sampling(model, seeded(1)), dcpp.sampling(model[0], seeded(2)):
        first, second = model(x), model(x)
    assert not torch.equal(first, second)
    with dcpp.sampling(model[0], seeded(2)):
        model(x)
        model(x)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])


def test_parts_called_by_themselves_sample_too():
    model = nn.Sequential(readable()).eval()
    with dcpp.sampling(model, seeded(1)):
        assert set(read(model[0]).flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("estimator", GATED)
def test_a_layer_called_twice_in_one_pass_uses_one_mask(mask, estimator):
    model = Twice(mask=mask, estimator=estimator)
    x = torch.rand(5, 4, dtype=torch.float64)
    outputs = []
    elbo = dcpp.ELBO(model, lambda output, target: outputs.append(output) or output.sum(1), num_data=9, num_samples=2)
    elbo(x, target=None)
    with dcpp.sampling(model.eval()):
        outputs.append(model(x))
    assert len(outputs) >= 3
    assert all(bool((output == 0).all()) for output in outputs)
    assert bool((model.train()(x) != 0).any())  # outside every context each call draws for itself


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("estimator", GATED)
def test_an_elbos_generator_makes_its_masks_reproducible(mask, estimator):
    layer = readable(mask, estimator=estimator)

    def outputs(seed):
        elbo = dcpp.ELBO(layer, lambda output, target: output.sum(1), num_data=9, generator=seeded(seed))
        return [elbo(torch.eye(4, dtype=torch.float64), target=None).output.detach() for _ in range(2)]

    first = outputs(1)
    torch.rand(3)  # torch's own generator plays no part
    assert all(torch.equal(a, b) for a, b in zip(first, outputs(1), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], outputs(2)[0])


# ------------------------------------------------------------------------------- shared parameters


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("share", [("weight",), ("bias",), ("weight", "bias")])
def test_shared_parameters_are_drawn_once_and_others_by_themselves(mask, share):
    first, second = masks_of(pair(mask, share), generator=seeded(4))
    for name in ("weight", "bias") if mask == "example" else ("weight",):  # three biases may agree by chance
        assert torch.equal(first[name], second[name]) == (name in share)
    if "bias" in share:
        assert torch.equal(first["bias"], second["bias"])


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
def test_shared_parameters_count_once_in_the_kl(estimator):
    model = pair(estimator=estimator)
    nn.init.normal_(model[0].weight_logit)
    with torch.no_grad():
        expected = model[0].kl("weight").sum() + model[0].kl("bias").sum() + model[1].kl("bias").sum()
        torch.testing.assert_close(dcpp.kl_divergence(model), expected, rtol=1e-12, atol=0)
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=9)
    terms = elbo(torch.randn(4, 3, dtype=torch.float64), target=torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(terms.kl, expected, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------ after trouble


class TroubleError(Exception):
    pass


def fail(*_):
    raise TroubleError


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_behind_by_an_error(training):
    model = Twice().train(training)
    x = torch.rand(2, 4, dtype=torch.float64)
    contexts = [
        lambda: dcpp.forced_masks(model, {"fc.weight": torch.ones(3, 4)}),
        lambda: dcpp.sampling(model),
        lambda: running({model.fc: MEAN}),
    ]
    for context in contexts:
        with leaving_no_trace(model), pytest.raises(TroubleError), context():
            fail(model(x))
    elbo = dcpp.ELBO(model, fail, num_data=9)
    with leaving_no_trace(model), pytest.raises(TroubleError):
        elbo(x, target=None)


def test_an_error_inside_brings_back_the_outer_context():
    model = readable().eval()
    with leaving_no_trace(model), dcpp.forced_masks(model, {"weight": torch.ones(3, 4)}):
        with pytest.raises(TroubleError), dcpp.sampling(model):
            raise TroubleError
        assert read(model).bool().all()


def test_backward_leaves_no_gates_behind():
    model = nn.Sequential(readable())
    elbo = dcpp.ELBO(model, lambda output, target: output.sum(1), num_data=9, num_samples=2)
    with leaving_no_trace(model):
        loss = elbo(torch.eye(4, dtype=torch.float64), target=None).loss
        loss.backward()
    torch.testing.assert_close(read(model.eval()), torch.full((4, 3), 0.5, dtype=torch.float64))
