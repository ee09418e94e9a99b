"""One mask per example: each example as though alone, in blocks whose masks are drawn again for the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dropconnectpp as dcpp
from dropconnectpp import errors, functional
from dropconnectpp.layers import per_example
from dropconnectpp.layers.passes import assigned, running
from dropconnectpp.ops.drawn import Draw
from dropconnectpp.ops.noise import generator_of

# (layer, its arguments, shape of an example)
LAYERS = {
    "linear": (dcpp.DropConnectPPLinear, {"in_features": 3, "out_features": 2}, (3,)),
    "linear, further axes": (dcpp.DropConnectPPLinear, {"in_features": 3, "out_features": 2}, (5, 2, 3)),
    "linear, no bias": (dcpp.DropConnectPPLinear, {"in_features": 3, "out_features": 2, "bias": False}, (4, 3)),
    "conv1d, groups": (
        dcpp.DropConnectPPConv1d,
        {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "padding": 1},
        (4, 7),
    ),
    "conv1d, circular": (
        dcpp.DropConnectPPConv1d,
        {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 2, "padding_mode": "circular"},
        (2, 6),
    ),
    "conv2d, stride and dilation": (
        dcpp.DropConnectPPConv2d,
        {"in_channels": 2, "out_channels": 4, "kernel_size": (3, 2), "stride": (2, 1), "dilation": (1, 2)},
        (2, 7, 6),
    ),
    "conv2d, depthwise, reflect": (
        dcpp.DropConnectPPConv2d,
        {
            "in_channels": 3,
            "out_channels": 3,
            "kernel_size": 3,
            "padding": 1,
            "groups": 3,
            "padding_mode": "reflect",
            "stride": 2,
        },
        (3, 5, 5),
    ),
    "conv2d, same, no bias": (
        dcpp.DropConnectPPConv2d,
        {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": "same", "bias": False},
        (2, 4, 5),
    ),
    "conv3d, replicate": (
        dcpp.DropConnectPPConv3d,
        {
            "in_channels": 2,
            "out_channels": 4,
            "kernel_size": 2,
            "padding": (1, 0, 1),
            "groups": 2,
            "padding_mode": "replicate",
        },
        (2, 3, 3, 4),
    ),
}
BATCH = 5


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small gain nothing from threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name, **options):
    kind, arguments, shape = LAYERS[name]
    layer = kind(**arguments, mask="example", **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer, torch.randn(BATCH, *shape, dtype=torch.float64, requires_grad=True)


def gradients(output, layer, inputs):
    """By the inputs and every parameter, for a loss that no two outputs enter alike."""
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    targets = {"input": inputs, **dict(layer.named_parameters())}
    loss = (weights * torch.tanh(output)).sum()
    found = torch.autograd.grad(loss, list(targets.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(targets, found, strict=True))


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def drawn(layer, seed, *, relaxed=False, mirrored=False):
    """What the draw of a seed gives a layer."""
    streams = {name: number for number, name in enumerate(layer.synapse_names)}
    return layer.gates(Draw(torch.tensor(seed)), streams, relaxed=relaxed, mirrored=mirrored)


def gates_of(layer, gates):
    """The gates of every example, gathered from the blocks."""
    blocks = [masks for _, masks in layer.example_gates(gates).blocks(BATCH)]
    return {name: torch.cat([block[name] for block in blocks]) for name in layer.synapse_names}


def plainly(layer, inputs, gates):
    """What the layer computes, by plain autograd: one example after another through its gates."""
    outputs = []
    for row in range(BATCH):
        gated = [getattr(layer, name) * gates[name][row] for name in layer.synapse_names]
        outputs.append(layer.operate(inputs[row : row + 1], gated[0], gated[1] if len(gated) > 1 else None))
    return torch.cat(outputs)


@pytest.fixture(params=[1, 40, 2**23], ids=["blocks of one", "small blocks", "one block"])
def _block_elements(request, monkeypatch):
    monkeypatch.setattr(per_example, "BLOCK_ELEMENTS", {"cpu": request.param})


@pytest.fixture(params=[0, 2**27], ids=["drawn again", "kept"])
def _kept_elements(request, monkeypatch):
    """With and without masks that wait for backward."""
    monkeypatch.setattr(per_example, "KEPT_ELEMENTS", request.param)


# ---------------------------------------------------------------------- each example by itself


@pytest.mark.usefixtures("_block_elements")
@pytest.mark.parametrize("name", LAYERS)
def test_forced_masks_act_as_though_each_example_were_alone(name):
    layer, inputs = build(name)
    masks = {key: torch.randint(2, (BATCH, *getattr(layer, key).shape)) for key in layer.synapse_names}
    with dcpp.forced_masks(layer, masks):
        together = layer(inputs)
    alone = []
    for row in range(BATCH):
        with dcpp.forced_masks(layer, {key: mask[row] for key, mask in masks.items()}):
            alone.append(layer(inputs[row : row + 1]))
    alone = torch.cat(alone)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert_same(gradients(together, layer, inputs), gradients(alone, layer, inputs))


def test_examples_have_masks_of_their_own():
    layer = dcpp.DropConnectPPLinear(20, 20, mask="example").double()
    found = gates_of(layer, drawn(layer, 1))
    for masks in found.values():
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == BATCH


def test_masks_follow_the_keep_probabilities():
    layer = dcpp.DropConnectPPLinear(4, 3, mask="example").double()
    nn.init.normal_(layer.weight_logit)
    count = 20_000
    blocks = [masks["weight"] for _, masks in layer.example_gates(drawn(layer, 3)).blocks(count)]
    pi = layer.keep_probability().detach()
    score = (torch.cat(blocks).double().mean(0) - pi) / torch.sqrt(pi * (1 - pi) / count)
    assert score.abs().max() < 4.5
    wrong = (torch.cat(blocks).double().mean(0) - pi - 0.03) / torch.sqrt(pi * (1 - pi) / count)
    assert wrong.abs().min() > 4.5  # a rate three hundredths off is noticed


# ----------------------------------------------------------------------------- blocks and gradients


@pytest.mark.usefixtures("_block_elements", "_kept_elements")
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "concrete", "disarm"])
@pytest.mark.parametrize("name", ["linear, further axes", "conv1d, groups", "conv2d, depthwise, reflect"])
def test_gradients_are_those_of_the_masks_drawn(name, estimator):
    layer, inputs = build(name, estimator=estimator)
    gates = drawn(layer, 11, relaxed=True)
    with running({layer: gates}):
        output = layer(inputs)
    masks = gates_of(layer, gates)
    if estimator == "concrete":
        assert all(mask.is_floating_point() for mask in masks.values())
    else:
        assert all(mask.dtype == torch.bool for mask in masks.values())
    if estimator == "straight-through":
        masks = {key: mask + soft(layer, key) - soft(layer, key).detach() for key, mask in masks.items()}
    elif estimator == "concrete":  # a gate's noise is known from its value: logit(z) T = logit - logit(u)
        masks = {
            key: torch.sigmoid(
                torch.logit(mask) + (layer.logit(key) - layer.logit(key).detach()) / layer.estimator.temperature
            )
            for key, mask in masks.items()
        }
    expected = plainly(layer, inputs, masks)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(output, layer, inputs), gradients(expected, layer, inputs))


@pytest.mark.usefixtures("_block_elements", "_kept_elements")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_examples_mask_does_not_depend_on_who_else_is_in_the_batch(dtype):
    """Two calls of one pass, the second with fewer examples and the third with more."""
    layer = build("linear")[0].to(dtype)
    gates = drawn(layer, 21)
    found = []
    for batch in (4, 3, 7, 5):
        blocks = [masks["weight"] for _, masks in layer.example_gates(gates).blocks(batch)]
        found.append(torch.cat(blocks))
    for masks in found:
        assert torch.equal(masks, found[2][: len(masks)])
    assert len({tuple(mask.flatten().tolist()) for mask in found[2]}) > 4


def soft(layer, name):
    return torch.sigmoid(layer.logit(name))


@pytest.mark.usefixtures("_block_elements", "_kept_elements")
def test_mirrored_gates_mirror_the_noise():
    layer, _ = build("linear", estimator="disarm")
    first = gates_of(layer, drawn(layer, 11))
    second = gates_of(layer, drawn(layer, 11, mirrored=True))
    for name, pi in (("weight", layer.keep_probability("weight")), ("bias", layer.keep_probability("bias"))):
        both, neither = first[name] & second[name], ~first[name] & ~second[name]
        assert not bool((both & (pi < 0.5)).any())
        assert not bool((neither & (pi > 0.5)).any())
        assert bool((first[name] != second[name]).any())


@pytest.mark.usefixtures("_block_elements", "_kept_elements")
def test_weighted_sums_are_those_of_the_masks():
    layer, _ = build("conv1d, groups")
    gates = drawn(layer, 5)
    weights = torch.randn(3, BATCH, dtype=torch.float64)
    found = layer.example_gates(gates).weighted_sum(weights)
    for name, masks in gates_of(layer, gates).items():
        torch.testing.assert_close(found[name], torch.tensordot(weights, masks.double(), 1))


@pytest.mark.usefixtures("_block_elements", "_kept_elements")
@pytest.mark.parametrize("estimator", ["bbvi", "disarm"])
def test_the_scores_gradient_is_that_of_the_masks_that_ran(estimator):
    layer, inputs = build("linear", estimator=estimator)
    rewards, used = [], []
    layer.register_forward_hook(lambda *_: used.append(assigned(layer)))

    def likelihood(output, target):
        rewards.append(output.detach()[:, 0])
        return output[:, 0]

    elbo = dcpp.ELBO(layer, likelihood, num_data=50, kl_weight=0.0, generator=torch.Generator().manual_seed(2))
    for buffer in elbo.moments.buffers():
        buffer.copy_(torch.tensor([-0.5, 0.5]))
    loss = elbo(inputs.detach(), target=None).loss
    (found,) = torch.autograd.grad(loss, layer.weight_logit)
    masks = [gates_of(layer, gates)["weight"].double() for gates in used]
    pi = soft(layer, "weight").detach()
    if estimator == "bbvi":
        terms = (rewards[0] + 1.0).view(-1, 1, 1) * (masks[0] - pi)
    else:
        terms = 0.5 * (rewards[0] - rewards[1]).view(-1, 1, 1) * (masks[0] - masks[1]) * torch.maximum(pi, 1 - pi)
    torch.testing.assert_close(found, -terms.mean(0), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------ memory


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.usefixtures("_kept_elements")
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "concrete", "disarm"])
def test_memory_is_bounded_by_the_block(monkeypatch, estimator):
    layer = dcpp.DropConnectPPLinear(30, 20, mask="example", estimator=estimator)
    elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=100)
    inputs, target = torch.randn(32, 30), torch.randint(20, (32,))

    def largest(block_elements):
        monkeypatch.setattr(per_example, "BLOCK_ELEMENTS", {"cpu": block_elements})
        with LargestTensor() as seen:
            elbo(inputs, target=target).loss.backward()
        return seen.elements

    assert largest(6 * 600) <= 6 * 600
    assert largest(1) <= 5 * 620  # one example's masks, and the working room of one pass over the synapses
    assert largest(2**23) == 32 * 600  # the whole batch at once, where it fits


# ----------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "concrete", "disarm", "local"])
def test_pruned_synapses_are_off_and_have_no_gradient(estimator):
    layer, inputs = build("linear", estimator=estimator)
    kept = {"weight": torch.tensor([[True, False, True], [False, True, True]]), "bias": torch.tensor([True, False])}
    for name, value in kept.items():
        layer.keep_only(name, value)
    masks = gates_of(layer, drawn(layer, 1, relaxed=estimator == "concrete"))
    for name, value in kept.items():
        assert not masks[name][:, ~value].any()
        assert masks[name].any()
    elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=50, num_samples=2)
    for buffer in elbo.moments.buffers():
        buffer.fill_(0.5)
    elbo(inputs.detach(), target=torch.zeros(BATCH, dtype=torch.long)).loss.backward()
    for name, value in kept.items():
        for parameter in (getattr(layer, name), getattr(layer, f"{name}_logit")):
            assert not parameter.grad[~value].any()
            assert parameter.grad[value].any()


def test_relaxed_gates_are_those_of_the_batch():
    layer, _ = build("linear", estimator="concrete")
    found = gates_of(layer, drawn(layer, 7, relaxed=True))["weight"]
    generator = generator_of(torch.tensor(7), 0, torch.device("cpu"))
    noise = torch.rand(BATCH, 2, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(found, functional.relax_mask(layer.weight_logit, noise, 2 / 3).detach())


@pytest.mark.parametrize("estimator", ["bbvi", "disarm"])
def test_examples_off_the_first_axis_are_refused(estimator):
    """Forward would draw a mask for each of six rows, and the rewards of two examples would go to the first two."""
    layer = dcpp.DropConnectPPLinear(4, 3, mask="example", estimator=estimator)
    model = torch.nn.Sequential(torch.nn.Flatten(0, 1), layer, torch.nn.Unflatten(0, (2, 3)))
    elbo = dcpp.ELBO(model, lambda output, target: output.sum((1, 2)), num_data=9)
    with pytest.raises(errors.ShapeError, match=r"examples on the first axis.* saw 6 rows for a batch of 2"):
        elbo(torch.randn(2, 3, 4), target=None)
