"""The callback and the module of Lightning: a plan that Lightning steps, logs, checkpoints; Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError

L = pytest.importorskip("lightning")
pytest.importorskip("tensorboard")

from dropconnectpp.integrations.lightning import DropConnectCallback, DropConnectModule  # noqa: E402

pytestmark = [  # what Lightning says of its own code and of small data
    pytest.mark.filterwarnings("ignore::FutureWarning:typing_extensions"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def loader(batch: int = 24) -> Any:
    return DataLoader(TensorDataset(X, Y), batch_size=batch)


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    return dcpp.convert(plain, **{"preset": "sparse", **options})


def module(learning_rate: float = 1e-2, **options: Any) -> DropConnectModule:
    return DropConnectModule(network(**options), dcpp.categorical, len(X), learning_rate=learning_rate)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "callbacks": list(callbacks),
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 4,
        "logger": False,
        "max_epochs": 2,
    }
    return L.Trainer(**(given | options))


class Logged(L.Callback):  # type: ignore[misc,name-defined]
    """What was logged after each optimiser's step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_a_plan_ends_with_the_share_asked_for(tmp_path: Path) -> None:
    own, plan, logged = module(), DropConnectCallback(0.3), Logged()
    running = trainer(tmp_path, plan, logged, max_epochs=100)
    running.fit(own, loader(), loader())
    assert plan.plan is not None
    assert plan.plan.phase == "fixed"
    assert plan.plan.share_kept == pytest.approx(0.3, rel=0.11)
    assert logged.steps[3]["share_kept"] == 1.0
    assert logged.steps[-1]["share_kept"] == pytest.approx(plan.plan.share_kept)
    assert {"kl", "kl_weight", "train_loss", "val_loss"} <= logged.steps[-1].keys()
    assert logged.steps[-1]["val_loss"] < 0.1
    dense = dcpp.to_dense(own.model).eval()
    own.eval()
    torch.testing.assert_close(dense(X), own.forward(X))


def test_predictions_come_batch_by_batch(tmp_path: Path) -> None:
    own = module()
    found = trainer(tmp_path).predict(own, loader(48))
    assert len(found) == 2
    assert found[0]["mean"].shape == (48, 2)
    assert found[0].keys() == {"mean", "entropy", "mutual_information", "standard_deviation"}
    assert trainer(tmp_path).predict(own, DataLoader(X, 96))[0]["mean"].shape == (96, 2)


def test_the_kl_rises_and_is_logged(tmp_path: Path) -> None:
    own, logged = module(), Logged()
    trainer(tmp_path, DropConnectCallback(kl_warmup=0.5), logged, log_every_n_steps=1).fit(own, loader())
    assert [step["kl_weight"] for step in logged.steps] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert logged.steps[-1]["kl"] == pytest.approx(float(dcpp.kl_divergence(own.model).detach()), rel=1e-5)


