"""Likelihoods for the outputs of language models: tokens, spans of answers, and which one a model is trained with.

Shapes: B batch, T positions, C classes or words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ShapeError
from dropconnectpp.likelihoods import LogLikelihood, bernoulli, categorical, gaussian, tensor_of
from dropconnectpp.likelihoods.outputs import wide

IGNORED = -100
"""The target of a position that does not count, as in torch's cross-entropy and in Hugging Face's collators."""


@dataclass(frozen=True)
class Tokens:
    """A class for each position: output (B, T, C) holds logits, target (B, T) class numbers, or -100 where none counts.

    An example is a sequence: its log-likelihood is the sum over its positions. With ``shifted`` a position's logits are
    those of the next one's token, as in language models that read from left to right.
    """

    shifted: bool = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return self.log_prob(tensor_of(output), target)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-probability (B,) of the tokens that count."""
        if output.ndim != 3 or target.shape != output.shape[:2]:
            raise ShapeError(
                "tokens need logits of shape (B, T, C) and class numbers of shape (B, T), "
                f"got {tuple(output.shape)} and {tuple(target.shape)}."
            )
        if self.shifted:
            output, target = output[:, :-1], target[:, 1:]
        losses = F.cross_entropy(wide(output).mT, target.long(), ignore_index=IGNORED, reduction="none")
        return -losses.sum(1)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities (B, T, C) of the classes at each position."""
        return torch.softmax(wide(output), -1)

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropy at each position, (B, T)."""
        entropy: Tensor = torch.special.entr(mean).sum(-1)
        return entropy


@dataclass(frozen=True)
class Spans:
    """Where an answer begins and ends: outputs with ``start_logits`` and ``end_logits`` (B, T), a target for each (B,).

    A place beyond the text counts for nothing: the answer was cut off.
    """

    def __call__(self, output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
        parts = (output.start_logits, output.end_logits)
        found = torch.zeros((), device=parts[0].device)
        for logits, places in zip(parts, target, strict=True):
            inside = torch.where((places >= 0) & (places < logits.shape[1]), places.long(), IGNORED)
            found = found - F.cross_entropy(wide(logits), inside, ignore_index=IGNORED, reduction="none")
        return found


tokens = Tokens()
next_tokens = Tokens(shifted=True)
spans = Spans()

_BY_TASK: tuple[tuple[tuple[str, ...], LogLikelihood], ...] = (
    (("ForCausalLM", "LMHeadModel"), next_tokens),
    (("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"), tokens),
    (("ForQuestionAnswering",), spans),
    (("ForMultipleChoice", "ForNextSentencePrediction"), categorical),
)


def likelihood_of(model: nn.Module) -> LogLikelihood:
    """The likelihood that goes with a Hugging Face model's head and the labels it is trained with.

    Args:
        model: One of `transformers`' models for a task.

    Returns:
        `categorical`, `dropconnectpp.bernoulli` for several labels at once, normal noise of a learned scale for real
        values, `tokens`, `next_tokens` or `spans`.

    Raises:
        ArgumentError: The task is not known; give a likelihood.
    """
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    name, config = type(inner).__name__, getattr(inner, "config", None)
    for endings, likelihood in _BY_TASK:
        if name.endswith(endings):
            return likelihood
    if config is not None and name.endswith("Classification"):
        if config.problem_type == "multi_label_classification":
            return bernoulli
        if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
            return gaussian(outputs=config.num_labels)
        return categorical
    raise ArgumentError(
        f"no likelihood is known for a {name}. Give likelihood=..., a function (output, target) -> (B,) in nats; ready "
        "made: dropconnectpp.categorical, bernoulli, gaussian(), and tokens, next_tokens, spans of this module."
    )
