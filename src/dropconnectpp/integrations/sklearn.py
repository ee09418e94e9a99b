"""scikit-learn: `DropConnectClassifier` and `DropConnectRegressor`, for pipelines, grids and cross-validation."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, MissingPackageError, check_count, check_positive, check_probability
from dropconnectpp.integrations import fitting
from dropconnectpp.likelihoods import LearnedNoise, LogLikelihood, categorical, remember
from dropconnectpp.likelihoods.regression import Gaussian
from dropconnectpp.prediction import Prediction, predict

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise MissingPackageError(
        "dropconnectpp.integrations.sklearn needs scikit-learn 1.6: pip install 'dropconnectpp[sklearn]'."
    ) from error

Array = Any
"""NumPy's array, or what scikit-learn can make one of."""


class _DropConnectEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    layer_defaults: ClassVar[Mapping[str, Any]] = {
        "estimator": "straight-through",
        "alpha": 9.0,
        "beta": 1.0,
        "keep_probability": 0.9,
    }
    """A prior that drops a tenth: it costs little where examples are few, and regularises as DropConnect does."""

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        *,
        module: fitting.ModuleLike = None,
        keep: float | None = None,
        layer_options: Mapping[str, Any] | None = None,
        standardize: bool = True,
        learning_rate_init: float = 1e-3,
        max_iter: int = 200,
        batch_size: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        num_samples: int = 30,
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.module = module
        self.keep = keep
        self.layer_options = layer_options
        self.standardize = standardize
        self.learning_rate_init = learning_rate_init
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.num_samples = num_samples
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------------------- what differs

    def _targets(self, y: Array, classes: Array | None = None) -> np.ndarray[Any, Any]:
        """y as the likelihood takes it; what is learned of it is stored."""
        raise NotImplementedError

    def _likelihood(self, y: Tensor) -> tuple[LogLikelihood, int, nn.Module]:
        """The likelihood, the number of outputs, and what follows the network."""
        raise NotImplementedError

    def _read(self, X: Array, y: Array, reset: bool) -> tuple[Array, Array]:
        """X and y, checked by scikit-learn."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------ training

    def fit(self, X: Array, y: Array) -> Self:
        """Train from the start.

        Args:
            X: (n, features). It is trained in float32 if it is float32, else in float64.
            y: Classes of any kind, or real values, (n,) or (n, outputs).

        Returns:
            The estimator itself.
        """
        self._check_parameters()
        X, y = self._read(X, y, reset=True)
        random = self._random = check_random_state(self.random_state)
        target = self._targets(y)
        validation = None
        if self.early_stopping:
            stratify = target if target.ndim == 1 else None
            X, X_held_out, target, held_out = train_test_split(
                X, target, test_size=self.validation_fraction, random_state=random, stratify=stratify
            )
            validation = (self._tensor(X_held_out), self._tensor(held_out))
        x, y = self._tensor(X), self._tensor(target)
        options = fitting.FitOptions(
            learning_rate=self.learning_rate_init,
            epochs=self.max_iter,
            batch_size=self._batch_size(len(x)),
            keep=self.keep,
            patience=self.n_iter_no_change if self.early_stopping else None,
            verbose=bool(self.verbose),
        )
        with fitting.own_randomness(random.randint(2**31)):
            self._start(x, y, random)
            fitting.fit(self._fitted, x, y, options, random, validation)
        self._finish()
        return self

    def _partial_fit(self, X: Array, y: Array, classes: Array | None = None) -> Self:
        first = not hasattr(self, "_fitted")
        self._check_parameters()
        if first and self.keep is not None:
            raise ArgumentError(
                "partial_fit cannot choose connections, since it does not know how long the training will be: "
                f"got keep={self.keep!r}. Call fit first; partial_fit then trains the weights of the connections kept."
            )
        X, y = self._read(X, y, reset=first)
        target = self._targets(y, classes)
        x, y = self._tensor(X), self._tensor(target)
        if first:
            self._random = check_random_state(self.random_state)
        with fitting.own_randomness(self._random.randint(2**31)):
            if first:
                self._start(x, y, self._random)
            else:
                self._fitted.elbo.num_data += len(x)
                remember(self.module_, self._fitted.elbo.log_likelihood)  # a pickle leaves a copy there
            self._fitted.epoch(x, y, self._batch_size(len(x)), self._random)
        self._finish()
        return self

    def _start(self, x: Tensor, y: Tensor, random: np.random.RandomState) -> None:
        self._seed = int(random.randint(2**31))
        likelihood, outputs, last = self._likelihood(y)
        network = fitting.make_network(self.module, self._widths(), x.shape[1], outputs)
        network = fitting.with_gates(network, self._options())
        first = fitting.standardising(x) if self.standardize else nn.Identity()
        self.module_ = nn.Sequential()
        for name, part in (("inputs", first), ("network", network), ("outputs", last)):
            self.module_.add_module(name, part)
        self.module_.to(x.device, x.dtype)
        if isinstance(likelihood, LearnedNoise):
            likelihood = likelihood.to(x.device, x.dtype)
        self._check_outputs(x, outputs)
        self._fitted = fitting.Fitted.start(self.module_, likelihood, len(x), self.learning_rate_init)

    def _finish(self) -> None:
        self.n_iter_ = len(self._fitted.losses)
        self.loss_curve_ = list(self._fitted.losses)
        self.validation_scores_ = list(self._fitted.scores)
        self.sparsity_ = self._fitted.sparsity

    @torch.no_grad()
    def _check_outputs(self, x: Tensor, outputs: int) -> None:
        found = self.module_.eval()(x[:2])
        if tuple(found.shape) != (len(x[:2]), outputs):
            raise ArgumentError(
                f"module must give {outputs} outputs an example here, so (batch, {outputs}): "
                f"got {tuple(found.shape)} for {len(x[:2])} examples."
            )

    def _options(self) -> dict[str, Any]:
        base = self.layer_defaults if self.keep is None else {"preset": "sparse"}
        return {**base, **(self.layer_options or {})}

    # ---------------------------------------------------------------------------------- prediction

    def predict_distribution(self, X: Array) -> Prediction:
        """What `dropconnectpp.predict` says: mean, deviation, entropy, intervals, as tensors on the estimator's device.

        The networks are the same at each call, drawn from the seed of the training.
        """
        check_is_fitted(self)
        x = self._tensor(validate_data(self, X, dtype=[np.float64, np.float32], reset=False))
        x = x.to(next(self.module_.parameters()).dtype)
        generator = torch.Generator().manual_seed(self._seed)
        likelihood = self._fitted.elbo.log_likelihood
        samples = 1 if self._fitted.fixed else check_count("num_samples", self.num_samples)
        return predict(
            self.module_,
            x,
            num_samples=samples,
            likelihood=likelihood,
            generator=generator,
            progress=bool(self.verbose),
        )

    # -------------------------------------------------------------------------------------- checks

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(np.array(values, order="C")).to(self.device)

    def _batch_size(self, count: int) -> int:
        if self.batch_size == "auto":
            return min(200, count)
        return min(check_count("batch_size", self.batch_size), count)  # type: ignore[arg-type]

    def _widths(self) -> list[int]:
        given = self.hidden_layer_sizes
        widths = [given] if isinstance(given, numbers.Integral) else list(given)  # type: ignore[arg-type]
        return [check_count("hidden_layer_sizes", int(width)) for width in widths]

    def _check_parameters(self) -> None:
        self._widths()
        check_positive("learning_rate_init", self.learning_rate_init)
        check_probability("validation_fraction", self.validation_fraction)
        for name in ("max_iter", "n_iter_no_change", "num_samples"):
            check_count(name, getattr(self, name))
        if self.module is not None and not callable(self.module):
            raise ArgumentError(
                f"module must be a torch.nn.Module or a function (features, outputs) -> Module, got {self.module!r}."
            )


class DropConnectClassifier(ClassifierMixin, _DropConnectEstimator):  # type: ignore[misc]
    """A classifier whose connections are learned: fully connected layers, or any module.

    Inputs are standardised. Predictions average networks drawn from the learned connectivity; the same ones at each
    call. With ``keep`` a `SparsityPlan` fixes which connections stay, and there is one network.

    Args:
        hidden_layer_sizes: Widths of the hidden layers; ReLU between them.
        module: A network instead, which is copied; or a function (features, outputs) -> network. It gets (batch,
            features) and may begin with ``nn.Unflatten``. Its layers are converted, unless some have gates already.
        keep: The share of weights to end with; None: no connection is switched off for good.
        layer_options: Options for `dropconnectpp.convert`, such as ``{"include": ["0"]}``; they go before the defaults.
        standardize: Bring each feature to mean 0 and deviation 1.
        learning_rate_init: Adam's step size for the weights; it falls to 0 over the second half of `fit`.
        max_iter: Passes over the training set.
        batch_size: Examples of a minibatch; "auto" is 200, or all if there are fewer.
        early_stopping: End when the log-likelihood of held-out examples has not risen for ``n_iter_no_change`` passes,
            and put the best weights back. With ``keep``, not before the connections are fixed.
        validation_fraction: The share of examples held out for that.
        n_iter_no_change: See ``early_stopping``.
        num_samples: How many networks a prediction averages.
        device: Where the network is trained, such as "cuda".
        random_state: An int makes fits repeatable. torch's own generators are left as they were.
        verbose: Show a progress bar.

    Attributes:
        classes_: The classes, sorted.
        module_: The trained network, with the scaling: for `dropconnectpp.posterior`, `to_dense`, `save`.
        sparsity_: The share of weights that are off: switched off for good, or with a keep probability of at most 1/2.
        loss_curve_: -ELBO per example in nats, for each pass.
        validation_scores_: The held-out examples' mean log-likelihood in nats, for each pass of an early stopping.
        n_iter_: How many passes there were.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> model = DropConnectClassifier((50,), random_state=0).fit(x, y)
    >>> model.score(x, y) > 0.9, model.predict_proba(x).shape
    (True, (150, 3))
    """

    def partial_fit(self, X: Array, y: Array, classes: Array | None = None) -> Self:
        """One pass over these examples, as further ones of a stream: the prior counts less the more there were.

        Args:
            X: (n, features).
            y: (n,).
            classes: All classes that will come; needed at the first call, unless `fit` came before.

        Returns:
            The estimator itself.
        """
        known = getattr(self, "classes_", None)
        given = known if classes is None else np.unique(classes)
        if given is None:
            raise ArgumentError("classes must be passed on the first call to partial_fit.")
        if known is not None and not np.array_equal(known, given):
            raise ArgumentError(f"classes={classes!r} is not what it was on the first call to partial_fit: {known!r}.")
        return self._partial_fit(X, y, given)

    def predict_proba(self, X: Array) -> np.ndarray[Any, Any]:
        """Class probabilities, (n, classes)."""
        found: np.ndarray[Any, Any] = self.predict_distribution(X).mean.cpu().numpy()
        return found

    def predict(self, X: Array) -> np.ndarray[Any, Any]:
        """The most probable classes, (n,)."""
        probabilities = self.predict_proba(X)
        found: np.ndarray[Any, Any] = self.classes_[probabilities.argmax(1)]
        return found

    def _read(self, X: Array, y: Array, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=reset)
        return X, column_or_1d(y, warn=True)

    def _targets(self, y: Array, classes: Array | None = None) -> np.ndarray[Any, Any]:
        check_classification_targets(y)
        known = np.unique(y) if classes is None else classes
        if len(known) < 2:
            raise ArgumentError(f"a classifier needs two classes, and y holds one class: {known[0]!r}.")
        unknown = np.setdiff1d(y, known)
        if len(unknown):
            raise ArgumentError(f"y holds classes that were not there before: {unknown[:5]!r}. Known: {known[:20]!r}.")
        self.classes_ = known
        return np.asarray(np.searchsorted(known, y))

    def _likelihood(self, y: Tensor) -> tuple[LogLikelihood, int, nn.Module]:
        return categorical, len(self.classes_), nn.Identity()


class DropConnectRegressor(RegressorMixin, _DropConnectEstimator):  # type: ignore[misc]
    """A regressor whose connections are learned, with normal noise whose scale is learned too.

    Inputs and targets are standardised inside; predictions are in the targets' own units. The other options are those
    of `DropConnectClassifier`.

    Attributes:
        module_: The trained network, with the scaling of inputs and targets.
        noise_: The standard deviation of the noise, one for each output.
        sparsity_: The share of weights that are off: switched off for good, or with a keep probability of at most 1/2.
        loss_curve_: -ELBO per example in nats, for each pass.
        validation_scores_: The held-out examples' mean log-likelihood in nats, for each pass of an early stopping.
        n_iter_: How many passes there were.

    >>> from sklearn.datasets import load_diabetes
    >>> x, y = load_diabetes(return_X_y=True)
    >>> model = DropConnectRegressor((50,), random_state=0).fit(x[:300], y[:300])
    >>> mean, deviation = model.predict(x[300:], return_std=True)
    >>> mean.shape, deviation.shape, model.score(x[300:], y[300:]) > 0.4
    ((142,), (142,), True)
    """

    def partial_fit(self, X: Array, y: Array) -> Self:
        """One pass over these examples, as further ones of a stream: the prior counts less the more there were."""
        return self._partial_fit(X, y)

    def predict(self, X: Array, return_std: bool = False) -> Any:
        """The mean, shaped like the targets; with ``return_std`` also the standard deviation of a new value."""
        found = self.predict_distribution(X)
        parts = [found.mean, found.standard_deviation] if return_std else [found.mean]
        arrays = [part.cpu().numpy() for part in parts if part is not None]
        if self._outputs == ():
            arrays = [array[:, 0] for array in arrays]
        return tuple(arrays) if return_std else arrays[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _finish(self) -> None:
        super()._finish()
        noise: Any = self._fitted.elbo.log_likelihood
        self.noise_ = noise.scale.cpu().numpy()

    def _read(self, X: Array, y: Array, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=reset, multi_output=True, y_numeric=True)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        outputs = y.shape[1:]
        if not reset and outputs != self._outputs:
            raise ArgumentError(f"y must have outputs of shape {self._outputs}, as before, got {outputs}.")
        self._outputs: tuple[int, ...] = outputs
        return X, y.astype(X.dtype)

    def _targets(self, y: Array, classes: Array | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(y[:, None] if y.ndim == 1 else y)

    def _likelihood(self, y: Tensor) -> tuple[LogLikelihood, int, nn.Module]:
        last = fitting.standardising(y, inverse=True)
        scales = tuple(last.scale.tolist())
        return LearnedNoise(Gaussian(scales if len(scales) > 1 else scales[0]), len(scales)), y.shape[1], last