def test_accumulated_batches_are_one_step_of_the_plan(tmp_path: Path) -> None:
    """The same gradient in one batch or in four: here the mean network's, which draws nothing."""
    found = []
    for batch, accumulate in ((96, 1), (24, 4)):
        own = module(estimator="local", keep_probability=0.999999)
        plan = DropConnectCallback(plan_options={"price": 1.0})
        trainer(tmp_path, plan, accumulate_grad_batches=accumulate, max_epochs=4).fit(own, loader(batch))
        assert plan.plan is not None
        assert plan.plan.steps_done == 4
        found.append({name: value.clone() for name, value in own.model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_clipping_weights_leaves_the_plan_alone(tmp_path: Path, clip: float | None) -> None:
    own, plan = module(), DropConnectCallback(plan_options={"price": 1e4, "fix_at": 1.0})
    trainer(tmp_path, plan, gradient_clip_val=clip, max_epochs=40).fit(own, loader())
    assert plan.plan is not None
    assert plan.plan.share_kept == 0.0


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
def test_a_resumed_training_ends_where_an_undisturbed_one_does(tmp_path: Path, estimator: str) -> None:
    """The state of torch's generators is not in Lightning's checkpoints: masks come from a generator of a seed here."""

    def start() -> tuple[Any, Any, Any]:
        own = module(estimator=estimator)
        own.elbo.generator = torch.Generator().manual_seed(3)
        keeper = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        plan = DropConnectCallback(plan_options={"price": 1.0, "fix_at": 0.6})
        return own, plan, trainer(tmp_path, plan, keeper, enable_checkpointing=True, max_epochs=8)

    whole, _, running = start()
    running.fit(whole, loader())
    for step in (8, 24):
        again, plan, running = start()
        again.elbo.generator.set_state(_draws(step, estimator))
        running.fit(again, loader(), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert plan.plan.steps_done == 32
        for name, value in whole.elbo.state_dict().items():
            assert torch.equal(value, again.elbo.state_dict()[name]), name


def _draws(steps: int, estimator: str) -> Tensor:
    """The generator's state after so many steps."""
    elbo = module(estimator=estimator).elbo
    elbo.generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        elbo(X, Y)
    return elbo.generator.get_state()


def test_tensorboard_gets_a_histogram_of_each_layer(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path)
    own = module()
    trainer(tmp_path, DropConnectCallback(histograms_every=4), logger=logger).fit(own, loader())
    events = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload()
    assert sorted(events.Tags()["histograms"]) == ["keep_probability/0", "keep_probability/2"]
    shown = events.Histograms("keep_probability/0")
    assert [event.step for event in shown] == [4, 8]
    learned = dcpp.posterior(own.model)["0"].flat("keep_probability")
    assert shown[1].histogram_value.num == len(learned) == 6 * 12 + 12
    assert shown[1].histogram_value.min == pytest.approx(float(learned.min()))
    assert shown[1].histogram_value.max == pytest.approx(float(learned.max()))
    assert "kl" in events.Tags()["scalars"]


def test_a_module_of_ones_own_has_the_callback_too(tmp_path: Path) -> None:
    class Own(L.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.elbo = dcpp.ELBO(network(), dcpp.categorical, len(X))

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.elbo(*batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plan = DropConnectCallback(plan_options={"price": 1.0})
    trainer(tmp_path, plan).fit(Own(), loader())
    assert plan.plan is not None
    assert plan.plan.steps_done == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_processes_stay_together(tmp_path: Path) -> None:
    own = module()
    start = {name: p.detach().clone() for name, p in own.model.named_parameters()}
    plan = DropConnectCallback(plan_options={"price": 1.0, "fix_at": 1.0})
    trainer(tmp_path, plan, Written(tmp_path), devices=2, strategy="ddp_fork").fit(own, loader())
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not torch.equal(value, start[name]), name


class Written(L.Callback):  # type: ignore[misc,name-defined]
    """Each process's weights at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        weights = {name: p.detach() for name, p in pl_module.model.named_parameters()}
        torch.save(weights, self.folder / f"{trainer.global_rank}.pt")


def test_fabric_runs_the_elbo() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    elbo = dcpp.ELBO(network(), dcpp.categorical, len(X))
    plan = dcpp.SparsityPlan(elbo, 100, price=1.0)
    bound, optimizer = fabric.setup(elbo, torch.optim.Adam(elbo.parameters(), lr=1e-2))
    batches = fabric.setup_dataloaders(loader())
    losses = []
    for _ in range(25):
        for x, y in batches:
            terms = bound(x, target=y)
            optimizer.zero_grad()
            fabric.backward(terms.loss)
            optimizer.step()
            plan.step()
            losses.append(terms.log_likelihood.item() / len(X))
    assert losses[-1] > -0.3 > losses[0]
    assert plan.phase == "fixed"


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="give its warmup in plan_options"):
        DropConnectCallback(0.1, kl_warmup=0.5)
    with pytest.raises(ArgumentError, match="kl_warmup must be a share"):
        DropConnectCallback(kl_warmup=3)
    with pytest.raises(ArgumentError, match="histograms_every must be a whole number"):
        DropConnectCallback(histograms_every=0)
    with pytest.raises(ArgumentError, match="schedule must be one of"):
        DropConnectModule(network(), dcpp.categorical, 3, schedule="linear")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="give the Trainer max_epochs or max_steps"):
        trainer(tmp_path, DropConnectCallback(0.1), max_epochs=-1).fit(module(), loader())
    without = module()
    without.elbo = nn.ModuleList()
    with pytest.raises(ArgumentError, match="needs one ELBO in the LightningModule, and DropConnectModule has 0"):
        trainer(tmp_path, DropConnectCallback()).fit(without, loader())
