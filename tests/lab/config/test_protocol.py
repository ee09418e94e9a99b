"""Protocols: what identifies an experiment, what is refused, and the paper's own settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.method import PAPER_METHODS, Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Normalisation, Protocol, Training, paper
from dropconnectpp.lab.config.selection import STEP_SIZES
from dropconnectpp.lab.config.settings import ProtocolError, from_dict
from dropconnectpp.lab.replicas.network import Shape

GOLDEN = "069af34f341694bb"
"""Of the paper's DropConnect++ on CIFAR-10: stored results are known by it."""

TOML = """
data = "svhn"
root_seed = 3
precision = "float32"

[method]
kind = "dropconnect++"
estimator = "concrete"
alpha = 2
posterior_alpha = 1.5

[architecture]
maps = [8, 16]
pooled = [true, false]
hidden = 32

[training]
step_size = 0.01
epsilon_inside = false

[evaluation]
samples = [1, 10]
shares = [1, 0.5]
foreign = "cifar10"

[normalisation]
scope = "channel"
"""


# ------------------------------------------------------------------------------------------- the identity


def test_the_digest_of_the_papers_experiment_never_changes():
    assert paper("cifar10", "dropconnect++").digest == GOLDEN


def another(value: Any, hint: Any) -> Any:
    """A valid value that is not this one."""
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != value)
    if isinstance(value, bool):
        return not value
    if value == ():
        return ("contrast",)
    if isinstance(value, tuple):
        return value[:-1] if value and not isinstance(value[0], bool) else (*value[:-1], not value[-1])
    if isinstance(value, int):
        return value + 2
    if isinstance(value, float):
        return value / 2
    if hint == int | None:
        return 3
    return "other" if hint in (str, str | None) else 0.25


def leaves(settings: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        found += leaves(value, (*path, item.name)) if is_dataclass(value) else [(*path, item.name)]
    return found


def changed(settings: Any, path: tuple[str, ...]) -> Any:
    name, *rest = path
    value = getattr(settings, name)
    if rest:
        return replace(settings, **{name: changed(value, tuple(rest))})
    changes = {name: another(value, get_type_hints(type(settings))[name])}
    if name == "maps":
        changes["pooled"] = settings.pooled[:-1]
    if name == "corruptions":
        changes["judged"] = True
    if name == "examples":
        changes["examples"] = 200
    # What does nothing is refused, so these come with what gives them a meaning.
    changes |= {
        "rate": {"kind": "dropout"},
        "evaluation": {"kind": "dropconnect"},
        "mask": {"kind": "dropconnect"},
        "scaling": {"kind": "dropconnect"},
        "temperature": {"estimator": "concrete"},
    }.get(name if isinstance(settings, Method) else "", {})
    return replace(settings, **changes)


LAYERED = Protocol(
    method=Method(kind="none"),
    architecture=Architecture(name="lenet-300-100"),
    training=Training(step_size=0.001, optimiser="sgd", holdout=100),
    normalisation=Normalisation(scope="given", mean=0.5),
)
OF_LAYERS = {
    "name",
    "layers",
    "optimiser",
    "schedule",
    "momentum",
    "holdout_kind",
    "mean",
    "standard_deviation",
    "crop",
}
"""Settings that only a network given as layers has; `test_pruning` has `name`, `layers` and `pruning`."""


APART = ("name", "layers", "pruning", "by_epoch", "population")
"""Tables that are not there at first: `test_by_epoch` and `test_pruning` have them."""
PATHS = [path for path in leaves(Protocol()) if path[-1] not in APART]


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_setting_is_part_of_the_digest(path):
    usual = LAYERED if path[-1] in OF_LAYERS else Protocol()
    other = changed(usual, path)
    assert other != usual
    assert other.digest != usual.digest
    assert re.fullmatch("[0-9a-f]{16}", other.digest)
    assert from_dict(Protocol, json.loads(json.dumps(other.to_dict()))) == other


def test_whole_numbers_and_fractions_that_are_equal_have_one_digest():
    one = Protocol(method=Method(alpha=2), training=Training(step_size=1), evaluation=Evaluation(shares=(1,)))
    other = Protocol(method=Method(alpha=2.0), training=Training(step_size=1.0), evaluation=Evaluation(shares=(1.0,)))
    assert one == other
    assert one.digest == other.digest


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "none", "rate": 0.5},
        {"kind": "none", "hyper": "optimal"},
        {"kind": "dropout", "evaluation": "gaussian"},
        {"kind": "dropout", "num_samples": 4},
        {"evaluation": "gaussian"},
        {"rate": 0.5},
        {"estimator": "straight-through", "baseline": "mean-network"},
        {"estimator": "local", "decay": 0.5},
        {"baseline": "mean-network", "decay": 0.5},
        {"temperature": 0.1},
        {"hyper": "optimal", "posterior_alpha": 2.0},
        {"kl_warmup": 5, "kl_weight": 0.0},
        {"kind": "dropconnect", "kl_warmup": 5},
        {"kind": "dropconnect", "freeze_after": 5},
        {"kind": "dropconnect", "learn_after": 5},
        {"kind": "dropout", "slab": 0.1},
        {"kind": "none", "slab": 0.1},
    ],
)
def test_a_setting_that_does_nothing_is_refused(settings):
    with pytest.raises(ProtocolError, match="does nothing for"):
        Method(**settings)


