"""`dcpp run sparsity`: methods that keep few connections, the settings that are tried for each, and their controls.

Every method is tried with as many settings at a share. One that is told the share (`keep`) is tried anew at each; one
that is not, such as Sparse VD, is tried with as many settings in all, and each of them is offered at every share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dropconnectpp.lab.config.layers import NetworkName
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Normalisation, Protocol, Training
from dropconnectpp.lab.config.pruning import (
    L0,
    AnyPruning,
    FixedSupport,
    GradualMagnitude,
    OneShot,
    Plan,
    Pruning,
    SparseVD,
)
from dropconnectpp.lab.config.selection import SparsitySearch
from dropconnectpp.lab.config.settings import ProtocolError, require

OURS, OURS_BY_GROUPS, DENSE = "DropConnect++", "DropConnect++, whole units", "Dense"
NAMES = ("dropconnect++", "gradual-magnitude", "sparse-vd", "l0", "one-shot", "none")
"""What `--methods` takes; "none" is the dense network."""
NETWORKS: dict[NetworkName, int] = {"lenet-300-100": 100, "lenet-5-caffe": 60}
"""Networks by name, and for how many epochs they train."""
KEEP = (0.05, 0.02, 0.01)
STRUCTURED_KEEP = (0.33, 0.14)
"""Where whole inputs and units go, as many weights are harder to do without."""
STEP, FAST_STEP = 1e-3, 3e-3
"""Adam's usual step size, and a larger one for methods whose noise hides their gradients."""
PADDED = ("mnist", "fashion-mnist", "fashion-mini")
"""Sets of 28 x 28 images, which the laboratory stores with two pixels more at each edge."""
CONTROLS = {
    "random": "Support at random",
    "magnitude": "Support by |W|",
    "unlearned": "Nothing learned",
    "from-start": "Random from the start",
}
"""Controls of DropConnect++ by name, each with the layers' shares or the share of what it is a control of."""


# ----------------------------------------------------------------------------------------------- names


def family(pruning: Pruning | None) -> str:
    """What tables call a method, whatever its settings are.

    >>> family(Plan(keep=0.02)), family(Plan(keep=0.02, support="random")), family(None)
    ('DropConnect++', 'Support at random', 'Dense')
    """
    if pruning is None:
        return DENSE
    name = control(pruning)
    if name or not isinstance(pruning, Plan):
        return CONTROLS[name] if name else pruning.title
    return OURS if pruning.granularity == "synapse" else OURS_BY_GROUPS


def control(pruning: Pruning | None) -> str:
    """The name of a control; empty for a method."""
    if isinstance(pruning, FixedSupport):
        return "from-start"
    if not isinstance(pruning, Plan):
        return ""
    return "unlearned" if not pruning.learning else "" if pruning.support == "posterior" else pruning.support


def described(protocols: Sequence[Protocol]) -> list[str]:
    """Each protocol by the settings in which these differ, but for the share to keep.

    >>> base = protocol_for("mnist", "lenet-300-100")
    >>> described([replace(base, pruning=SparseVD(kl_weight=weight)) for weight in (1.0, 2.0)])
    ['kl_weight 1', 'kl_weight 2']
    """
    flat = [_flat(protocol) for protocol in protocols]
    names = [name for name in dict.fromkeys(itertools.chain(*flat)) if len({one.get(name) for one in flat}) > 1]
    return [", ".join(f"{name} {one[name]}" for name in names if name in one) or "as it is" for one in flat]


def _flat(protocol: Protocol) -> dict[str, str]:
    found = {"step size": f"{protocol.training.step_size:g}"} if protocol.training.step_size else {}
    pruning = protocol.pruning
    for item in fields(pruning) if pruning is not None else ():
        value = getattr(pruning, item.name)
        if item.name not in ("kind", "keep"):
            found[item.name] = f"{value:g}" if isinstance(value, float) else "by steps" if value is None else str(value)
    return found


