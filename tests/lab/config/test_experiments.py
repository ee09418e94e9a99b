"""Experiments by name and from TOML files: what is asked for is what is trained, and mistakes are told."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.config.experiments import Experiment, demo, from_file, of_the_paper
from dropconnectpp.lab.config.method import PAPER_METHODS, PRESETS, Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Normalisation, Protocol, Training, paper
from dropconnectpp.lab.config.selection import Selection
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas.network import Shape

KINDS = ["none", "dropout", "dropconnect", "dropconnect++"]


# ------------------------------------------------------------------------------------------ the paper's


@pytest.mark.parametrize("name", ["table1", "figure1"])
def test_the_papers_experiments_are_its_four_methods_fifty_times(name):
    experiment = of_the_paper(name, "cifar10")
    assert experiment.protocols == tuple(paper("cifar10", kind) for kind in KINDS)
    assert experiment.repeats == 50
    assert experiment.selection == Selection()


def test_table_2_has_dropconnectpp_with_the_best_beta_parameters_too():
    *papers, last = of_the_paper("table2", "cifar10").protocols
    assert tuple(papers) == tuple(paper("cifar10", kind) for kind in KINDS)
    assert last == replace(papers[-1], method=Method(hyper="optimal"))
    assert len(of_the_paper("table2", "cifar10", hyper="learned").protocols) == 4
    assert of_the_paper("table2", "cifar10", methods=["none"]).protocols == (paper("cifar10", "none"),)


def test_a_preset_is_a_method_that_stays_as_it_is():
    for name in ("table1", "table2"):
        (protocol,) = of_the_paper(name, "svhn", methods=["sparse"], hyper=None).protocols
        assert protocol == paper("svhn", "sparse")
        assert (protocol.architecture.hidden, protocol.method.label) == (512, "DropConnect++ (sparse)")
    learned, sparse = of_the_paper("table1", "svhn", methods=["dropconnect++", "sparse"], hyper="optimal").protocols
    assert (learned.method, sparse) == (Method(hyper="optimal"), paper("svhn", "sparse"))


def test_table_3_is_about_dropconnectpp_alone():
    assert of_the_paper("table3", "svhn").protocols == (paper("svhn", "dropconnect++"),)
    assert of_the_paper("table3", "svhn", methods=["none"]).protocols == (paper("svhn", "dropconnect++"),)


def test_every_name_is_an_experiment():
    assert all(of_the_paper(name, "norb").protocols for name in experiments.NAMES)


def test_the_data_set_decides_the_width():
    widths = {data: of_the_paper("table1", data).protocols[0].architecture.hidden for data in ("cifar10", "svhn")}
    assert widths == {"cifar10": 64, "svhn": 512}


def test_methods_are_taken_in_the_order_given():
    experiment = of_the_paper("table1", "cifar10", methods=["dropconnect++", "none"])
    assert [p.method.kind for p in experiment.protocols] == ["dropconnect++", "none"]


def test_a_rate_is_for_the_methods_that_have_one():
    rates = {p.method.kind: p.method.rate for p in of_the_paper("table1", "cifar10", rate=0.3).protocols}
    assert rates == {"none": None, "dropout": 0.3, "dropconnect": 0.3, "dropconnect++": None}


def test_hyper_is_for_dropconnectpp():
    hyper = {p.method.kind: p.method.hyper for p in of_the_paper("table1", "cifar10", hyper="optimal").protocols}
    assert hyper.pop("dropconnect++") == "optimal"
    assert set(hyper.values()) == {"learned"}


def test_the_other_changes_are_for_every_method():
    experiment = of_the_paper(
        "table1", "cifar10", repeats=7, epochs=3, step_size=0.02, root_seed=5, foreign="fashion-mini"
    )
    assert experiment.repeats == 7
    for protocol, kind in zip(experiment.protocols, KINDS, strict=True):
        usual = paper("cifar10", kind)
        assert protocol == replace(
            usual,
            training=replace(usual.training, step_size=0.02, epochs=3),
            evaluation=replace(usual.evaluation, foreign="fashion-mini"),
            root_seed=5,
        )


def test_with_step_size_and_rate_nothing_is_left_to_choose():
    assert all(p.complete for p in of_the_paper("table1", "cifar10", step_size=0.01, rate=0.5).protocols)
    assert not any(p.complete for p in of_the_paper("table1", "cifar10", rate=0.5).protocols)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("table4", {}, "There is no experiment 'table4'. Choose from table1, table2, table3, figure1, or give a TOML"),
        (
            "table1",
            {"methods": ["dropouts"]},
            "method must be one of none, dropout, dropconnect, dropconnect\\+\\+, sparse, per-example, got",
        ),
        ("table1", {"methods": []}, "an experiment needs at least one method"),
        ("table1", {"repeats": 0}, "repeats must be at least 1, got 0"),
        ("table1", {"epochs": 0}, "epochs must be at least 1"),
        ("table1", {"step_size": 0.0}, "step_size must be positive, got 0.0"),
        ("table1", {"rate": 1.0}, r"rate is the share dropped and must lie in \[0, 1\), got 1.0"),
        ("table1", {"hyper": "best"}, "hyper must be one of learned, optimal, got 'best'"),
        ("table1", {"root_seed": -1}, "root_seed must lie in"),
    ],
)
def test_a_mistake_in_a_paper_experiment_is_told(name, options, message):
    with pytest.raises(ProtocolError, match=message):
        of_the_paper(name, "cifar10", **options)


# --------------------------------------------------------------------------------------- your own


FULL = """
repeats = 3

