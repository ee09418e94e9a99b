"""Every framework: its example learns and keeps the share that it asks for, and what comes out is of use elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import outcomes
import pytest
import torch
from outcome_cases import BATCH, CASES, WIDTH, Inputs, first_tensor, per_example
from torch import nn

import dropconnectpp as dcpp
from scripts import ROOT, run

Record = Callable[[str, str, str, str], None]
RESULT = re.compile(r"^(?P<right>[\d.]+)% right, with (?P<kept>\d+)% of the (encoder's )?weights$", re.MULTILINE)
EXAMPLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], nn.Module], float]] = {
    "Hugging Face Trainer": ("transformers_text", "transformers", lambda found: found["trainer"].model, 0.1),
    "Lightning": ("lightning_digits", "lightning", lambda found: found["module"].model, 0.2),
    "Lightning Fabric": ("fabric_digits", "lightning", lambda found: found["model"], 0.2),
    "accelerate": ("accelerate_digits", "accelerate", lambda found: found["model"], 0.2),
    "Ignite": ("ignite_digits", "ignite", lambda found: found["model"], 0.2),
    "skorch": ("skorch_digits", "skorch", lambda found: found["net"].module_, 0.2),
}
"""By tool: its script and package, the model that it trains, and the share of weights that it ends with."""


def settle_all(record: Record, name: str, model: nn.Module, plain: nn.Module, inputs: Inputs, folder: Path) -> None:
    """Every column of the table but the training."""
    outcomes.settle(record, "tool", name, "converts", outcomes.YES)
    outcomes.settle(record, "tool", name, "saves", outcomes.saves(model, plain, inputs, folder))
    outcomes.settle(record, "tool", name, "torch.export", outcomes.exports(model, inputs))
    outcomes.settle(record, "tool", name, "ONNX", outcomes.to_onnx(model, inputs, folder, sequences=False))
    outcomes.settle(record, "tool", name, "to_dense", outcomes.agrees(model, inputs))


@pytest.fixture
def torchs_own_state() -> Iterator[None]:
    """Scripts set seeds and modes for themselves."""
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_grad_enabled(True)


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("torchs_own_state")
@pytest.mark.parametrize("tool", EXAMPLES)
def test_a_framework_trains_and_keeps_the_share_asked_for(tool: str, record: Record, tmp_path: Path) -> None:
    script, package, model_of, share = EXAMPLES[tool]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = runpy.run_path(str(ROOT / "examples" / f"{script}.py"))
    result = RESULT.search(printed.getvalue())
    assert result, printed.getvalue()
    assert float(result["right"]) > 88.0
    assert float(result["kept"]) / 100 == pytest.approx(share, rel=0.11)
    outcomes.settle(record, "tool", tool, "trains", outcomes.YES)
    model = model_of(found).cpu()
    text = {"input_ids": torch.randint(1, 10, (BATCH, 4))}
    inputs = text if tool == "Hugging Face Trainer" else {"input": torch.rand(BATCH, 64)}
    settle_all(record, tool, model, dcpp.to_dense(model), inputs, tmp_path)


def test_scikit_learns_estimators_come_out_as_models(record: Record, tmp_path: Path) -> None:
    from dropconnectpp.integrations.sklearn import DropConnectClassifier

    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(0)).numpy()
    y = (x[:, 0] > 0).astype(int)
    model = DropConnectClassifier((8,), keep=0.3, max_iter=60, learning_rate_init=0.01, random_state=0).fit(x, y)
    trained = outcomes.YES if model.score(x, y) > 0.9 else "no: it does not learn"
    outcomes.settle(record, "tool", "scikit-learn", "trains", trained)
    settle_all(
        record,
        "scikit-learn",
        model.module_,
        dcpp.to_dense(model.module_),
        {"input": torch.from_numpy(x[:BATCH])},
        tmp_path,
    )


def test_the_script_for_scikit_learn() -> None:
    found = run("examples/sklearn_estimators.py")
    assert found.returncode == 0, found.stderr[-2000:]
    for pattern, least in ((r"keep=0\.2: ([\d.]+)%", 93), (r"on test images ([\d.]+)%", 94), (r"R² 0\.(\d+)", 30)):
        shown = re.search(pattern, found.stdout)
        assert shown, found.stdout
        assert float(shown[1]) > least


def test_compiled_models_train_and_are_saved(record: Record, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "nn.Linear")
    model = dcpp.convert(case.model(), preset="sparse")
    elbo = dcpp.ELBO(model, per_example, num_data=BATCH, check_finite=False)
    step = torch.compile(elbo, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    target, values = torch.randn(BATCH), []
    for _ in range(25):
        terms = step(case.inputs()["input"], target)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        values.append(float(terms.log_likelihood))
    outcomes.settle(record, "tool", "torch.compile", "trains", outcomes.YES if values[-1] > values[0] else "no")
    compiled = torch.compile(model.eval(), backend="aot_eager")
    torch.testing.assert_close(compiled(**case.inputs()), outcomes.output_of(model, case.inputs()))
    dcpp.save(compiled, tmp_path / "compiled.safetensors")
    again = dcpp.load(tmp_path / "compiled.safetensors", case.model())
    assert torch.equal(outcomes.output_of(again, case.inputs()), outcomes.output_of(model, case.inputs()))
    settle_all(record, "torch.compile", model, case.model(), case.inputs(), tmp_path)


@pytest.mark.parametrize("estimator", ["straight-through", "bbvi"])
def test_an_exported_training_step_draws_and_has_every_gradient(estimator: str) -> None:
    """`torch.export` of the loss: each call draws masks of its own, and all parameters get a gradient."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            model = dcpp.convert(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), estimator=estimator)
            self.elbo = dcpp.ELBO(model, dcpp.categorical, num_data=100, check_finite=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.elbo(x, y).loss
            return loss

    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    step = torch.export.export(Loss(), (x, y)).module()
    losses = [step(x, y) for _ in range(10)]
    assert len({float(loss.detach()) for loss in losses}) == 10
    sum(losses).backward()
    for name, parameter in step.named_parameters():
        assert parameter.grad.any(), name


def test_an_adapter_of_peft_learns_its_connections(record: Record, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    case = next(case for case in CASES if case.name == "BERT")

    def adapted() -> nn.Module:
        model: nn.Module = peft.get_peft_model(case.model(), peft.LoraConfig(target_modules=["query", "value"], r=4))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which PEFT starts at 0
                nn.init.normal_(parameter, std=0.1)
        return model.eval()

    torch.manual_seed(3)
    plain = adapted()
    model = dcpp.convert(plain, include="*lora_*", preset="sparse", example_input=case.inputs())
    before = first_tensor(model(**case.inputs()))
    assert len(dcpp.posterior(model)) == 4
    outcomes.settle(record, "tool", "PEFT, LoRA", "trains", outcomes.trains(model, case.inputs()))
    assert not torch.equal(first_tensor(model.eval()(**case.inputs())), before)
    settle_all(record, "PEFT, LoRA", model, adapted(), case.inputs(), tmp_path)


SCRIPTS = [*(script for script, *_ in EXAMPLES.values()), "sklearn_estimators"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_has_at_most_forty_lines(script: str) -> None:
    assert len((ROOT / "examples" / f"{script}.py").read_text().splitlines()) <= 40
