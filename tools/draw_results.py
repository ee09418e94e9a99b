"""Draw the figures of the results' pages from the networks in records/.

    python tools/draw_results.py           write them to docs/figures/
    python tools/draw_results.py --check   say which are not what the records give, and write nothing

Another version of matplotlib than `DRAWN_BY` draws other bytes: --check then compares nothing.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import record
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dropconnectpp.lab.report.render.drawing import LIGHT, METADATA, STYLE
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.statistics import summarise, welch
from dropconnectpp.lab.report.tables.connections import connection_tables
from dropconnectpp.lab.report.tables.judged import judged_tables
from dropconnectpp.lab.report.tables.uci import uci_tables
from dropconnectpp.lab.runs.store import Row

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
DRAWN_BY = "3.11.2"
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
"""Of the dense layer's weights."""
BY_SIZE, BY_POSTERIOR, BY_BOTH, BY_CHANCE = "magnitude", "keep_probability", "product", "random"
GREY, OCHRE, BLUE, RED, GREEN = LIGHT[:5]


@dataclass(frozen=True)
class Networks:
    """Networks of one setting, trained to the end on the whole training set."""

    store: str
    label: str
    rate: float | None = None
    step_size: float | None = None

    @property
    def rows(self) -> list[Row]:
        """Those of the store; none is an error."""
        found = [row for row in finished(self.store) if self._has(row)]
        if not found:
            raise LookupError(f"{self.store} has no finished network {self.label!r}, rate {self.rate}.")
        if len({row.key.digest for row in found}) != 1:
            raise LookupError(f"{self.store} has several settings {self.label!r}: name the step size.")
        return found

    def _has(self, row: Row) -> bool:
        settings = row.protocol.settings
        return (
            row.protocol.label == self.label
            and (self.rate is None or settings["method"]["rate"] == self.rate)
            and (self.step_size is None or settings["training"]["step_size"] == self.step_size)
        )

    def accuracies(self) -> list[float]:
        """In percent, by one pass."""
        return [float(row.results["accuracy"]) for row in self.rows]

    def kept(self, score: str, share: float) -> list[float]:
        """In percent, with a share of the dense weights kept by a score."""
        if share == 1.0:
            return self.accuracies()
        return [
            float(one["accuracy"])
            for row in self.rows
            for one in row.results["pruning"]
            if (one["score"], one["share"]) == (score, share)
        ]


@cache
def finished(store: str) -> tuple[Row, ...]:
    """Networks with 100 epochs and nothing held out."""
    return tuple(
        row
        for row in record.read(ROOT / "records" / f"{store}.jsonl.xz").rows
        if row.status == "done"
        and row.protocol.settings["training"]["epochs"] == 100
        and not row.protocol.settings["training"]["holdout"]
    )


CIFAR10, FASHION, SVHN, CIFAR100 = (f"{one}/results" for one in ("cifar10", "fashion-mnist", "svhn", "cifar100"))
SPARSE, PER_EXAMPLE, PAPER = "DropConnect++ (sparse)", "DropConnect++ (per-example)", "DropConnect++"
TOGETHER = Networks("noise/cifar10", "DropConnect", 0.9)
SVHN_RATE = Networks("connectivity/svhn_best_rate", "DropConnect", 0.9)


def _curve(axes: Axes, networks: Networks, score: str, label: str, **style: Any) -> None:
    """Accuracy against the share kept; bars are 95% intervals."""
    found = [summarise(networks.kept(score, share)) for share in SHARES]
    reach = [0.0 if one.interval is None else one.interval[1] - one.mean for one in found]
    axes.errorbar(SHARES, [one.mean for one in found], yerr=reach, label=label, capsize=2, marker="o", **style)


def _by_share(axes: Axes, title: str, bottom: float, top: float) -> None:
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks(SHARES, [f"{share:.0%}" for share in SHARES])
    axes.minorticks_off()
    axes.set_ylim(bottom, top)
    axes.set_title(title, loc="left", fontsize=9.0)
    axes.set_xlabel("weights kept in the dense layer")


TUNED_MORE = "DropConnect, tuned further, largest weights"
"""On CIFAR-10 rate and step size were chosen together, on SVHN the rate among higher ones."""
SMALL = (
    ("CIFAR-10", CIFAR10, ((TOGETHER, TUNED_MORE),), 64.0, 79.0),
    ("Fashion-MNIST", FASHION, (), 86.0, 93.5),
    ("SVHN, rebuilt images", SVHN, ((SVHN_RATE, TUNED_MORE),), 86.0, 93.5),
)


