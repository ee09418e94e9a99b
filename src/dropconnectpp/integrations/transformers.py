"""Hugging Face: a Trainer that maximises the ELBO, folders that keep the gates, likelihoods of model outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dropconnectpp.errors import ArgumentError, FileFormatError, MissingPackageError
from dropconnectpp.inference.divergence import kl_divergence
from dropconnectpp.inference.elbo import ELBO
from dropconnectpp.inference.parameter_groups import parameter_groups
from dropconnectpp.inference.plan import SparsityPlan
from dropconnectpp.integrations.model_outputs import likelihood_of, next_tokens, spans, tokens
from dropconnectpp.integrations.pretrained import FILE, from_pretrained, push_to_hub, save_pretrained
from dropconnectpp.io import load, save
from dropconnectpp.likelihoods import LogLikelihood

try:
    from transformers import PreTrainedModel, Trainer, TrainerCallback
except ImportError as error:
    raise MissingPackageError(
        "dropconnectpp.integrations.transformers needs transformers and accelerate: "
        "pip install 'dropconnectpp[transformers]'."
    ) from error

__all__ = [
    "DropConnectMixin",
    "DropConnectTrainer",
    "from_pretrained",
    "likelihood_of",
    "next_tokens",
    "push_to_hub",
    "save_pretrained",
    "spans",
    "tokens",
]

STATE = "dropconnectpp_training.pt"
"""What resuming needs beside Trainer's own files: the estimators' moments, and the plan."""
TRAVEL = 10.0
"""How far a log-odds could go in a training at a step size that does not fall."""


class DropConnectMixin:
    """For a subclass of Trainer: ``class MyTrainer(DropConnectMixin, Seq2SeqTrainer)``.

    The loss is that of `ELBO`: the KL counts once for the training set, whatever the batch, the accumulation and the
    number of processes. Evaluation reports -log p per example of the mean network, in nats. Checkpoints are folders of
    `save_pretrained` and hold the estimators' moments and the plan, so that a resumed training goes on exactly.
    ``max_grad_norm`` is that of the weights; the posterior's gradient is not clipped.

    Args:
        likelihood: (output, target) -> (B,) in nats; None: what goes with the model's head, see `likelihood_of`.
        num_data: Examples in the training set; None: ``len(train_dataset)``.
        keep: The share of weights that a `SparsityPlan` ends with; None: no plan.
        plan_options: Further options of the plan, such as ``{"warmup": 0.2}``; with ``price`` in place of ``keep``.
        kl_warmup: The share of steps over which the KL rises to its full weight, without a plan.
        logit_lr: The posterior's step size; None: as large as the number of steps needs.

    Raises:
        ArgumentError: FSDP, DeepSpeed, nn.DataParallel or a loss of another kind was asked for, or ``num_data`` is not
            known.
    """

    model: Any
    args: Any
    state: Any
    optimizer: Any
    accelerator: Any
    processing_class: Any
    label_names: list[str]
    train_dataset: Any

    def __init__(
        self,
        *arguments: Any,
        likelihood: LogLikelihood | None = None,
        num_data: int | None = None,
        keep: float | None = None,
        plan_options: dict[str, Any] | None = None,
        kl_warmup: float = 0.0,
        logit_lr: float | None = None,
        **options: Any,
    ) -> None:
        self._likelihood, self._num_data, self._logit_lr = likelihood, num_data, logit_lr
        planned = {} if keep is None else {"keep": keep}
        self._plan_options = planned | (plan_options or {})
        if not 0.0 <= kl_warmup <= 1.0:
            raise ArgumentError(f"kl_warmup must be a share of the steps between 0 and 1, got {kl_warmup!r}.")
        if self._plan_options and kl_warmup:
            raise ArgumentError("a plan raises the KL itself: give its warmup in plan_options, and no kl_warmup.")
        self._kl_warmup = kl_warmup
        self._elbo: ELBO | None = None
        self._bound: nn.Module | None = None
        self.plan: SparsityPlan | None = None
        super().__init__(*arguments, **options)
        self._check_setting()
        self.model_accepts_loss_kwargs = False  # the loss is a mean over examples; Trainer averages accumulated ones
        self.loss_is_scaled_for_ga = False
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    def _check_setting(self) -> None:
        other: Any = self
        reasons = {
            "FSDP": other.is_fsdp_enabled,
            "DeepSpeed": other.is_deepspeed_enabled,
            "nn.DataParallel (start one process for each GPU by torchrun)": self.args.n_gpu > 1,
            "label_smoothing_factor (use likelihood=categorical.smoothed(...))": self.args.label_smoothing_factor,
            "compute_loss_func (use likelihood=...)": other.compute_loss_func is not None,
        }
        for name, wanted in reasons.items():
            if wanted:
                raise ArgumentError(f"DropConnectMixin does not work with {name}.")

    @property
    def elbo(self) -> ELBO:
        """The bound that is maximised."""
        if self._elbo is None or self._elbo.model is not self.model:
            likelihood = self._likelihood or likelihood_of(self.model)
            compiled = bool(self.args.torch_compile)
            self._elbo = ELBO(self.model, likelihood, self._examples(), check_finite=not compiled)
            self._bound = self.plan = None
        return self._elbo

    def _examples(self) -> int:
        if self._num_data is not None:
            return self._num_data
        if not hasattr(self.train_dataset, "__len__"):
            raise ArgumentError("the training set does not say how many examples it has: give num_data.")
        return len(self.train_dataset)

    # -------------------------------------------------------------------------------------- the loss

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """In training the ELBO is what is wrapped: gradients of its KL are averaged over processes as well."""
        if not training:
            evaluated: nn.Module = super()._wrap_model(model, training, dataloader)  # type: ignore[misc]
            return evaluated
        elbo = self.elbo
        if self._bound is None:
            self._bound = self.accelerator.prepare_model(elbo)
        assert self._bound is not None
        return self._bound

    def compute_loss_context_manager(self) -> Any:
        """Autocast for evaluation too, where the model is not the one that accelerate has prepared."""
        stack = super().compute_loss_context_manager()  # type: ignore[misc]
        stack.enter_context(self.accelerator.autocast())
        return stack

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """-ELBO per example in training, -log p per example of the mean network in evaluation."""
        inputs, target = self._split(inputs)
        if model is self._bound:
            self._set_kl_weight()
            terms = model(target=target, **inputs)
            return (terms.loss, terms.output) if return_outputs else terms.loss
        outputs = model(**inputs)
        loss = -self.elbo.log_likelihood(outputs, target).mean()
        return (loss, outputs) if return_outputs else loss

    def _split(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """What the model is called with, and the target."""
        missing = [name for name in self.label_names if name not in inputs]
        if missing:
            raise ArgumentError(f"a batch has no {', '.join(missing)}: it holds {', '.join(inputs)}.")
        config = getattr(self.model, "config", None)
        targets = [inputs[name] for name in self.label_names]
        if len(targets) == 1 and getattr(config, "num_labels", None) == 1 and targets[0].is_floating_point():
            targets[0] = targets[0].view(-1, 1)  # as the logits are
        if not getattr(config, "is_encoder_decoder", False):  # whose decoder reads the labels
            inputs = {name: value for name, value in inputs.items() if name not in self.label_names}
        return inputs, targets[0] if len(targets) == 1 else tuple(targets)

    def _set_kl_weight(self) -> None:
        if self._kl_warmup:
            rise = self._kl_warmup * self.state.max_steps
            self.elbo.kl_weight = min(1.0, (self.state.global_step + 1) / max(rise, 1.0))

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Trainer's logs, with the KL in nats, its weight, and the share of weights kept."""
        if "loss" in logs and self._elbo is not None:
            logs = {**logs, "kl": self._kl(), "kl_weight": self.elbo.kl_weight}
            if self.plan is not None:
                logs["share_kept"] = self.plan.share_kept
        super().log(logs, *arguments, **options)  # type: ignore[misc]

    @torch.no_grad()
    def _kl(self) -> float:
        return float(kl_divergence(self.model))

    # ------------------------------------------------------------------------------------- the steps

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Trainer's optimiser; the posterior has a step size of its own, and no weight decay."""
        own = self.optimizer is None
        optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if own:
            logit_lr = self._logit_lr or TRAVEL / max(1, self.state.max_steps)
            groups = parameter_groups(self.elbo, self.args.learning_rate, logit_lr=logit_lr)
            apart = [{**group, "lr": logit_lr} for group in groups if group["name"] != "weights"]
            taken = {id(parameter) for group in apart for parameter in group["params"]}
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]
            for group in apart:
                optimizer.add_param_group({key: value for key, value in group.items() if key != "name"})
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Of the weights alone: the KL's gradient may be a thousand times as large, and would clip theirs away."""
        groups = parameter_groups(self.elbo, self.args.learning_rate)
        weights = [parameter for group in groups if group["name"] == "weights" for parameter in group["params"]]
        return self.accelerator.clip_grad_norm_(weights, self.args.max_grad_norm)

    def _make_plan(self, steps: int) -> None:
        if self._plan_options and self.plan is None:
            self.plan = SparsityPlan(self.elbo, steps, **self._plan_options)
        if self.plan is not None and self.plan.schedule.steps != steps and self.plan.steps_done < steps:
            raise ArgumentError(
                f"the plan is one of {self.plan.schedule.steps} steps, and this training has {steps}. "
                "Resume with the number of epochs, the batch size and the accumulation that it began with."
            )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """A model whose connections are not chosen yet is no candidate."""
        if self.plan is not None and self.plan.phase != "fixed":
            return False
        return bool(super()._determine_best_metric(metrics, trial))  # type: ignore[misc]

    # ----------------------------------------------------------------------------------- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if not self.args.should_save:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, PreTrainedModel):
            save_pretrained(self.model, folder)
        else:
            save(self.model, folder / FILE)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.args.should_save:
            own = {key: value for key, value in self.elbo.state_dict().items() if not key.startswith("model.")}
            plan = None if self.plan is None else self.plan.state_dict()
            torch.save({"elbo": own, "plan": plan, "steps": self.state.max_steps}, Path(output_dir) / STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The model; the plan is made first, since it wants connections to choose from."""
        if self._plan_options:
            self._make_plan(int(_training_state(resume_from_checkpoint)["steps"]))
        load(Path(resume_from_checkpoint) / FILE, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        known = _training_state(checkpoint)
        problems = self.elbo.load_state_dict(known["elbo"], strict=False)
        lacking = [key for key in problems.missing_keys if not key.startswith("model.")]
        if problems.unexpected_keys or lacking:
            raise FileFormatError(
                f"{checkpoint}: the estimators' moments are those of another model: "
                f"{', '.join([*problems.unexpected_keys, *lacking])[:200]}. Convert with the options of that training."
            )
        if known["plan"] is not None and self.plan is not None:
            self.plan.load_state_dict(known["plan"])

    def _load_best_model(self) -> None:
        load(Path(self.state.best_model_checkpoint) / FILE, self.model)


class DropConnectTrainer(DropConnectMixin, Trainer):  # type: ignore[misc]
    """Trainer for a converted model; `DropConnectMixin` says what it does and takes."""


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Steps the plan after the optimiser."""

    def __init__(self, trainer: DropConnectMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.trainer._make_plan(state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self.trainer.plan is not None:
            self.trainer.plan.step()


def _training_state(folder: str) -> dict[str, Any]:
    path = Path(folder) / STATE
    if not path.is_file():
        raise FileFormatError(f"{path}: is not there, so this training cannot be resumed. Was save_only_model set?")
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