[protocol]
data = "svhn"
root_seed = 4
precision = "float64"

[protocol.architecture]
maps = [2, 3]
filter_size = 3
padding = 1
pool_size = 2
pool_stride = 2
pooled = [true, false]
ceil_mode = false
hidden = 5

[protocol.training]
step_size = 1
epsilon = 1e-8
epsilon_inside = false
batch_size = 16
last_batch = "keep"
epochs = 2
holdout = 10

[protocol.evaluation]
every = 1
curve_samples = 2
samples = [1, 2]
shares = [1, 0.5]
bins = 4
predictive_samples = 3
foreign = "cifar10"

[protocol.normalisation]
scope = "channel"
local_contrast = true
window = 5

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect"
rate = 0.25
evaluation = "gaussian"

[[methods]]
kind = "dropconnect++"
estimator = "concrete"
temperature = 0.5
hyper = "optimal"
alpha = 2
num_samples = 2

[selection]
step_sizes = [0.1, 1]
step_epochs = 1
step_replicas = 2
rates = [0.5]
farther = [0.97]
logit_steps = [1, 30.0]
rate_epochs = 1
rate_replicas = 1
holdout_share = 0.2
together = true
"""


def write(folder, text):
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_full_file_says_everything(tmp_path):
    base = Protocol(
        data="svhn",
        root_seed=4,
        precision="float64",
        architecture=Architecture(
            maps=(2, 3),
            filter_size=3,
            padding=1,
            pool_size=2,
            pool_stride=2,
            pooled=(True, False),
            ceil_mode=False,
            hidden=5,
        ),
        training=Training(
            step_size=1.0,
            epsilon=1e-8,
            epsilon_inside=False,
            batch_size=16,
            last_batch="keep",
            epochs=2,
            holdout=10,
        ),
        evaluation=Evaluation(
            every=1,
            curve_samples=2,
            samples=(1, 2),
            shares=(1.0, 0.5),
            bins=4,
            predictive_samples=3,
            foreign="cifar10",
        ),
        normalisation=Normalisation(scope="channel", local_contrast=True, window=5),
    )
    methods = (
        Method(kind="none"),
        Method(kind="dropconnect", rate=0.25, evaluation="gaussian"),
        Method(estimator="concrete", temperature=0.5, hyper="optimal", alpha=2.0, num_samples=2, logit_step=None),
    )
    selection = Selection(
        step_sizes=(0.1, 1.0),
        step_epochs=1,
        step_replicas=2,
        rates=(0.5,),
        farther=(0.97,),
        logit_steps=(1.0, 30.0),
        rate_epochs=1,
        rate_replicas=1,
        holdout_share=0.2,
        together=True,
    )
    expected = Experiment(
        protocols=tuple(replace(base, method=method) for method in methods), repeats=3, selection=selection
    )
    found = from_file(write(tmp_path, FULL))
    assert found == expected
    assert [p.digest for p in found.protocols] == [p.digest for p in expected.protocols]


def test_the_full_file_names_every_setting():
    def names(settings: dict) -> set[str]:
        return {
            name for key, value in settings.items() for name in (names(value) if isinstance(value, dict) else {key})
        }

    plain = names(Protocol().to_dict()) | set(asdict(Selection()))  # without what only networks of layers have
    assert all(f"{name} =" in FULL for name in plain - set(asdict(Method())))


def test_an_empty_file_is_dropconnectpp_of_the_paper_ten_times(tmp_path):
    assert from_file(write(tmp_path, "")) == Experiment(protocols=(Protocol(),), repeats=10)


def test_one_method_may_stand_in_the_protocol(tmp_path):
    found = from_file(write(tmp_path, '[protocol.method]\nkind = "dropout"\nrate = 0.25\n'))
    assert [p.method for p in found.protocols] == [Method(kind="dropout", rate=0.25)]


def test_a_list_of_step_sizes_stands_for_as_many_protocols_of_each_method(tmp_path):
    text = """