def _small(axes: Axes, title: str, store: str, more: Sequence[tuple[Networks, str]], limits: Any) -> None:
    _by_share(axes, title, *limits)
    _curve(axes, Networks(store, "Dropout"), BY_SIZE, "Dropout, largest weights", color=OCHRE, linestyle="dotted")
    _curve(
        axes,
        Networks(store, "DropConnect"),
        BY_SIZE,
        "DropConnect, rate tuned, largest weights",
        color=BLUE,
        linestyle="--",
    )
    for networks, label in more:
        _curve(axes, networks, BY_SIZE, label, color=RED, linestyle="-.")
    learned = Networks(store, SPARSE)
    _curve(axes, learned, BY_POSTERIOR, "DropConnect++, highest keep probabilities", color=GREEN)


def few_connections(figure: Figure) -> None:
    """What is left of a network when few weights are kept, on three data sets."""
    figure.set_size_inches(9.6, 4.2)
    panels = figure.subplots(1, 3)
    for axes, (title, store, more, *limits) in zip(panels, SMALL, strict=True):
        _small(axes, title, store, more, limits)
        both = "DropConnect++, highest keep probability times weight, as prune() does"
        _curve(axes, Networks(store, SPARSE), BY_BOTH, both, color=GREEN, linestyle=(0, (1, 1)))
    panels[0].set_ylabel("test accuracy, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", frameon=False, ncols=2)
    figure.subplots_adjust(left=0.06, right=0.99, bottom=0.3, top=0.94, wspace=0.16)


OPPONENTS = (
    ("CIFAR-10, rate tuned", CIFAR10, Networks(CIFAR10, "DropConnect")),
    ("CIFAR-10, rate and step size tuned", CIFAR10, TOGETHER),
    ("Fashion-MNIST, rate tuned", FASHION, Networks(FASHION, "DropConnect")),
    ("SVHN, rate tuned up to 0.8", SVHN, Networks(SVHN, "DropConnect")),
    ("SVHN, rate tuned up to 0.95", SVHN, SVHN_RATE),
    ("CIFAR-100, rate tuned", CIFAR100, Networks(CIFAR100, "DropConnect")),
)
OURS = (
    ("sparse-beta10, one setting for all", SPARSE, GREEN, "o"),
    ("per-example, one setting for all", PER_EXAMPLE, OCHRE, "s"),
    ("paper's setting", PAPER, GREY, "D"),
)


def against_dropconnect(figure: Figure) -> None:
    """Accuracy beside a DropConnect that was tuned for the data set."""
    figure.set_size_inches(7.2, 3.6)
    axes = figure.subplots()
    for shift, (label, method, colour, marker) in zip((-0.22, 0.0, 0.22), OURS, strict=True):
        places, found = [], []
        for place, (_, store, opponent) in enumerate(OPPONENTS):
            if any(row.protocol.label == method for row in finished(store)):
                places.append(place + shift)
                found.append(welch(Networks(store, method).accuracies(), opponent.accuracies()))
        reach = [one.interval[1] - one.difference for one in found]
        differences = [one.difference for one in found]
        axes.errorbar(
            differences, places, xerr=reach, label=label, color=colour, marker=marker, linestyle="none", capsize=2
        )
    axes.axvline(0.0, color="#000000", linewidth=0.8)
    axes.set_yticks(range(len(OPPONENTS)), [name for name, _, _ in OPPONENTS])
    axes.invert_yaxis()
    axes.set_xlabel("points of accuracy ahead of DropConnect; 50 networks each, 95% intervals")
    axes.legend(loc="center left", frameon=False, bbox_to_anchor=(0.02, 0.45))
    figure.subplots_adjust(left=0.34, right=0.98, bottom=0.14, top=0.97)