@pytest.mark.parametrize("data", ["cifar10", "norb"])
@pytest.mark.parametrize("method", PAPER_METHODS)
def test_settings_survive_json(data, method):
    protocol = paper(data, method)
    back = from_dict(Protocol, json.loads(json.dumps(protocol.to_dict())))
    assert back == protocol
    assert back.digest == protocol.digest


def test_settings_are_read_from_toml(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(TOML)
    with path.open("rb") as file:
        found = from_dict(Protocol, tomllib.load(file))
    assert found == Protocol(
        data="svhn",
        root_seed=3,
        precision="float32",
        method=Method(estimator="concrete", alpha=2.0, posterior_alpha=1.5),
        architecture=Architecture(maps=(8, 16), pooled=(True, False), hidden=32),
        training=Training(step_size=0.01, epsilon_inside=False),
        evaluation=Evaluation(samples=(1, 10), shares=(1.0, 0.5), foreign="cifar10"),
        normalisation=Normalisation(scope="channel"),
    )
    assert type(found.method.alpha) is float
    hash(found)


# -------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalisation(scope="pixel"), "scope must be one of image, channel, data-set, given, got 'pixel'."),
        (lambda: Normalisation(window=4), "window must be odd and at least 3, got 4."),
        (lambda: Normalisation(window=1), "window must be odd and at least 3, got 1."),
        (lambda: Architecture(maps=(1, 2)), "pooled must say yes or no for each of 2 layers."),
        (lambda: Architecture(maps=(), pooled=()), "pooled must say yes or no for each of 0 layers."),
        (lambda: Architecture(hidden=0), "sizes must be at least 1, got Architecture("),
        (lambda: Architecture(padding=-1), "sizes must be at least 1, got Architecture("),
        (
            lambda: Architecture(filter_size=9, padding=0).sides(8),
            "the images are too small for this network: a map would have side 0.",
        ),
        (
            lambda: Architecture(filter_size=9, padding=0, pool_size=2, pool_stride=3).sides(8),
            "the images are too small for this network: a map would have side 0.",
        ),
        (lambda: Method(kind="dropblock"), "kind must be one of none, dropout, dropconnect, dropconnect++, got 'drop"),
        (lambda: Method(estimator="reinforce"), "estimator must be one of bbvi, eq16, straight-through, local, concre"),
        (lambda: Method(rate=1.0), "rate is the share dropped and must lie in [0, 1), got 1.0."),
        (lambda: Method(rate=-0.1), "rate is the share dropped and must lie in [0, 1), got -0.1."),
        (lambda: Method(rate=float("nan")), "rate must be finite, got nan."),
        (lambda: Method(keep_probability=1.0), "keep_probability must lie in (0, 1), got 1.0."),
        (lambda: Method(num_samples=0), "num_samples must be at least 1, got 0."),
        (lambda: Method(alpha=0.0), "alpha must be positive, got 0.0."),
        (lambda: Method(beta=float("inf")), "beta must be finite, got inf."),
        (lambda: Method(posterior_alpha=-1.0), "posterior_alpha must be positive, got -1.0."),
        (lambda: Method(posterior_beta=0.0), "posterior_beta must be positive, got 0.0."),
        (lambda: Method(temperature=0.0), "temperature must be positive, got 0.0."),
        (lambda: Method(logit_step=0.0), "logit_step must be positive, got 0.0."),
        (lambda: Method(decay=1.0), "decay must lie in [0, 1), got 1.0."),
        (lambda: Method(kl_weight=-1.0), "kl_weight must not be negative, got -1.0."),
        (lambda: Method(kl_warmup=-1), "kl_warmup must not be negative, got -1."),
        (lambda: Method(freeze_after=0), "freeze_after must be at least 1, got 0."),
        (lambda: Method(learn_after=-1), "learn_after must not be negative, got -1."),
        (lambda: Method(learn_after=3, freeze_after=3), "freeze_after must be at least 4, got 3."),
        (lambda: Method(slab=0.0), "slab must be positive, got 0.0."),
        (lambda: Method(slab=float("inf")), "slab must be finite, got inf."),
        (lambda: Method(baseline="leave-one-out"), "baseline 'leave-one-out' needs num_samples of at least 2."),
        (lambda: Method(baseline="same-sample"), "estimator 'bbvi' has no baseline 'same-sample'."),
        (lambda: Method(estimator="eq16", baseline="mean-network"), "estimator 'eq16' has no baseline 'mean-network'."),
        (lambda: Method(estimator="eq16", hyper="optimal"), "estimator 'eq16' needs hyper 'learned'."),
        (lambda: Training(step_size=0.0), "step_size must be positive, got 0.0."),
        (lambda: Training(step_size=float("inf")), "step_size must be finite, got inf."),
        (lambda: Training(epsilon=0.0), "epsilon must be positive, got 0.0."),
        (lambda: Training(batch_size=0), "batch_size and epochs must be at least 1."),
        (lambda: Training(epochs=0), "batch_size and epochs must be at least 1."),
        (lambda: Training(last_batch="pad"), "last_batch must be one of drop, keep, got 'pad'."),
        (lambda: Training(holdout=-1), "holdout must not be negative, got -1."),
        (lambda: Evaluation(every=0), "every and bins must be at least 1."),
        (lambda: Evaluation(bins=0), "every and bins must be at least 1."),
        (lambda: Evaluation(samples=(30, 1)), "samples must rise from 0."),
        (lambda: Evaluation(curve_samples=-1), "samples must rise from 0."),
        (lambda: Evaluation(shares=(0.0,)), "shares must lie in (0, 1], got (0.0,)."),
        (lambda: Protocol(root_seed=-1), "root_seed must lie in [0, 2^63), got -1."),
        (lambda: Protocol(root_seed=2**63), "root_seed must lie in [0, 2^63), got 9223372036854775808."),
        (lambda: Protocol(precision="half"), "precision must be one of mixed, float32, float64, got 'half'."),
        (
            lambda: from_dict(Protocol, {"seed": 1}),
            "seed is no setting. Known: architecture, by_epoch, data, evaluation, method, n",
        ),
        (lambda: from_dict(Protocol, {"method": {"rat": 1}}), "method.rat is no setting. Known: alpha, baseline, beta"),
        (lambda: from_dict(Protocol, {"method": "none"}), "method must be a table of settings, got 'none'."),
        (lambda: from_dict(Protocol, {"architecture": {"maps": 3}}), "architecture.maps must be a list, got 3."),
        (
            lambda: from_dict(Protocol, {"architecture": {"maps": ["3"]}}),
            "architecture.maps must be of type int, got '3'.",
        ),
        (lambda: from_dict(Protocol, {"training": {"epochs": 1.5}}), "training.epochs must be of type int, got 1.5."),
        (lambda: from_dict(Protocol, {"training": {"epochs": True}}), "training.epochs must be of type int, got True."),
        (lambda: from_dict(Protocol, {"method": {"rate": "0.5"}}), "method.rate must be of type float, got '0.5'."),
        (lambda: from_dict(Protocol, {"method": {"rate": True}}), "method.rate must be of type float, got True."),
        (
            lambda: from_dict(Protocol, {"method": {"kind": 3}}),
            "kind must be one of none, dropout, dropconnect, dropco",
        ),
        (
            lambda: paper("cifar10", "dropblock"),
            "method must be one of none, dropout, dropconnect, dropconnect++, sparse, per-example",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule_and_value(make, message):
    with pytest.raises(ProtocolError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, DropConnectError)


# ------------------------------------------------------------------------------------------------ stacking


def test_only_method_and_step_size_may_differ_in_a_stack():
    for path in PATHS:
        usual = LAYERED if path[-1] in OF_LAYERS else Protocol(training=Training(step_size=0.01))
        assert usual.stackable(usual)
        free = path[0] == "method" or path == ("training", "step_size")
        other = changed(usual, path)
        assert usual.stackable(other) == free, path
        assert other.stackable(usual) == free, path


def test_a_protocol_is_complete_once_step_size_and_rate_are_chosen():
    chosen = Training(step_size=0.01)
    assert not paper("cifar10", "none").complete
    assert replace(paper("cifar10", "none"), training=chosen).complete
    assert replace(paper("cifar10", "dropconnect++"), training=chosen).complete
    for kind in ("dropout", "dropconnect"):
        assert not replace(paper("cifar10", kind), training=chosen).complete
        assert replace(paper("cifar10", Method(kind=kind, rate=0.5)), training=chosen).complete
        assert not paper("cifar10", Method(kind=kind, rate=0.5)).complete


def test_tables_call_methods_by_name_and_what_was_changed():
    assert [method.label for method in PAPER_METHODS.values()] == [
        "No regularization",
        "Dropout",
        "DropConnect",
        "DropConnect++",
    ]
    assert Method(estimator="local", logit_step=10.0).label == "DropConnect++ (estimator=local, logit_step=10.0)"
    late = Method(kl_warmup=5, freeze_after=8, slab=0.03)
    assert late.label == "DropConnect++ (kl_warmup=5, freeze_after=8, slab=0.03)"
    assert Method(kind="dropconnect", rate=0.5, slab=0.03).label == "DropConnect (slab=0.03)"
    assert Method(kind="dropconnect", rate=0.5, evaluation="gaussian").label == "DropConnect"
    assert Method(kind="dropconnect", rate=0.5, num_samples=5).label == "DropConnect (num_samples=5)"


def test_settings_that_came_late_are_left_out_where_they_are_not_set():
    names = ("reward", "kl_warmup", "freeze_after", "slab", "learn_after")
    assert not set(names) & set(Protocol().to_dict()["method"])
    late = Protocol(method=Method(kl_warmup=5, freeze_after=8, slab=0.03, learn_after=6))
    assert {name: late.to_dict()["method"].get(name) for name in names[1:]} == {
        "kl_warmup": 5,
        "freeze_after": 8,
        "slab": 0.03,
        "learn_after": 6,
    }


def test_the_kls_weight_rises_and_the_posteriors_step_ends():
    usual = Method(kl_weight=2.0, logit_step=3.0)
    assert [usual.kl_weight_in(epoch) for epoch in (0, 1, 100)] == [2.0] * 3
    assert [usual.gate_step_in(epoch) for epoch in (0, 1, 100)] == [3.0] * 3
    late = replace(usual, kl_warmup=4, freeze_after=2)
    assert [late.kl_weight_in(epoch) for epoch in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert [late.gate_step_in(epoch) for epoch in range(4)] == [3.0, 3.0, 0.0, 0.0]
    later = replace(usual, learn_after=2, freeze_after=3)
    assert [later.gate_step_in(epoch) for epoch in range(4)] == [0.0, 0.0, 3.0, 0.0]


# ---------------------------------------------------------------------------------------------- the paper


@pytest.mark.parametrize(
    ("data", "hidden"),
    [("cifar10", 64), ("fashion", 64), ("mnist", 64), ("cifar100", 512), ("svhn", 512), ("norb", 512)],
)
def test_the_papers_dense_layer(data, hidden):
    for method in PAPER_METHODS:
        protocol = paper(data, method)
        assert protocol.architecture == Architecture(hidden=hidden)
        assert protocol.method == Method(kind=method)
        assert protocol.data == data


def test_the_papers_settings_are_the_defaults():
    protocol = paper("cifar10", "dropconnect++")
    assert protocol == Protocol()
    assert protocol.architecture.maps == (32, 32, 64)
    assert (protocol.architecture.filter_size, protocol.architecture.pool_size) == (5, 3)
    assert (protocol.training.batch_size, protocol.training.epochs) == (128, 100)
    assert (protocol.method.alpha, protocol.method.beta, protocol.method.num_samples) == (1.0, 1.0, 1)
    assert STEP_SIZES == (0.005, 0.01, 0.05)


def test_the_network_for_cifar10_has_almost_300k_synapses():
    shape = Shape(Architecture(), channels=3, side=32, classes=10)
    assert shape.dense == (64, 4096)
    assert shape.synapses == 4096 * 64 + 64 == 262_208
    assert Shape(Architecture(pooled=(True, True, True)), 3, 32, 10).synapses == 65_600
    assert shape.parameters() == {
        "conv0.weight": (32, 3, 5, 5),
        "conv0.bias": (32,),
        "conv1.weight": (32, 32, 5, 5),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 5, 5),
        "conv2.bias": (64,),
        "dense.weight": (64, 4096),
        "dense.bias": (64,),
        "output.weight": (10, 64),
        "output.bias": (10,),
    }


def test_protocols_are_read_without_torch():
    code = """import sys
from dropconnectpp.lab.config import protocol
protocol.paper('svhn', 'none').digest
print('torch' in sys.modules)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
