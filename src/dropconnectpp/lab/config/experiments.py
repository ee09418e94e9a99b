"""The paper's experiments by name, and your own from a TOML file: what to train, and how often."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.method import METHODS, PAPER_METHODS, Hyper, Method, MethodName
from dropconnectpp.lab.config.population import MEMBERS as POPULATION_MEMBERS
from dropconnectpp.lab.config.population import USUAL as POPULATION_METHODS
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training, paper
from dropconnectpp.lab.config.pruning import PRUNING, Pruning
from dropconnectpp.lab.config.selection import Selection, SparsitySearch
from dropconnectpp.lab.config.settings import ProtocolError, from_dict
from dropconnectpp.lab.config.small_data import SmallData
from dropconnectpp.lab.config.sparsity import (
    CONTROLS,
    KEEP,
    STRUCTURED_KEEP,
    check_budgets,
    frontier_protocols,
    protocol_for,
    told,
)
from dropconnectpp.lab.config.sparsity import NAMES as SPARSE_METHODS
from dropconnectpp.lab.machine.terminal_text import printable

ExperimentName = Literal["table1", "table2", "table3", "figure1"]
NAMES: tuple[str, ...] = get_args(ExperimentName)
MOST_REPEATS = 10_000
"""Networks of each method: listing many more takes minutes and gigabytes before the first is trained."""
LAST_REPLICA = 2**63 - 1
BRIEF = 500
"""Letters of an error that are shown from its beginning, and from its end."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Protocols to complete and train, how many replicas of each, and how to choose what they leave open."""

    protocols: tuple[Protocol, ...]
    repeats: int = 50
    first_replica: int = 0
    """Machines without a shared folder can each train some of the replicas."""
    selection: Selection = field(default_factory=Selection)
    sparsity: SparsitySearch | None = None
    """Where it is given, the protocols are settings of methods that keep few connections, of which it chooses."""
    ensembles: int = 0
    """Members of the ensembles that are judged beside single networks; 0: none."""
    population: Population | None = None
    """Where it is given, networks that take over from each other find step size and rate or KL weight by epoch; fresh
    networks are then trained by what was found."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ProtocolError(f"repeats must be at least 1, got {self.repeats}.")
        if self.repeats > MOST_REPEATS:
            raise ProtocolError(
                f"repeats must be at most {MOST_REPEATS:,}, got {self.repeats}. Train more in several runs, each with "
                "its own --first-replica."
            )
        if not 0 <= self.first_replica <= LAST_REPLICA - self.repeats:
            raise ProtocolError(
                f"first_replica must be at least 0 and leave room for repeats below 2^63, got {self.first_replica}."
            )
        if not self.protocols:
            raise ProtocolError("an experiment needs at least one method.")
        if self.sparsity is not None:
            check_budgets(self.protocols, self.sparsity)
        for protocol in self.protocols if self.population is not None else ():
            open_there = protocol.training.step_size is None and protocol.method.rate is None
            if not open_there or protocol.by_epoch is not None or protocol.training.holdout:
                raise ProtocolError(
                    f"{protocol.label}: a population finds step size and rate on images that it holds out itself. "
                    "Leave step_size, rate, by_epoch and holdout out."
                )
        if self.ensembles:
            for protocol in self.protocols:
                Ensemble(of=protocol, members=self.ensembles)  # raises where they cannot be judged
            if self.repeats < self.ensembles:
                raise ProtocolError(f"ensembles of {self.ensembles} need as many repeats, got {self.repeats}.")

    @property
    def judged(self) -> bool:
        """Whether the probabilities of its networks are judged."""
        return any(protocol.evaluation.judged for protocol in self.protocols)

    @property
    def fewer(self) -> bool:
        """Whether some of its networks have fewer training examples than there are."""
        return any(protocol.training.examples for protocol in self.protocols)

    @property
    def replicas(self) -> range:
        """The replicas of each method that are to be trained."""
        return range(self.first_replica, self.first_replica + self.repeats)


def of_the_paper(
    name: ExperimentName | str,
    data: str,
    *,
    methods: Sequence[MethodName | str] = tuple(PAPER_METHODS),
    repeats: int = 50,
    epochs: int | None = None,
    step_size: float | None = None,
    rate: float | None = None,
    hyper: Hyper | str | None = None,
    root_seed: int = 0,
    foreign: str | None = None,
    together: bool = False,
) -> Experiment:
    """A table or the figure on one data set. All come from the same trainings, of which each shows a part.

    Table 2 also has DropConnect++ with alpha~ and beta~ at their optimum, unless `hyper` says which: times are best
    compared within one run. With `together` step sizes and rates are chosen with each other.
    """
    if name not in NAMES:
        raise ProtocolError(f"There is no experiment {name!r}. Choose from {', '.join(NAMES)}, or give a TOML file.")
    if name == "table3":
        methods = ["dropconnect++"]
    protocols = []
    for method in methods:
        protocol = paper(data, method)
        epochs = protocol.training.epochs if epochs is None else epochs
        chosen = protocol.method
        if chosen.has_rate and rate is not None:
            chosen = replace(chosen, rate=rate)
        if method == "dropconnect++" and hyper is not None:
            chosen = replace(chosen, hyper=hyper)  # type: ignore[arg-type]
        training = replace(protocol.training, step_size=step_size, epochs=epochs)
        evaluation = replace(protocol.evaluation, foreign=foreign)
        protocols.append(
            replace(protocol, method=chosen, training=training, evaluation=evaluation, root_seed=root_seed)
        )
    if name == "table2" and hyper is None:
        for protocol in [one for one in protocols if one.method == PAPER_METHODS["dropconnect++"]]:
            protocols.append(replace(protocol, method=replace(protocol.method, hyper="optimal")))
    return Experiment(protocols=tuple(protocols), repeats=repeats, selection=Selection(together=together))


REPLAYED = Evaluation(every=20, curve_samples=0, samples=(30,), shares=(1.0, 0.25, 0.1, 0.05), predictive_samples=0)
"""What is measured of networks that follow a schedule that was found."""


def population(
    data: str,
    *,
    methods: Sequence[MethodName | str] = POPULATION_METHODS,
    members: int = POPULATION_MEMBERS,
    every: int = 5,
    keep: float | None = 0.05,
    repeats: int = 50,
    epochs: int | None = None,
    root_seed: int = 0,
) -> Experiment:
    """Schedules of step size and rate, or KL weight, found by networks that take over from each other, and replayed.

    The preset `sparse` is judged with the share ``keep`` of its weights; all others whole.
    """
    base = of_the_paper("table1", data, methods=methods, repeats=repeats, epochs=epochs, root_seed=root_seed)
    shares = tuple(sorted({*REPLAYED.shares, *([] if keep is None else [keep])}, reverse=True))
    protocols = tuple(replace(one, evaluation=replace(REPLAYED, shares=shares)) for one in base.protocols)
    return replace(base, protocols=protocols, population=Population(members=members, every=every, keep=keep))


def sparsity(
    data: str,
    network: str = "lenet-300-100",
    *,
    search: SparsitySearch | None = None,
    methods: Sequence[str] | None = None,
    structured: bool = False,
    repeats: int = 20,
    epochs: int | None = None,
    root_seed: int = 0,
) -> Experiment:
    """Error against the share of weights kept: DropConnect++ and its opponents, each tried with as many settings.

    Without ``methods`` all are tried; where groups of weights are removed, DropConnect++ and the dense network.
    """
    search = sparsity_search(structured=structured) if search is None else search
    if methods is None:
        methods = ("dropconnect++", "none") if structured else SPARSE_METHODS
    base = protocol_for(data, network, epochs, root_seed)
    protocols = frontier_protocols(base, methods, search.keep, structured=structured)
    return Experiment(protocols=protocols, repeats=repeats, sparsity=search)


def sparsity_search(
    keep: str | None = None, *, tries: int = 2, structured: bool = False, controls: bool = False
) -> SparsitySearch:
    """The search of `sparsity`, with shares as the command is given them.

    >>> sparsity_search("0.05, 0.01").keep
    (0.05, 0.01)
    """
    shares: tuple[float, ...] = STRUCTURED_KEEP if structured else KEEP
    if keep is not None:
        try:
            shares = tuple(float(share) for share in keep.split(",") if share.strip())
        except ValueError:
            raise ProtocolError(f"keep must be shares separated by commas, such as 0.05,0.02, got {keep!r}.") from None
    return SparsitySearch(keep=shares, repeats=tries, controls=tuple(CONTROLS) if controls else ())


def from_file(path: Path) -> Experiment:
    """Your own experiment: numbers and tables of `CONTENT`, and `[[methods]]`."""
    try:
        with path.open("rb") as file:
            content: dict[str, Any] = tomllib.load(file)
    except FileNotFoundError as error:
        raise ProtocolError(
            f"{path}: there is no such file. The paper's experiments are {', '.join(NAMES)}; another is sparsity."
        ) from error
    except RecursionError as error:
        raise ProtocolError(f"{path}: cannot be read (its lists and tables are too deep).") from error
    except (OSError, ValueError) as error:  # TOML's errors, and Python's for numbers of thousands of digits
        raise ProtocolError(f"{path}: cannot be read ({_brief(error)}).") from error
    try:
        return _from_content(content)
    except ProtocolError as error:
        raise ProtocolError(f"{path}: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    """An error's text on one line that is safe to show, without the middle of a value that fills pages."""
    text = printable(str(error)).replace("\n", "\\n")
    return text if len(text) <= 2 * BRIEF else f"{text[:BRIEF]} [...] {text[-BRIEF:]}"