def paper_posterior(figure: Figure) -> None:
    """Whether the posterior of the paper's estimator knows which weights matter."""
    figure.set_size_inches(7.2, 3.6)
    panels = figure.subplots(1, 2)
    for axes, (title, store) in zip(panels, (("CIFAR-10", CIFAR10), ("SVHN, rebuilt images", SVHN)), strict=True):
        _by_share(axes, title, 50.0, 95.0)
        networks = Networks(store, PAPER)
        _curve(axes, networks, BY_SIZE, "largest weights", color=BLUE, linestyle="--")
        _curve(axes, networks, BY_CHANCE, "weights chosen at random", color=GREY, linestyle="dotted")
        _curve(axes, networks, BY_POSTERIOR, "highest keep probabilities", color=RED)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(loc="lower left", frameon=False)
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.14, top=0.92, wspace=0.15)


METHODS = {
    "plain": ("a plain network", GREY, "D"),
    "mc-dropout": ("MC dropout", OCHRE, "s"),
    "dropconnect": ("DropConnect", BLUE, "^"),
    "ensemble": ("an ensemble of 5", RED, "v"),
}
LINEAR = 0.1
"""Nats up to which the scale of differences is linear; they go from a hundredth to a whole one."""


def uci(figure: Figure) -> None:
    """The log likelihood of DropConnect++ beside that of each other method, set by set."""
    tests = uci_tables(record.read(ROOT / "records" / "uci" / "results.jsonl.xz").rows)["uci_tests"]
    sets = list(dict.fromkeys(row["title"] for row in tests))
    figure.set_size_inches(7.2, 4.2)
    axes = figure.subplots()
    for shift, (kind, (label, colour, marker)) in zip((-0.27, -0.09, 0.09, 0.27), METHODS.items(), strict=True):
        found = [(sets.index(row["title"]), row["log_likelihood"]) for row in tests if row["other_kind"] == kind]
        differences = [test["difference"] for _, test in found]
        reach = [test["interval"][1] - test["difference"] for _, test in found]
        places = [place + shift for place, _ in found]
        style: Any = {"color": colour, "marker": marker, "markersize": 4, "linestyle": "none", "capsize": 2}
        axes.errorbar(differences, places, xerr=reach, label=label, **style)
    axes.axvline(0.0, color="#000000", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=LINEAR)
    ticks = (-1.0, -0.3, -0.1, -0.05, 0.0, 0.05, 0.1, 0.3, 1.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(sets)), sets)
    axes.invert_yaxis()
    axes.set_xlabel("nats of log likelihood that DropConnect++ is ahead of it; 95% intervals")
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", frameon=False, ncols=4)
    figure.subplots_adjust(left=0.11, right=0.98, bottom=0.2, top=0.98)


SPARSE_METHODS = {
    "DropConnect++": ("SparsityPlan", GREEN, "o"),
    "Gradual magnitude pruning": ("gradual magnitude pruning", BLUE, "^"),
    "Sparse VD": ("Sparse VD", OCHRE, "s"),
    "L0": ("L0", RED, "v"),
}
"""Pruning in one shot is far above the others."""


def _frontier(axes: Axes, name: str, top: float) -> None:
    """Test error against how many times fewer weights are kept; bars are 95% intervals."""
    content = record.read(ROOT / "records" / "sparsity" / f"{name}.jsonl.xz")
    experiments = select_experiments(content.rows, content.notes).of_other_networks
    tables = connection_tables(experiments, content.notes)
    for method, (label, colour, marker) in SPARSE_METHODS.items():
        found = [row for row in tables["connections"] if row["method"] == method and row["times"] > 1.0]
        if not found:
            continue
        errors = [row["error"] for row in found]
        axes.errorbar(
            [row["times"] for row in found],
            [one["mean"] for one in errors],
            yerr=[one["interval"][1] - one["mean"] for one in errors],
            label=label,
            color=colour,
            marker=marker,
            capsize=2,
        )
    published = [row for row in tables["published"] if row["times"] is not None and row["times"] >= FEWEST_TIMES]
    for one in published:
        above = one["method"] != "Sparse VD"  # which lies lowest
        axes.plot(one["times"], one["error"], marker="D", color="#000000", markerfacecolor="none", linestyle="none")
        place = {"xytext": (0, 6 if above else -13), "textcoords": "offset points", "ha": "center", "fontsize": 7.5}
        axes.annotate(f"{one['method']}, published", (one["times"], one["error"]), **place)
    axes.set_ylim(0.0, top)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlabel("how many times fewer weights")


FEWEST_TIMES = 40.0
"""Published networks that keep more are left out."""


