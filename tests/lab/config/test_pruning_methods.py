"""Networks as lists of layers, and the methods that make them small: what files say, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dropconnectpp.lab.config.experiments import from_file
from dropconnectpp.lab.config.layers import NETWORKS, Layer, LayeredShape
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Normalisation, Protocol, Training
from dropconnectpp.lab.config.pruning import L0, FixedSupport, GradualMagnitude, OneShot, Plan, SparseVD
from dropconnectpp.lab.config.settings import ProtocolError, from_dict, late_settings

FILE = """
repeats = 2

[protocol]
data = "mnist"

[protocol.normalisation]
scope = "given"
mean = 0.1307
standard_deviation = 0.3081
crop = 2

[protocol.training]
optimiser = "sgd"
momentum = 0.5
schedule = "second-half"
step_size = 0.001
holdout = 10000
holdout_kind = "last"

[protocol.architecture]
layers = [
  {kind = "convolution", units = 4, size = 3, padding = 1, stride = 2},
  {kind = "activation", function = "tanh"},
  {kind = "pool", size = 3, stride = 2, ceil_mode = true},
  {kind = "dense", units = 8, gated = true},
  {kind = "activation"},
  {kind = "dense"},
]

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect"
rate = [0.2, 0.5]

[[methods]]
kind = "sparsity-plan"
keep = [0.05, 0.02]
noise = 0.1

[[methods]]
kind = "gradual-magnitude"
keep = 0.02
noise = "dropout"
rate = 0.3

[[methods]]
kind = "fixed-support"
shares = [0.25]
"""
LAYERED = Architecture(name="lenet-300-100")
ADAM = Training(optimiser="adam", step_size=0.001)


def test_a_file_says_layers_and_methods(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    found = from_file(tmp_path / "mine.toml").protocols
    assert [p.method for p in found[:3]] == [
        Method(kind="none"),
        *(Method(kind="dropconnect", rate=r) for r in (0.2, 0.5)),
    ]
    assert [p.pruning for p in found] == [
        *[None] * 3,
        *(Plan(keep=keep, noise=0.1) for keep in (0.05, 0.02)),
        GradualMagnitude(keep=0.02, noise="dropout", rate=0.3),
        FixedSupport(shares=(0.25,)),
    ]
    assert all(p.stackable(found[0]) and p.complete for p in found)
    assert len({p.digest for p in found}) == len(found)
    first = found[0]
    assert first.architecture.layers[0] == Layer(kind="convolution", units=4, size=3, padding=1, stride=2)
    assert first.normalisation == Normalisation(scope="given", mean=0.1307, standard_deviation=0.3081, crop=2)
    for protocol in found:  # as a store gives it back
        assert from_dict(Protocol, protocol.to_dict()).digest == protocol.digest
        assert from_dict(Protocol, protocol.to_dict()) == protocol


def test_settings_of_layered_networks_leave_other_digests_alone():
    plain = Protocol().to_dict()
    assert "pruning" not in plain
    assert not {"name", "layers"} & set(plain["architecture"])
    assert not {"optimiser", "schedule", "momentum", "holdout_kind"} & set(plain["training"])
    assert not {"mean", "standard_deviation", "crop"} & set(plain["normalisation"])


def test_what_makes_a_network_small_is_part_of_the_digest():
    base = Protocol(architecture=LAYERED, training=ADAM, method=Method(kind="none"))
    dense = (Layer(kind="dense"),)
    others = [
        base,
        *(
            replace(base, pruning=kind)
            for kind in (Plan(keep=0.1), Plan(price=0.1), GradualMagnitude(), OneShot(), L0())
        ),
        *(replace(base, pruning=SparseVD(kl_weight=weight)) for weight in (1.0, 2.0)),
        *(replace(base, architecture=one) for one in (Architecture(name="lenet-5-caffe"), Architecture(layers=dense))),
    ]
    assert len({one.digest for one in others}) == len(others)


def test_sizes_of_the_fields_networks():
    mlp, lenet = (LayeredShape(NETWORKS[name], 1, 28, 10) for name in ("lenet-300-100", "lenet-5-caffe"))
    assert (mlp.weights, mlp.biases) == (266_200, 410)
    assert (lenet.weights, lenet.biases) == (430_500, 580)
    strided = (
        Layer(kind="convolution", units=4, size=3, padding=1, stride=2),
        Layer(kind="pool", size=3, stride=2, ceil_mode=True),
        Layer(kind="dense"),
    )
    (_, dense) = LayeredShape(strided, 3, 9, 5).weight_layers()  # 9 -> 5 -> 2
    assert (dense.inputs, dense.units, dense.side_in) == (16, 5, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(kind="dense", size=3), "size = 3 does nothing for a layer of kind 'dense'"),
        (lambda: Layer(kind="convolution", units=3), "a convolution needs a size"),
        (lambda: LayeredShape((Layer(kind="dense", units=3),), 1, 8, 10), "the last layer must be dense with 10 units"),
        (lambda: Architecture(name="layers"), "give name or layers"),
        (lambda: Architecture(name="lenet-300-100", hidden=3), "hidden belong to the paper's network"),
        (lambda: Plan(), "give one of keep, price and kl_weight, got none"),
        (lambda: Plan(keep=0.1, price=1.0), "got keep and price"),
        (lambda: Plan(keep=0.1, warmup=0.9), "fix_at must be above warmup"),
        (lambda: Plan(price=1.0, beta=0.5), "beta is above alpha"),
        (lambda: Plan(price=1.0, learning=False), "learning = false needs keep"),
        (lambda: Plan(keep=0.1, learning=False, beta=9.0), "beta does nothing with learning = false"),
        (lambda: Plan(keep=0.1, granularity="unit", support="random"), "controls are for granularity 'synapse'"),
        (lambda: GradualMagnitude(keep=0.0), "keep is a share kept"),
        (lambda: GradualMagnitude(rate=0.5), "noise 'none' and rate 0.5 do not fit"),
        (lambda: GradualMagnitude(begin=0.7), "0 <= begin < end <= 1"),
        (lambda: OneShot(ranking="layer", floor=0.1), "floor does nothing"),
        (lambda: FixedSupport(), "shares must give a share"),
        (lambda: SparseVD(keep=0.1, threshold=1.0), "threshold does nothing where keep is given"),
        (lambda: L0(temperature=0.0), "temperature must be positive"),
        (lambda: Protocol(pruning=OneShot()), "are for networks given by name or as layers"),
        (
            lambda: Protocol(architecture=LAYERED, method=Method(hyper="optimal")),
            "'dropconnect\\+\\+' is for the paper's network",
        ),
        (
            lambda: Protocol(architecture=LAYERED, method=Method(kind="dropout", rate=0.1), pruning=OneShot()),
            "one-shot has its own noise",
        ),
        (lambda: from_dict(Protocol, {"pruning": {"kind": "magic"}}), "pruning.kind must be one of sparsity-plan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ProtocolError, match=message):
        make()


def test_labels_and_schedules():
    protocol = Protocol(architecture=LAYERED, training=ADAM, pruning=Plan(keep=0.02))
    assert (protocol.method, protocol.label) == (Method(kind="none"), "Sparsity plan (keep=0.02)")
    assert replace(protocol, pruning=SparseVD()).label == "Sparse VD"
    assert Plan(kl_weight=0.3).schedule(100).price == pytest.approx(0.3 * 4.59512)
    assert Plan(price=2.0).kl_weight_of(2.0) == pytest.approx(2.0 / 4.59512)
    assert late_settings(Plan(keep=0.02))["kind"] == "sparsity-plan"