def _from_content(content: dict[str, Any]) -> Experiment:
    for name, value in content.items():
        if name not in CONTENT:
            raise ProtocolError(f"{name} is no setting. Known: {', '.join(CONTENT)}.")
        if name in ("protocol", "selection", "sparsity", "population", "small_data") and not isinstance(value, dict):
            raise ProtocolError(f"{name} must be a table, under [{name}], got {value!r}.")
    bases = [from_dict(Protocol, one, "protocol.") for one in _by_step_size(content.get("protocol", {}))]
    base = bases[0]
    search = from_dict(SparsitySearch, content["sparsity"], "sparsity.") if "sparsity" in content else None
    given = [content.get("protocol", {}).get("method", {})]
    chosen: list[Method | Pruning] = [base.method if base.pruning is None else base.pruning]
    if "methods" in content:
        methods = content["methods"]
        if not isinstance(methods, list) or not all(isinstance(one, dict) for one in methods):
            raise ProtocolError("methods must be tables, each under [[methods]].")
        if "method" in content.get("protocol", {}):
            raise ProtocolError("protocol.method is one method and [[methods]] are several: give one or the other.")
        if "pruning" in content.get("protocol", {}):
            raise ProtocolError("protocol.pruning is one method and [[methods]] are several: give one or the other.")
        if search is not None:
            methods = [told(table, search.keep) for table in methods]
        given = [one for table in methods for one in _one_by_one(table)]
        chosen = [_method_from(one) for one in given]
    selection = from_dict(Selection, content.get("selection", {}), "selection.")
    if selection.logit_steps:
        chosen = [
            replace(method, logit_step=None)
            if isinstance(method, Method) and method.kind == "dropconnect++" and "logit_step" not in one
            else method
            for method, one in zip(chosen, given, strict=True)
        ]
    counts = {"repeats": content.get("repeats", 10), "ensembles": content.get("ensembles", 0)}
    for name, value in counts.items():
        if type(value) is not int:
            raise ProtocolError(f"{name} must be a whole number, got {value!r}.")
    members = from_dict(Population, content["population"], "population.") if "population" in content else None
    fewer = from_dict(SmallData, content["small_data"], "small_data.") if "small_data" in content else None
    protocols = tuple(
        _by_epoch(_with_step(_with_method(one, method), table), table)
        for method, table in zip(chosen, given, strict=True)
        for one in bases
    )
    if fewer is not None:
        protocols = by_size(protocols, fewer)
    return Experiment(protocols=protocols, selection=selection, sparsity=search, population=members, **counts)


