"""Lightning: a callback for any LightningModule that has an `ELBO`, and a `DropConnectModule` for those without one."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, MissingPackageError, check_count
from dropconnectpp.inference.divergence import kl_divergence
from dropconnectpp.inference.elbo import ELBO
from dropconnectpp.inference.parameter_groups import parameter_groups
from dropconnectpp.inference.plan import SparsityPlan
from dropconnectpp.likelihoods import LogLikelihood
from dropconnectpp.posterior_summary import posterior
from dropconnectpp.prediction import predict

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingPackageError(
        "dropconnectpp.integrations.lightning needs Lightning: pip install 'dropconnectpp[lightning]'."
    ) from error

PREDICTED = ("mean", "standard_deviation", "entropy", "mutual_information")
"""What `Trainer.predict` gives of a prediction: Lightning passes on tensors in dictionaries, and no frozen object."""
TRAVEL = 10.0
"""How far a log-odds could go in a training."""


class DropConnectCallback(Callback):  # type: ignore[misc]
    """Let the KL rise or run a `SparsityPlan`, and log what is learned.

    The module has an `ELBO` as an attribute, and its loss comes from it. Logged at the trainer's ``log_every_n_steps``:
    ``kl`` in nats, ``kl_weight``, ``share_kept``; to TensorBoard a histogram of the keep probabilities of each layer.
    The plan's state is in Lightning's checkpoints, so that a resumed training goes on exactly.

    Args:
        keep: The share of weights that a plan ends with; None: no plan.
        plan_options: Further options of the plan, such as ``{"warmup": 0.2}``; with ``price`` in place of ``keep``.
        kl_warmup: The share of steps over which the KL rises to its full weight, without a plan.
        histograms_every: Steps between two histograms; None: none.

    Raises:
        ArgumentError: The options contradict each other, the module has no ELBO, or the trainer has no end.
    """

    def __init__(
        self,
        keep: float | None = None,
        *,
        plan_options: dict[str, Any] | None = None,
        kl_warmup: float = 0.0,
        histograms_every: int | None = None,
    ) -> None:
        planned = {} if keep is None else {"keep": keep}
        self._plan_options = planned | (plan_options or {})
        if not 0.0 <= kl_warmup <= 1.0:
            raise ArgumentError(f"kl_warmup must be a share of the steps between 0 and 1, got {kl_warmup!r}.")
        if self._plan_options and kl_warmup:
            raise ArgumentError("a plan raises the KL itself: give its warmup in plan_options, and no kl_warmup.")
        if histograms_every is not None:
            check_count("histograms_every", histograms_every)
        self.kl_warmup, self.histograms_every = kl_warmup, histograms_every
        self.plan: SparsityPlan | None = None
        self._saved: dict[str, Any] | None = None
        self._steps = self._done = 0

    # --------------------------------------------------------------------------------- Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the plan, before a checkpoint is read: it wants connections to choose from."""
        if stage != "fit":
            return
        elbo = _elbo_of(pl_module)
        if not self._plan_options and not self.kl_warmup:
            return
        steps = trainer.estimated_stepping_batches
        if steps in (-1, float("inf")):
            raise ArgumentError(
                "DropConnectCallback needs to know how long the training is: give the Trainer max_epochs or max_steps."
            )
        self._steps = int(steps)
        if self._plan_options and (self.plan is None or self.plan.elbo is not elbo):
            self.plan = SparsityPlan(elbo, self._steps, **self._plan_options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the weights, the optimisers' states are back as well."""
        if self._saved is not None and self.plan is not None:
            self.plan.load_state_dict(self._saved)
        self._saved = None
        self._done = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.kl_warmup:
            rise = max(1.0, self.kl_warmup * self._steps)
            _elbo_of(pl_module).kl_weight = min(1.0, (trainer.global_step + 1) / rise)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The plan steps after the optimiser, once where batches are accumulated."""
        if trainer.global_step == self._done:
            return
        self._done = trainer.global_step
        if self.plan is not None:
            self.plan.step()
        self._log(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Before gradients are clipped: the KL's may be a thousand times as large as the weights'."""
        if self.plan is not None:
            self.plan.before_step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.plan is None else {"plan": self.plan.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("plan")

    # ------------------------------------------------------------------------------------------ logging

    @torch.no_grad()
    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        elbo = _elbo_of(pl_module)
        if self._done % trainer.log_every_n_steps == 0:
            values = {"kl": kl_divergence(elbo.model), "kl_weight": elbo.kl_weight}
            if self.plan is not None:
                values["share_kept"] = self.plan.share_kept
            pl_module.log_dict(values)
        if self.histograms_every is not None and self._done % self.histograms_every == 0:
            for logger in trainer.loggers:
                writer: Any = getattr(logger, "experiment", None)
                if trainer.is_global_zero and hasattr(writer, "add_histogram"):
                    for name, layer in posterior(elbo.model).layers.items():
                        probabilities = layer.flat("keep_probability").float().cpu()
                        writer.add_histogram(f"keep_probability/{name or 'model'}", probabilities, self._done)


def _elbo_of(module: nn.Module) -> ELBO:
    found = [child for child in module.modules() if isinstance(child, ELBO)]
    if len(found) != 1:
        raise ArgumentError(
            f"DropConnectCallback needs one ELBO in the LightningModule, and {type(module).__name__} has {len(found)}. "
            "Make it in __init__, self.elbo = dropconnectpp.ELBO(model, likelihood, num_data), and let training_step "
            "return self.elbo(x, target=y).loss."
        )
    return found[0]


class DropConnectModule(LightningModule):  # type: ignore[misc]
    """A converted model as a LightningModule: batches are ``(inputs, target)``, or ``(input, ..., target)``.

    Logged are ``train_loss``, -ELBO per example, and ``val_loss`` and ``test_loss``, -log p per example of the mean
    network, in nats. `Trainer.predict` gives a dictionary for each batch, whose targets are left out: ``mean``,
    ``standard_deviation``, ``entropy`` and ``mutual_information``, as far as the likelihood has them.

    Args:
        model: A converted model.
        likelihood: (output, target) -> (B,) in nats.
        num_data: Examples in the training set.
        learning_rate: Adam's step size for the weights.
        logit_lr: The posterior's; None: as large as the number of steps needs.
        schedule: "cosine" lets the step sizes fall to 0 by the end; "constant" does not.
        num_samples: How many networks a prediction averages.
        elbo_options: Go to `ELBO`.

    >>> model = dropconnectpp.convert(torch.nn.Linear(4, 3), preset="sparse")
    >>> DropConnectModule(model, dropconnectpp.categorical, num_data=100).elbo.num_data
    100
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: LogLikelihood,
        num_data: int,
        *,
        learning_rate: float = 1e-3,
        logit_lr: float | None = None,
        schedule: Literal["cosine", "constant"] = "cosine",
        num_samples: int = 30,
        **elbo_options: Any,
    ) -> None:
        super().__init__()
        if schedule not in ("cosine", "constant"):
            raise ArgumentError(f"schedule must be one of 'cosine', 'constant'; got {schedule!r}.")
        self.elbo = ELBO(model, likelihood, num_data, **elbo_options)
        self.learning_rate, self.logit_lr, self.schedule = learning_rate, logit_lr, schedule
        self.num_samples = check_count("num_samples", num_samples)

    @property
    def model(self) -> nn.Module:
        """The converted model."""
        return self.elbo.model

    def forward(self, *inputs: Any) -> Any:
        """What the model gives, as always: in eval mode the mean network."""
        return self.model(*inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """-ELBO per example."""
        *inputs, target = batch
        loss: Tensor = self.elbo(*inputs, target=target).loss
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=len(target))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """-log p per example."""
        self._judge("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """-log p per example."""
        self._judge("test_loss", batch)

    def _judge(self, name: str, batch: Any) -> None:
        *inputs, target = batch
        loss = -self.elbo.log_likelihood(self.model(*inputs), target).mean()
        self.log(name, loss, prog_bar=True, batch_size=len(target), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """What networks drawn from the learned connectivity predict: the tensors of a `dropconnectpp.Prediction`."""
        inputs = [batch] if isinstance(batch, Tensor) else batch[:-1] if len(batch) > 1 else batch
        likelihood = self.elbo.log_likelihood
        found = predict(self.model, *inputs, num_samples=self.num_samples, likelihood=likelihood, progress=False)
        values = {name: getattr(found, name) for name in PREDICTED}
        return {name: value for name, value in values.items() if value is not None}

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        known = steps not in (-1, float("inf"))
        logit_lr = self.logit_lr or (TRAVEL / steps if known else 10.0 * self.learning_rate)
        groups = parameter_groups(self.elbo, self.learning_rate, logit_lr=logit_lr)
        for group in groups:
            if group["name"] == "noise":
                group["lr"] = logit_lr
        optimizer = torch.optim.Adam(groups)
        if self.schedule == "constant" or not known:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