# ------------------------------------------------------------------------------------------ candidates


@dataclass(frozen=True)
class Candidate:
    """A setting that is tried."""

    pruning: AnyPruning | None
    step_size: float = STEP


def candidates(name: str, keep: Sequence[float], *, structured: bool = False) -> list[Candidate]:
    """The settings that are tried of a method, eight at a share.

    >>> [len(candidates(name, (0.05, 0.02))) for name in NAMES]
    [16, 16, 16, 16, 16, 1]
    """
    require(name in NAMES, f"methods must be of {', '.join(NAMES)}, got {name!r}.")
    if name == "none":
        return [Candidate(None)]
    if structured:
        require(name == "dropconnect++", f"structured is for dropconnect++ alone: {name} has no gates of groups.")
        return [Candidate(one) for share in keep for one in _groups(share)]
    told = {"dropconnect++": _ours, "gradual-magnitude": _gradual, "one-shot": _one_shot}
    if name in told:
        return [one for share in keep for one in told[name](share)]
    free = {"sparse-vd": _sparse_vd, "l0": _l0}
    return free[name](EACH * len(keep))


EACH = 8
"""Settings of a method at a share."""


def _ours(keep: float) -> list[Candidate]:
    """When the support is fixed, DropConnect noise, the logits' step size."""
    varied = itertools.product((0.6, 0.8), (0.0, 0.05), (None, 0.03))
    return [Candidate(Plan(keep=keep, fix_at=end, noise=noise, logit_lr=step)) for end, noise, step in varied]


def _groups(keep: float) -> list[Plan]:
    """One gate for each input, since the next layer's inputs are a layer's units: when, the prior, the step size."""
    varied = itertools.product((0.6, 0.8), (99.0, 999.0), (None, 0.03))
    return [Plan(keep=keep, granularity="input", fix_at=end, beta=beta, logit_lr=step) for end, beta, step in varied]


def _gradual(keep: float) -> list[Candidate]:
    """When weights are removed, from which layers, and the noise on what is left."""
    plain: list[dict[str, Any]] = [{}, {"end": 0.5}, {"begin": 0.2, "end": 0.8}, {"ranking": "layer"}]
    noisy: list[dict[str, Any]] = [{"noise": "dropconnect", "rate": rate} for rate in (0.05, 0.1, 0.2)]
    noisy.append({"noise": "dropout", "rate": 0.1})
    return [Candidate(GradualMagnitude(keep=keep, **one)) for one in (*plain, *noisy)]


def _one_shot(keep: float) -> list[Candidate]:
    """When weights are removed, which leaves the rest for fine-tuning, and the step size."""
    varied = itertools.product(({"at": 0.3}, {"at": 0.5}, {"at": 0.7}, {"ranking": "layer"}), (STEP, FAST_STEP))
    return [Candidate(OneShot(keep=keep, **one), step) for one, step in varied]  # type: ignore[arg-type]