def by_size(protocols: Sequence[Protocol], fewer: SmallData) -> tuple[Protocol, ...]:
    """Each protocol with each number of training examples: all methods with one number, then with the next."""
    each = [fewer.protocols(protocol) for protocol in protocols]
    return tuple(protocol for alike in zip(*each, strict=True) for protocol in alike)


def _with_step(protocol: Protocol, table: dict[str, Any]) -> Protocol:
    """The protocol with the step size that a method's own table gives."""
    if "step_size" not in table:
        return protocol
    step_size = from_dict(Training, {"step_size": table["step_size"]}, "methods.").step_size
    return replace(protocol, training=replace(protocol.training, step_size=step_size))


def _by_epoch(protocol: Protocol, table: dict[str, Any]) -> Protocol:
    """The protocol with what a method's own table gives by epoch."""
    if "by_epoch" not in table:
        return protocol
    given = table["by_epoch"]
    if not isinstance(given, dict):
        raise ProtocolError(f"methods.by_epoch must be a table, got {given!r}.")
    return replace(protocol, by_epoch=from_dict(ByEpoch, given, "methods.by_epoch."))


def _method_from(table: dict[str, Any]) -> Method | Pruning:
    table = {name: value for name, value in table.items() if name not in ("step_size", "by_epoch")}
    kind = PRUNING.get(str(table.get("kind")))
    return from_dict(Method, table, "methods.") if kind is None else from_dict(kind, table, "methods.")