[protocol.training]
step_size = [0.005, 0.01]
holdout = 10

[[methods]]
kind = "dropconnect"
rate = 0.5

[[methods]]
alpha = 2
"""
    found = [
        (p.method.label, p.training.step_size, p.training.holdout) for p in from_file(write(tmp_path, text)).protocols
    ]
    assert found == [
        ("DropConnect", 0.005, 10),
        ("DropConnect", 0.01, 10),
        ("DropConnect++ (alpha=2.0)", 0.005, 10),
        ("DropConnect++ (alpha=2.0)", 0.01, 10),
    ]


def test_a_list_of_values_stands_for_as_many_methods(tmp_path):
    text = """
[[methods]]
kind = "dropconnect"
rate = [0.5, 0.7]

[[methods]]
hyper = "optimal"
alpha = [2, 3]
kl_weight = [1, 0.5]

[selection]
logit_steps = [1, 10]
"""
    assert [p.method for p in from_file(write(tmp_path, text)).protocols] == [
        Method(kind="dropconnect", rate=0.5),
        Method(kind="dropconnect", rate=0.7),
        Method(hyper="optimal", alpha=2.0, kl_weight=1.0, logit_step=None),
        Method(hyper="optimal", alpha=2.0, kl_weight=0.5, logit_step=None),
        Method(hyper="optimal", alpha=3.0, kl_weight=1.0, logit_step=None),
        Method(hyper="optimal", alpha=3.0, kl_weight=0.5, logit_step=None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeats = ", "cannot be read ("),
        ("a = 1\na = 2", "cannot be read ("),
        (
            "seeds = 3",
            "seeds is no setting. Known: repeats, ensembles, protocol, methods, selection, sparsity, population, "
            "small_data.",
        ),
        ("[protocol]\ncolour = 1", "protocol.colour is no setting. Known: architecture, by_epoch, data, "),
        ("[protocol.training]\nlr = 1", "protocol.training.lr is no setting. Known: batch_size, "),
        ("[[methods]]\ndropout = 1", "methods.dropout is no setting. Known: alpha, "),
        ("[selection]\nsteps = 1", "selection.steps is no setting. Known: farther, holdout_share, "),
        ("protocol = 3", "protocol must be a table, under [protocol], got 3."),
        ("selection = 'x'", "selection must be a table, under [selection], got 'x'."),
        ("methods = 3", "methods must be tables, each under [[methods]]."),
        ("methods = ['none']", "methods must be tables, each under [[methods]]."),
        ("[methods]\nkind = 'none'", "methods must be tables, each under [[methods]]."),
        ("methods = []", "an experiment needs at least one method."),
        (
            "[protocol.method]\nkind = 'none'\n[[methods]]\n",
            "protocol.method is one method and [[methods]] are several",
        ),
        ("[protocol]\narchitecture = 3", "protocol.architecture must be a table of settings, got 3."),
        ("[protocol.architecture]\nmaps = 3", "protocol.architecture.maps must be a list, got 3."),
        ("[protocol.architecture]\nmaps = [1.5]", "protocol.architecture.maps must be of type int, got 1.5."),
        ("[protocol.training]\nepochs = '9'", "protocol.training.epochs must be of type int, got '9'."),
        ("[protocol.training]\nepochs = true", "protocol.training.epochs must be of type int, got True."),
        ("[protocol.training]\nstep_size = nan", "step_size must be finite, got nan."),
        ("[protocol]\ndata = 1", "protocol.data must be of type str, got 1."),
        ("[protocol]\nprecision = 'half'", "precision must be one of mixed, float32, float64, got 'half'."),
        ("[[methods]]\nkind = 'drop'", "kind must be one of none, dropout, dropconnect, dropconnect++, got 'drop'."),
        ("[[methods]]\nkind = ['none', 'drop']", "kind must be one of none, "),
        ("[[methods]]\nkind = [['none']]", "kind must be one of none, "),
        ("[[methods]]\nkind = []", "methods.kind is an empty list: give a value, or several."),
        (
            "[protocol.training]\nstep_size = []",
            "protocol.training.step_size is an empty list: give a value, or several.",
        ),
        ("[protocol.training]\nstep_size = [0.1, 'x']", "protocol.training.step_size must be of type float, got 'x'."),
        ("[protocol.training]\nepochs = [1, 2]", "protocol.training.epochs must be of type int, got [1, 2]."),
        ("[[methods]]\nrate = 'x'", "methods.rate must be of type float, got 'x'."),
        ("[selection]\nrates = [0.5, 'x']", "selection.rates must be of type float, got 'x'."),
        ("[selection]\nholdout_share = 0", "holdout_share must lie in (0, 1), got 0.0."),
        ("repeats = 0", "repeats must be at least 1, got 0."),
        ("repeats = -1", "repeats must be at least 1, got -1."),
        ("repeats = 2.0", "repeats must be a whole number, got 2.0."),
        ("repeats = true", "repeats must be a whole number, got True."),
        ("repeats = 'many'", "repeats must be a whole number, got 'many'."),
        ("a = " + "[" * 5000 + "]" * 5000, "cannot be read (its lists and tables are too deep)."),
        ("repeats = " + "9" * 5000, "cannot be read (Exceeds the limit"),
        (
            "[protocol.training]\nstep_size = " + "9" * 400,
            "protocol.training.step_size must be smaller than 1e300, got 9",
        ),
    ],
)
def test_a_mistake_in_a_file_is_told_with_the_files_name(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ProtocolError) as error:
        from_file(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_is_told_with_what_else_there_is(tmp_path):
    path = tmp_path / "none.toml"
    with pytest.raises(ProtocolError) as error:
        from_file(path)
    assert str(error.value) == (
        f"{path}: there is no such file. The paper's experiments are table1, table2, table3, figure1; another is "
        "sparsity."
    )


def test_a_value_that_fills_pages_is_shortened_in_the_message(tmp_path):
    path = write(tmp_path, f"[protocol]\ndata = ['{'x' * 10_000}']")
    with pytest.raises(ProtocolError) as error:
        from_file(path)
    assert str(error.value).startswith(f"{path}: protocol.data must be of type str, got ['xxx")
    assert str(error.value).endswith("xxx'].")
    assert " [...] " in str(error.value)
    assert len(str(error.value)) < 1200


def test_what_is_no_text_file_cannot_be_read(tmp_path):
    with pytest.raises(ProtocolError, match="cannot be read"):
        from_file(tmp_path)
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProtocolError, match="cannot be read"):
        from_file(tmp_path / "mine.toml")


# ---------------------------------------------------------------------------------------------- demo


def test_the_demo_is_complete_and_small():
    experiment = demo()
    assert [p.method.kind for p in experiment.protocols] == [*KINDS, "dropconnect++"]
    assert experiment.protocols[3].method == Method(kind="dropconnect++"), "the paper's"
    assert experiment.protocols[4].method.estimator == "straight-through"
    assert all(p.complete for p in experiment.protocols)
    assert {p.data for p in experiment.protocols} == {"fashion-mini"}
    assert (experiment.repeats, experiment.protocols[0].training.epochs) == (4, 5)
    assert all(p.stackable(experiment.protocols[0]) for p in experiment.protocols)
    shape = Shape(experiment.protocols[0].architecture, 1, 32, 10)
    assert shape.synapses < 0.2 * Shape(paper("fashion-mini", "none").architecture, 1, 32, 10).synapses


def test_the_demo_takes_other_numbers():
    experiment = demo(repeats=2, epochs=1)
    assert experiment.repeats == 2
    assert {p.training.epochs for p in experiment.protocols} == {1}


def test_the_papers_methods_are_those_of_table_1():
    assert list(PAPER_METHODS) == KINDS


def test_machines_can_take_different_replicas():
    whole = of_the_paper("table1", "cifar10", repeats=5)
    assert list(whole.replicas) == [0, 1, 2, 3, 4]
    assert list(replace(whole, first_replica=5, repeats=2).replicas) == [5, 6]


def test_logit_steps_to_choose_from_leave_it_open_where_none_is_given(tmp_path):
    text = """
