"""Gates where parameters are read: exact by every mask, for each kind of module; state, files, pruning, transforms."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cases import CASES, Net, choice, plain
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from dropconnectpp.conversion.hosting import Host
from dropconnectpp.errors import ArgumentError, ConversionError
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.parameter import ParameterGates

TARGET = torch.tensor([0, 1])
NUM_DATA = 7
each = pytest.mark.parametrize("name", CASES)


def converted(name: str, **options: Any) -> Any:
    """With gates that all differ."""
    model = dcpp.convert(plain(name), example_input=CASES[name][1], **choice(name), **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("_logit"):
                parameter.copy_(3 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 1.5)
    return model


def gated(model: nn.Module) -> dict[str, ParameterGates]:
    return {name: layer for name, layer in masked_layers(model).items() if isinstance(layer, ParameterGates)}


def parameter_of(name: str) -> str:
    """The parameter's name in the plain model."""
    return name.replace("connections.", "")


def masks_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Every combination of masks of all gates."""
    shapes = {name: layer.weight.shape for name, layer in gated(model).items()}
    sizes = [shape.numel() for shape in shapes.values()]
    found = []
    for bits in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        parts = torch.tensor(bits, dtype=torch.float64).split(sizes)
        found.append({n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)})
    return found


def truth(model: nn.Module, twin: Net, inputs: Any) -> Tensor:
    """The expected log-likelihood of an example: over every mask, of the plain module."""
    layers, total = gated(model), torch.zeros((), dtype=torch.float64)
    own = {parameter_of(name): layer.weight for name, layer in layers.items()}
    for masks in masks_of(model):
        probability = torch.ones((), dtype=torch.float64)
        for name, layer in layers.items():
            pi = layer.keep_probability()
            probability = probability * (masks[name] * pi + (1 - masks[name]) * (1 - pi)).prod()
        weights = {parameter_of(name): own[parameter_of(name)] * mask for name, mask in masks.items()}
        output = functional_call(twin, weights, inputs)
        total = total + probability * output.log_softmax(1).gather(1, TARGET[:, None]).mean()
    return total


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    layers = gated(model).items()
    names = [f"{n}.weight_logit" for n, _ in layers] + [f"{n}.weight" for n, _ in layers]
    values = [layer.weight_logit for _, layer in layers] + [layer.weight for _, layer in layers]
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


@each
def test_the_gradient_is_that_of_the_sum_over_every_mask(name: str) -> None:
    model, inputs = converted(name, estimator="bbvi"), CASES[name][1]
    elbo = dcpp.ELBO(model, dcpp.categorical, NUM_DATA)
    for moment in elbo.moments.buffers():
        moment.fill_(0.3)
    remembered = {key: value.clone() for key, value in elbo.moments.named_buffers()}
    exact = gradients(-truth(model, plain(name), inputs) + dcpp.kl_divergence(model) / NUM_DATA, model)
    found = {key: torch.zeros_like(value) for key, value in exact.items()}
    for masks in masks_of(model):
        probability = 1.0
        for key, layer in gated(model).items():
            pi = layer.keep_probability().detach()
            probability *= float((masks[key] * pi + (1 - masks[key]) * (1 - pi)).prod())
        for key, value in remembered.items():
            elbo.moments.get_buffer(key).copy_(value)
        with dcpp.forced_masks(model, {f"{key}.weight": mask for key, mask in masks.items()}):
            terms = elbo(*inputs, target=TARGET)
        for key, value in gradients(terms.loss, model).items():
            found[key] += probability * value
    for key, value in exact.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10)


@each
def test_straight_through_takes_the_mask_for_its_mean(name: str) -> None:
    model, inputs = converted(name, estimator="straight-through"), CASES[name][1]
    layers = gated(model)
    masks = {key: torch.rand(layer.weight.shape).lt(0.5).double() for key, layer in layers.items()}
    with dcpp.forced_masks(model, {f"{key}.weight": mask for key, mask in masks.items()}):
        found = gradients(model(*inputs).square().sum(), model)
    weights = {}
    for key, layer in layers.items():
        pi = layer.keep_probability()
        weights[parameter_of(key)] = layer.weight * (masks[key] + pi - pi.detach())
    expected = gradients(functional_call(plain(name), weights, inputs).square().sum(), model)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)


@each
@pytest.mark.parametrize("estimator", ["concrete", "disarm", "eq16"])
def test_other_estimators_train(name: str, estimator: str) -> None:
    options = {"hyper": "learned"} if estimator == "eq16" else {}
    model = converted(name, estimator=estimator, **options)
    elbo = dcpp.ELBO(model, dcpp.categorical, NUM_DATA, generator=torch.Generator().manual_seed(0))
    elbo(*CASES[name][1], target=TARGET).loss.backward()
    assert all(bool(layer.weight_logit.grad.abs().sum() > 0) for layer in gated(model).values())
    assert all(layer.weight.grad is not None for layer in gated(model).values())


@each
@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_the_mean_network_is_the_dense_model(name: str, kind: str) -> None:
    model, inputs = converted(name, kind=kind), CASES[name][1]
    model.eval()
    dense = dcpp.to_dense(model)
    assert type(dense.inner) is type(plain(name).inner)
    assert dense.state_dict().keys() == plain(name).state_dict().keys()
    torch.testing.assert_close(dense(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(clone(*inputs), model(*inputs), rtol=0, atol=0)
        assert all(layer.host in list(clone.modules()) for layer in gated(clone).values())


@each
def test_a_draw_is_one_network_and_to_dense_folds_it(name: str) -> None:
    model, inputs = converted(name).eval(), CASES[name][1]
    with dcpp.sampling(model, torch.Generator().manual_seed(1)):
        drawn = model(*inputs)
    folded = dcpp.to_dense(model, "sample", generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn, folded(*inputs), rtol=1e-12, atol=1e-12)


@each
@pytest.mark.filterwarnings("ignore:prune. .* keeps no weight:UserWarning")  # of so few
@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_state_and_files_go_round(name: str, kind: str, tmp_path: Path) -> None:
    model, inputs = converted(name, kind=kind).eval(), CASES[name][1]
    other = plain(name)
    other.load_state_dict(dcpp.plain_state_dict(model))
    fresh = dcpp.convert(plain(name), kind=kind, **choice(name))
    fresh.load_state_dict(other.state_dict())
    pruned = dcpp.prune(model, keep=0.5, score="magnitude", biases=True)
    for saved in (model, pruned):
        dcpp.save(saved, tmp_path / "model")
        for target in (plain(name), dcpp.convert(plain(name), kind=kind, **choice(name))):
            loaded = dcpp.load(tmp_path / "model", target).eval()
            torch.testing.assert_close(loaded(*inputs), saved(*inputs), rtol=0, atol=0)
            assert isinstance(next(m for m in loaded.modules() if isinstance(m, Host)), nn.Module)


@each
@pytest.mark.filterwarnings("ignore:prune. .* keeps no weight:UserWarning")
def test_pruned_entries_are_off_in_every_pass(name: str) -> None:
    model, inputs = converted(name), CASES[name][1]
    pruned = dcpp.prune(model, keep=0.5)
    for key, layer in gated(pruned).items():
        expected = round(0.5 * layer.weight.numel()) if layer.weight.ndim > 1 else layer.weight.numel()
        kept = layer.kept("weight")
        assert (layer.weight.numel() if kept is None else int(kept.sum())) == expected, key
        value = layer.value()
        assert kept is None or bool((value[~kept] == 0).all())
    pruned.eval()
    torch.testing.assert_close(dcpp.to_dense(pruned)(*inputs), pruned(*inputs), rtol=1e-12, atol=1e-12)


@each
def test_the_posterior_is_read_out_and_trains_by_its_own_step(name: str) -> None:
    model = converted(name, logit_step=3.0)
    learned = dcpp.posterior(model)
    assert list(learned) == list(gated(model))
    groups = dcpp.parameter_groups(model, lr=0.1)
    steps = {group["name"]: group["lr"] for group in groups}
    assert steps["posterior"] == pytest.approx(0.3)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@each
def test_predictions_are_whole_networks(name: str) -> None:
    model, inputs = converted(name).eval(), CASES[name][1]
    found = dcpp.predict(model, *inputs, num_samples=4, likelihood=dcpp.categorical, generator=torch.Generator())
    assert found.mean.shape == (2, 2)
    with pytest.raises(ArgumentError, match=r"averages what the activation gives, and inner.* has none"):
        dcpp.predict(model, *inputs, num_samples=2, likelihood=dcpp.categorical, average="activations")


@each
def test_training_calls_outside_every_context_draw(name: str) -> None:
    model, inputs = converted(name), CASES[name][1]
    outputs = {tuple(model(*inputs).flatten().tolist()) for _ in range(30)}
    assert len(outputs) > 1


def test_a_sequence_has_one_mask() -> None:
    model = dcpp.convert(nn.RNN(1, 1, bias=False, nonlinearity="relu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        for layer in gated(model).values():
            layer.weight_logit.fill_(0.0)
        found = [model(torch.ones(6, 1, 1))[0].flatten().tolist() for _ in range(40)]
    sequences = {tuple(sequence) for sequence in found}
    assert sequences == {(0.0,) * 6, (1.0,) * 6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}


def test_an_owner_that_reads_a_gated_weight_reads_it_under_its_gates() -> None:
    model = dcpp.convert(nn.Embedding(4, 3), include="").eval()
    torch.testing.assert_close(model.weight, 0.5 * model.connections.weight.weight)
    assert isinstance(model, nn.Embedding)
    assert model.embedding_dim == 3
    with pytest.raises(TypeError, match="cannot assign"):
        model.weight = torch.zeros(4, 3)


def test_resetting_starts_parameters_and_gates() -> None:
    model = dcpp.convert(nn.LSTM(2, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) if key.endswith("_logit") else bool((value < 7.0).all())


def test_a_weight_tied_to_a_gated_table_shares_its_gates() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)})
    model["out"].weight = model["embed"].weight
    both: Any = dcpp.convert(model, ["embed", "out"])
    assert both["out"].weight_logit is both["embed"].connections.weight.weight_logit
    with dcpp.sampling(both, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(both["out"](torch.eye(4)).T, both["embed"](torch.arange(7)))
    assert dcpp.posterior(both).num_synapses == 56
    assert torch.isclose(dcpp.kl_divergence(both), dcpp.kl_divergence(dcpp.convert(model, ["out"])))


def test_tables_are_converted_where_they_are_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    assert list(masked_layers(dcpp.convert(model))) == ["1"]
    assert list(masked_layers(dcpp.convert(model, "*"))) == ["1"]
    assert list(masked_layers(dcpp.convert(model, ["0", "1"]))) == ["0.connections.weight", "1"]


def test_parameters_are_chosen_by_name_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.LSTM(3, 2))
    only = dcpp.convert(model, include=(), parameters=["0.weight", "*hh_l0"])
    assert list(masked_layers(only)) == [
        f"{n}.connections.{p}" for n, p in (("0", "weight"), ("1", "weight_hh_l0"), ("1", "bias_hh_l0"))
    ]
    with pytest.raises(ConversionError, match=r"no parameter matches parameters='0\.weights'. There are: 0\.weight, "):
        dcpp.convert(model, include=(), parameters="0.weights")
    with pytest.raises(ArgumentError, match="parameters takes names of parameters, got 3"):
        dcpp.convert(model, include=(), parameters=[3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: nn.LSTM(2, 2), {"mask": "example"}, "mask='example' needs a linear layer or a convolution"),
        (lambda: nn.LSTM(2, 2), {"granularity": "unit"}, "granularity='unit' needs a linear layer or a convolution"),
        (lambda: nn.LSTM(2, 2), {"estimator": "local"}, "estimator='local' needs a linear layer or a convolution"),
        (lambda: nn.LSTM(2, 2), {"activation": nn.ReLU()}, "activation= belongs to linear layers"),
        (lambda: nn.Embedding(2, 2, max_norm=1.0), {}, "max_norm changes its weight"),
        (lambda: nn.Embedding(2, 2, sparse=True), {}, "its gradient is sparse"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_why(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConversionError, match=f"^convert: 0 cannot be converted: {reason}"):
        dcpp.convert(nn.Sequential(make()), ["0"], **options)


@pytest.mark.parametrize("name", ["Embedding", "MultiheadAttention", "experts"])
def test_a_step_compiles_to_one_graph(name: str) -> None:
    model, inputs = converted(name, estimator="straight-through"), CASES[name][1]
    elbo = dcpp.ELBO(model, dcpp.categorical, NUM_DATA, check_finite=False)
    torch.manual_seed(4)
    expected = elbo(*inputs, target=TARGET).loss
    compiled = torch.compile(elbo, backend="aot_eager", fullgraph=True)
    torch.manual_seed(4)
    torch.testing.assert_close(compiled(*inputs, target=TARGET).loss, expected)


@pytest.mark.parametrize(
    "name", ["ConvTranspose2d", "Bilinear", "Embedding", "MultiheadAttention", "experts", "GRUCell"]
)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch has no rules for all of them
def test_transforms_see_through(name: str) -> None:
    model, inputs = converted(name).eval(), CASES[name][1]
    state = {key: value.detach() for key, value in model.named_parameters()}

    def energy(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, inputs).square().sum()

    found = torch.func.grad(energy)(state)
    expected = torch.autograd.grad(model(*inputs).square().sum(), list(model.parameters()), allow_unused=True)
    for key, value in zip(state, expected, strict=True):
        torch.testing.assert_close(found[key], torch.zeros_like(state[key]) if value is None else value)
    stacked = torch.func.stack_module_state([model, model])[0]
    both = torch.vmap(energy)({key: value.detach() for key, value in stacked.items()})
    torch.testing.assert_close(both, energy(state).expand(2))


class Tagger(nn.Module):
    """A recurrent network between layers that compact can make smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6, batch_first=True)
        self.hidden, self.tags = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tags(torch.relu(self.hidden(self.lstm(self.words(x))[0][:, -1])))