def _sparse_vd(count: int) -> list[Candidate]:
    """The KL's weight, which decides how much is kept, and the step size."""
    varied = itertools.product(_geometric(0.5, 12.0, count // 2), (STEP, FAST_STEP))
    return [Candidate(SparseVD(kl_weight=weight), step) for weight, step in varied]


def _l0(count: int) -> list[Candidate]:
    """What an open gate costs, which decides how much is kept, and the gates' step size."""
    varied = itertools.product(_geometric(0.4, 12.0, count // 2), (3.0, 10.0))
    return [Candidate(L0(weight=weight, gate_step=step)) for weight, step in varied]


def _geometric(low: float, high: float, count: int) -> list[float]:
    """Numbers at equal ratios, of two digits.

    >>> _geometric(0.3, 16.0, 4)
    [0.3, 1.1, 4.3, 16.0]
    """
    ratio = (high / low) ** (1.0 / max(1, count - 1))
    return [float(f"{low * ratio**place:.2g}") for place in range(count)]


def controls_of(protocol: Protocol, names: Iterable[str], shares: Sequence[float] = ()) -> dict[str, Protocol]:
    """The controls of a chosen protocol by name.

    ``shares`` are those of its layers once it is trained, for "from-start".
    """
    plan = protocol.pruning
    if not isinstance(plan, Plan):
        raise ProtocolError(f"controls are of {OURS}, got {family(plan)}.")
    found: dict[str, Protocol] = {}
    for name in names:
        require(name in CONTROLS, f"controls must be of {', '.join(CONTROLS)}, got {name!r}.")
        if name == "unlearned":
            one: AnyPruning = Plan(keep=plan.keep, noise=plan.noise, fix_at=plan.fix_at, learning=False)
        elif name == "from-start":
            noise: Any = {"noise": "dropconnect", "rate": plan.noise} if plan.noise else {}
            one = FixedSupport(shares=tuple(float(f"{share:.6g}") for share in shares), **noise)
        else:
            one = replace(plan, support=name)  # type: ignore[arg-type]
        found[name] = replace(protocol, pruning=one)
    return found


# ---------------------------------------------------------------------------------------- the experiment


def protocol_for(data: str, network: NetworkName | str, epochs: int | None = None, root_seed: int = 0) -> Protocol:
    """A dense network as it is trained before anything is removed.

    >>> protocol_for("mnist", "lenet-300-100").training.epochs
    100
    """
    require(network in NETWORKS, f"network must be one of {', '.join(NETWORKS)}, got {network!r}.")
    length = NETWORKS[network] if epochs is None else epochs  # type: ignore[index]
    crop = 2 if data in PADDED else 0
    grey = Normalisation(scope="given", mean=0.1307, standard_deviation=0.3081, crop=crop)
    return Protocol(
        data=data,
        architecture=Architecture(name=network),  # type: ignore[arg-type]
        training=Training(step_size=STEP, optimiser="adam", schedule="second-half", epochs=length),
        evaluation=Evaluation(every=max(1, length // 4), curve_samples=0, samples=(), shares=(), predictive_samples=0),
        normalisation=grey if data == "mnist" else Normalisation(crop=crop),
        method=Protocol().method.__class__(kind="none"),
        root_seed=root_seed,
    )


def frontier_protocols(
    base: Protocol, methods: Sequence[str], keep: Sequence[float], *, structured: bool = False
) -> tuple[Protocol, ...]:
    """All settings of the methods, as they would go to the test set."""
    tried = [one for name in methods for one in candidates(name, keep, structured=structured)]
    return tuple(
        replace(base, pruning=one.pruning, training=replace(base.training, step_size=one.step_size)) for one in tried
    )


def told(table: Mapping[str, Any], keep: Sequence[float]) -> dict[str, Any]:
    """A method's table of a file: where it may be told a share and is told nothing, each share in turn."""
    kinds = ("sparsity-plan", "gradual-magnitude", "one-shot")
    open_there = table.get("kind") in kinds and not {"keep", "price", "kl_weight"} & table.keys()
    return {**table, "keep": list(keep)} if open_there else dict(table)


def check_budgets(protocols: Sequence[Protocol], search: SparsitySearch) -> None:
    """Raise unless every method is tried with as many settings at a share as every other."""
    counts: dict[str, float] = {}
    for protocol in protocols:
        pruning = protocol.pruning
        if pruning is None or control(pruning):
            continue
        share = getattr(pruning, "keep", None)
        require(
            share is None or share in search.keep,
            f"{pruning.label}: keep is not one of those under [sparsity], {', '.join(map(str, search.keep))}.",
        )
        counts[family(pruning)] = counts.get(family(pruning), 0.0) + 1.0 / len(search.keep)
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} {count:g}" for name, count in counts.items())
        raise ProtocolError(f"every method must be tried with as many settings at a share; there are of {each}.")