def _with_method(protocol: Protocol, method: Method | Pruning) -> Protocol:
    if isinstance(method, Method):
        if method.kind == "dropconnect++" and protocol.architecture.layered:
            raise ProtocolError(
                "kind 'dropconnect++' is for the paper's network. For one given as layers use kind 'sparsity-plan'."
            )
        return replace(protocol, method=method, pruning=None)
    return replace(protocol, method=METHODS["none"], pruning=method)  # type: ignore[arg-type]


def _by_step_size(protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """The protocol's table; where its step size is a list, a table for each."""
    training = protocol.get("training")
    if not isinstance(training, dict) or not isinstance(training.get("step_size"), list):
        return [protocol]
    steps = _one_by_one({"step_size": training["step_size"]}, "protocol.training.")
    return [protocol | {"training": training | one} for one in steps]


CONTENT = ("repeats", "ensembles", "protocol", "methods", "selection", "sparsity", "population", "small_data")
WHOLE = ("shares",)
"""Settings that are lists themselves."""


def _one_by_one(table: dict[str, Any], where: str = "methods.") -> list[dict[str, Any]]:
    """The table, with a table for each value of a list in it; of several lists for each combination."""
    for name, value in table.items():
        if value == []:
            raise ProtocolError(f"{where}{name} is an empty list: give a value, or several.")
    values = [v if isinstance(v, list) and name not in WHOLE else [v] for name, v in table.items()]
    return [dict(zip(table, combination, strict=True)) for combination in itertools.product(*values)]


def demo(repeats: int = 4, epochs: int = 5) -> Experiment:
    """A small Table 1, on the embedded images: a narrow network, few epochs, few repeats, and a posterior that learns.

    The paper's posterior stays near a half in so few steps; straight-through's, with the preset's step, is beside it.
    """
    architecture = Architecture(maps=(8, 8, 16), hidden=32)
    evaluation = Evaluation(
        every=2, curve_samples=10, samples=(1, 10, 30), shares=(1.0, 0.5, 0.25, 0.1), predictive_samples=10
    )
    fixed = [
        Method(kind="none"),
        Method(kind="dropout", rate=0.5),
        Method(kind="dropconnect", rate=0.5),
        Method(kind="dropconnect++"),
        Method(kind="dropconnect++", estimator="straight-through", logit_step=METHODS["sparse"].logit_step),
    ]
    base = Protocol(data="fashion-mini", architecture=architecture, evaluation=evaluation)
    training = replace(base.training, step_size=0.01, batch_size=64, epochs=epochs)
    return Experiment(protocols=tuple(replace(base, method=m, training=training) for m in fixed), repeats=repeats)
