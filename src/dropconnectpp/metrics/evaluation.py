"""`evaluate`: one call, batch by batch, for everything that the field asks of uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ShapeError, check_choice, check_count, check_probability, named_options
from dropconnectpp.likelihoods import LogLikelihood
from dropconnectpp.metrics.classes import BINS
from dropconnectpp.metrics.parts import Panels
from dropconnectpp.metrics.result import Evaluation
from dropconnectpp.metrics.tallies import Foreign, tally_for
from dropconnectpp.prediction import Prediction
from dropconnectpp.prediction.batches import Call, is_loader, pieces
from dropconnectpp.prediction.monte_carlo import AVERAGES, BATCH_SIZE, Average, batchwise, likelihood_for


@named_options
def evaluate(
    model: nn.Module,
    loader: Iterable[Any] | tuple[Any, ...],
    ood: Any = None,
    *,
    num_samples: int = 30,
    average: Average = "networks",
    likelihood: LogLikelihood | None = None,
    bins: int = BINS,
    level: float = 0.9,
    batch_size: int = BATCH_SIZE,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Measure a model's predictions and their uncertainty on examples with targets.

    Classes and yes/no values: accuracy, NLL, Brier score, calibration error in bins of one width and of as many
    examples each, AURC. Real values and counts: RMSE, NLL, CRPS, coverage and width of an interval. Foreign examples:
    AUROC and FPR95 of each measure of doubt. The same drawn networks predict every batch. One batch's outputs are in
    memory at a time, and a few numbers for each example.

    Args:
        model: Any model, with masked layers or without: a plain one is a single network.
        loader: Batches of inputs and targets; or a tuple of tensors, the last of them the target.
        ood: Examples that the model was not made for: a loader, a tensor, or a dictionary of them by name. Targets in
            a loader are left out.
        num_samples: How many networks are drawn.
        average: As in `predict`.
        likelihood: As in `predict`; None: the one that the model was trained with.
        bins: Of calibration errors.
        level: The interval's probability.
        batch_size: Of tensors; a loader has its own.
        generator: Where the masks' seeds come from.
        progress: Whether a bar is shown on stderr; None: for what takes a few seconds, in a terminal.

    Raises:
        ArgumentError: No likelihood is known, a batch has no target, or an argument breaks its rule.
        ShapeError: Targets do not have the predictions' shape.
        NonFiniteError: A prediction holds NaN or infinity.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 3))
    >>> data = torch.randn(50, 4), torch.randint(3, (50,))
    >>> found = evaluate(model, data, ood=torch.randn(20, 4), likelihood=dropconnectpp.categorical)
    >>> list(found)[:4]
    ['accuracy', 'nll', 'brier', 'ece']
    """
    check_count("num_samples", num_samples)
    check_count("bins", bins)
    check_count("batch_size", batch_size)
    check_choice("average", average, AVERAGES)
    check_probability("level", level)
    chosen = likelihood_for(model, likelihood)
    tally = tally_for(chosen, bins, level)
    # The seeds of one draw serve every set: known and foreign examples are judged by the same networks.
    seed = int(torch.randint(2**62, (), generator=generator))

    def predicted(data: Any, title: str) -> Iterator[tuple[Prediction, Call]]:
        return batchwise(
            model,
            (batches(data, batch_size),),
            {},
            num_samples=num_samples,
            average=average,
            likelihood=chosen,
            generator=torch.Generator().manual_seed(seed),
            batch_size=None,
            keep_samples=not hasattr(chosen, "entropy"),
            progress=progress,
            title=title,
        )

    networks = 0
    for found, call in predicted(loader, "evaluate"):
        tally.add(found, target_of(call))
        networks = found.num_samples
    if not tally.count:
        raise ArgumentError("evaluate: the loader gave no batch.")
    foreign = {name: Foreign() for name in _named(ood)}
    for name, data in _named(ood).items():
        for found, _ in predicted(data, f"evaluate {name}"):
            foreign[name].add(found)
        if not foreign[name].count:
            raise ArgumentError(f"evaluate: the loader of {name} gave no batch.")
    measures = {name: parts for name, parts in tally.doubts.items() if foreign}
    doubts = {
        name: tuple(torch.cat(one) for one in (parts, *(other.doubts[name] for other in foreign.values())))
        for name, parts in measures.items()
    }
    panels = tally.panels()
    return Evaluation(
        tally.figures(),
        {name: one.figures(tally.doubts) for name, one in foreign.items()},
        {"": tally.count, **{name: one.count for name, one in foreign.items()}},
        networks,
        chosen,
        level,
        Panels(panels.reliability, panels.risk, panels.pit, doubts),
    )


def batches(data: Any, batch_size: int) -> Iterable[Any]:
    """A loader as it is; tensors in batches."""
    if isinstance(data, Tensor):
        return Batches(data.split(batch_size))
    if isinstance(data, tuple | list) and data and all(isinstance(one, Tensor) and one.ndim for one in data):
        lengths = {len(one) for one in data}
        if len(lengths) != 1:
            raise ShapeError(f"Inputs and targets must be as many, got {', '.join(str(len(one)) for one in data)}.")
        return Batches([part.inputs for part in pieces(Call(tuple(data)), batch_size)])
    if not is_loader((data,)):
        raise ArgumentError(f"Expected a loader of batches, or a tuple of tensors, got {type(data).__name__}.")
    loader: Iterable[Any] = data
    return loader


class Batches:
    """Tensors cut into batches, as a loader has them."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def target_of(call: Call) -> Tensor:
    """The target that came with a batch."""
    if not isinstance(call.target, Tensor):
        raise ArgumentError(
            "A batch has no target. Give a loader of (inputs, target), of dictionaries with a key such as "
            "'labels' or 'target', or a tuple (x, y)."
        )
    return call.target.cpu()


def _named(ood: Any) -> dict[str, Any]:
    if ood is None:
        return {}
    return dict(ood) if isinstance(ood, Mapping) else {"ood": ood}