[selection]
logit_steps = [1, 10]
[[methods]]
kind = "none"
[[methods]]
kind = "dropconnect++"
[[methods]]
kind = "dropconnect++"
estimator = "straight-through"
logit_step = 3
"""
    methods = [p.method for p in from_file(write(tmp_path, text)).protocols]
    assert [method.logit_step for method in methods] == [1.0, None, 3.0]
    assert [method.complete for method in methods] == [True, False, True]
    only = from_file(write(tmp_path, "[selection]\nlogit_steps = [1, 10]\n")).protocols
    assert [p.method.logit_step for p in only] == [None]


EXPERIMENTS = Path(__file__).parents[3] / "experiments"
FILES = sorted(EXPERIMENTS.rglob("*.toml"))


def test_experiments_come_along():
    assert len(FILES) >= 32


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_experiments_that_come_along_can_be_read(path):
    experiment = from_file(path)
    assert len({p.digest for p in experiment.protocols}) == len(experiment.protocols)
    if experiment.sparsity is not None:
        assert all(p.architecture.layered for p in experiment.protocols)
        return
    searches = all(p.training.holdout for p in experiment.protocols)
    assert experiment.repeats in ((3, 5, 6, 12) if searches else (20, 50))
    without = {"svhn_rates": {"dropout"}, "svhn_best_rate": set(), "chosen_together": set()}
    without |= {"chosen_together_fashion": set(), "rising_rate_search": set()}
    if experiment.ensembles or path.stem in ("pooled", "adam"):
        without[path.stem] = {"none", "dropout", "dropconnect++"}
    if experiment.population is not None:
        layered = any(p.architecture.layered for p in experiment.protocols)
        without[path.stem] = {"none"} if layered else {"dropout", "dropconnect++"}
    if experiment.ensembles:
        without[path.stem] = {"none", "dropout", "dropconnect++"}
    kinds = {p.method.kind for p in experiment.protocols} - {"dropconnect"}
    assert kinds == without.get(path.stem, {"dropconnect++"})
    if path.stem == "presets":
        assert set(PRESETS.values()) == {p.method for p in experiment.protocols}
    assert f"`{path.name}`" in (EXPERIMENTS / "README.md").read_text()
