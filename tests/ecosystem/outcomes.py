"""What is asked of every model and tool of the table, each as a function that says "yes" or why not."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from outcome_cases import BATCH, Inputs, alone, first_tensor, per_example
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import DropConnectError
from scripts import ROOT

YES = "yes"
RECORD = ROOT / "records" / "ecosystem" / "outcomes.csv"


@cache
def recorded() -> dict[tuple[str, str], str]:
    """The outcomes that are published, by name and aspect."""
    with RECORD.open(newline="") as file:
        return {(row["name"], row["aspect"]): row["outcome"] for row in csv.DictReader(file)}


def refused(act: Callable[[], str]) -> str:
    """What an action says; an error of ours in its own words. Any other error fails the test."""
    try:
        return act()
    except DropConnectError as error:
        return f"refused: {str(error).partition(': ')[2] or error}"[:200]


def output_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """The mean network's output."""
    with torch.no_grad():
        return first_tensor(model.eval()(**inputs))


def agrees(model: nn.Module, inputs: Inputs) -> str:
    """Whether the folded model computes the same."""
    expected = output_of(model, inputs)
    return compared(output_of(dcpp.to_dense(model), inputs), expected)


def compared(found: Tensor, expected: Tensor) -> str:
    """Whether two outputs are the same but for rounding."""
    if found.shape != expected.shape:
        return f"no: the shape is {tuple(found.shape)} in place of {tuple(expected.shape)}"
    apart = float((found - expected).abs().max() / expected.abs().max())
    return YES if apart < 1e-4 else f"no: outputs are {apart:.2g} apart"


def trains(model: nn.Module, inputs: Inputs) -> str:
    """Whether the likelihood rises in 25 steps that ask for every gate, and the log-odds move."""
    torch.manual_seed(2)
    target = torch.randn(BATCH)
    elbo = dcpp.ELBO(model, per_example, num_data=2 * BATCH)
    logits = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("_logit")}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    values = []
    model.train()
    for _ in range(25):  # more than the steps in which the ELBO watches which gates are asked for
        terms = elbo(target=target, **inputs)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        values.append(float(terms.log_likelihood))
    moved = [name for name, p in model.named_parameters() if name in logits and not torch.equal(p, logits[name])]
    if len(moved) < len(logits):
        return f"no: the gates of {sorted(logits.keys() - set(moved))[0]} do not move"
    return YES if sum(values[-5:]) > sum(values[:5]) else "no: the likelihood does not rise"


def saves(model: nn.Module, plain: nn.Module, inputs: Inputs, folder: Path) -> str:
    """Whether `save` and `load` give the same network, bit for bit."""
    expected = output_of(model, inputs)
    dcpp.save(model, folder / "model.safetensors")
    again = dcpp.load(folder / "model.safetensors", plain)
    return YES if torch.equal(output_of(again, inputs), expected) else "no: another network comes back"


def exports(model: nn.Module, inputs: Inputs) -> str:
    """Whether `torch.export` gives a program that computes the same."""
    values = tuple(inputs.values())
    with torch.no_grad():
        program = torch.export.export(alone(model, inputs), values, strict=False)
        return compared(program.module()(*values), output_of(model, inputs))


def to_onnx(model: nn.Module, inputs: Inputs, folder: Path, sequences: bool) -> str:
    """Whether ONNX Runtime computes the same, also for other numbers of examples and longer sequences."""
    import onnxruntime

    values = tuple(inputs.values())
    longer = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} if sequences else {0: torch.export.Dim.AUTO}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the models' own code, while it is traced
        dcpp.to_onnx(alone(model, inputs), folder / "m.onnx", values, dynamic_shapes=(longer,) * len(values))
    session = onnxruntime.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    changed = {name: torch.cat([x, x.flip(1)], 1)[:-1] if sequences else x[:-1] for name, x in inputs.items()}
    for given in (inputs, changed):
        named = {one.name: x.numpy() for one, x in zip(session.get_inputs(), given.values(), strict=True)}
        try:
            said = compared(torch.from_numpy(session.run(None, named)[0]), output_of(model, given))
        except Exception:  # ONNX Runtime's errors have no class of their own
            if given is inputs:
                raise
            return "in part: the exporter unrolls the sequence, so that it has the example's length"
        if said != YES:
            return said
    return YES


def settle(record: Callable[[str, str, str, str], None], kind: str, name: str, aspect: str, outcome: str) -> None:
    """Record an outcome; what was published to work must work, and nothing may be wrong in silence."""
    record(kind, name, aspect, outcome)
    if recorded().get((name, aspect)) == YES:
        assert outcome == YES
    assert outcome.startswith((YES, "in part: ", "refused: ")), outcome