def test_compact_folds_the_gates_and_leaves_what_it_cannot_follow() -> None:
    x = torch.arange(8).view(2, 4)
    model = dcpp.convert(Tagger(), ["words", "lstm", "hidden", "tags"], example_input=x)
    pruned = dcpp.prune(model, keep=0.08).eval()
    small = dcpp.compact(pruned, example_input=x)
    assert type(small.lstm) is nn.LSTM
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in Tagger().parameters())
    torch.testing.assert_close(small(x), pruned(x))


@pytest.mark.parametrize("estimator", ["straight-through", "bbvi", "concrete"])
def test_a_recomputed_sequence_has_its_masks_again(estimator: str) -> None:
    found = []
    for again in (True, False):
        torch.manual_seed(3)
        model: Any = dcpp.convert(nn.Sequential(nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)), estimator=estimator)
        model.forward = lambda x, model=model, again=again: model[1](
            (checkpoint(model[0], x, use_reentrant=False) if again else model[0](x))[0].mean(1)
        )
        dcpp.ELBO(model, dcpp.categorical, NUM_DATA)(torch.ones(2, 3, 4), TARGET).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_a_step_under_autocast_has_finite_gradients() -> None:
    model, x = dcpp.convert(Tagger(), ["words", "lstm", "hidden", "tags"]), torch.arange(8).view(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = dcpp.ELBO(model, dcpp.categorical, NUM_DATA)(x, TARGET).loss
    loss.backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in model.parameters())