def few_weights(figure: Figure) -> None:
    """Error on MNIST with a hundredth of the weights and fewer: the methods run here, and what others published."""
    figure.set_size_inches(7.2, 3.6)
    left, right = figure.subplots(1, 2)
    for axes, name, title, top, ticks in (
        (left, "lenet_300_100", "LeNet-300-100", 3.5, (40, 70, 100, 150, 200)),
        (right, "lenet_5", "LeNet-5-Caffe", 1.6, (80, 120, 200, 300, 400)),
    ):
        _frontier(axes, name, top)
        axes.set_xlim(ticks[0], ticks[-1] * 1.25)
        axes.set_xticks(ticks, [f"×{tick}" for tick in ticks])
        axes.set_title(title)
    left.set_ylabel("error on the test set, %")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", frameon=False, ncols=4)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.24, top=0.92, wspace=0.2)


JUDGED = {
    "No regularization": ("no regularisation", GREY, ""),
    "Dropout": ("MC dropout", OCHRE, "Dropout"),
    "DropConnect": ("MC DropConnect", BLUE, "DropConnect"),
    "DropConnect++ (per-example)": ("DropConnect++, per-example", GREEN, "DropConnect++ (per-example)"),
}
"""Label, colour, and what an ensemble of it is called."""


def _judged(axes: Axes, name: str, ticks: Sequence[float]) -> None:
    """Accuracy against NLL: of one network, over 30 draws where it has noise, and of five trained apart."""
    content = record.read(ROOT / "records" / "uncertainty" / f"{name}.jsonl.xz")
    rows = judged_tables(select_experiments(content.rows, content.notes))["probabilities"]
    for method, (label, colour, member) in JUDGED.items():
        ensemble = f"Ensemble of 5, {member}" if member else "Ensemble of 5"
        for title, marker, filled in ((method, "o", colour), (ensemble, "s", "none")):
            row = [one for one in rows if one["method"] == title][-1]  # one pass comes before draws
            nll, accuracy = row["nll"], row["accuracy"]
            axes.errorbar(
                nll["mean"],
                accuracy["mean"],
                xerr=nll["interval"][1] - nll["mean"],
                yerr=accuracy["interval"][1] - accuracy["mean"],
                marker=marker,
                color=colour,
                markerfacecolor=filled,
                linestyle="none",
                elinewidth=0.8,
                label=f"{label}: five networks" if filled == "none" else label,
            )
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("NLL, nats an image; lower is better")


def uncertainty(figure: Figure) -> None:
    """Accuracy and NLL on test images of networks and of ensembles of five; bars are 95% intervals."""
    figure.set_size_inches(7.2, 4.0)
    left, right = figure.subplots(1, 2)
    _judged(left, "cifar10", (0.6, 0.7, 0.8, 1.0, 1.4))
    left.set_title("CIFAR-10")
    _judged(right, "fashion", (0.18, 0.2, 0.22, 0.25, 0.28))
    right.set_title("Fashion-MNIST")
    left.set_ylabel("accuracy, %")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", frameon=False, ncols=2)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.36, top=0.93, wspace=0.22)


DRAWINGS: Mapping[str, Callable[[Figure], None]] = {
    draw.__name__: draw
    for draw in (few_connections, few_weights, against_dropconnect, paper_posterior, uci, uncertainty)
}


def drawn(draw: Callable[[Figure], None]) -> bytes:
    """An SVG file on white, since pages may be dark. The same networks give the same bytes."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=LIGHT)}
        matplotlib.rcParams.update(settings)
        figure = Figure()
        draw(figure)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata=METADATA["svg"])
    return stream.getvalue()


def main() -> None:
    """Write the figures, or compare them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWINGS)} (default: all)")
    options.add_argument("--check", action="store_true", help="write nothing; fail if a figure would change")
    given = options.parse_args()
    if unknown := set(given.names) - set(DRAWINGS):
        options.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(DRAWINGS)}")
    stale = 0
    for name in given.names or DRAWINGS:
        path, content = FIGURES / f"{name}.svg", drawn(DRAWINGS[name])
        same = path.exists() and (path.read_bytes() == content or (given.check and matplotlib.__version__ != DRAWN_BY))
        if not same:
            print(f"{'stale' if given.check else 'drawn'} {path.relative_to(ROOT)}")
            stale += 1
        if not same and not given.check:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    if given.check and stale:
        raise SystemExit("Run: python tools/draw_results.py")


if __name__ == "__main__":
    main()
