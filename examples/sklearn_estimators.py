"""Learned connections in scikit-learn: a grid over the share of weights to keep, and a prediction with a deviation.

Run it with `python examples/sklearn_estimators.py`; it takes half a minute.
"""

from __future__ import annotations

from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer

from dropconnectpp.integrations.sklearn import DropConnectClassifier, DropConnectRegressor


def main() -> None:
    """Choose a share by cross-validation, then predict real values."""
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    grid = GridSearchCV(DropConnectClassifier((64,), max_iter=60, random_state=0), {"keep": [0.05, 0.2, None]}, cv=3)
    grid.fit(x, y)
    for options, score in zip(grid.cv_results_["params"], grid.cv_results_["mean_test_score"], strict=True):
        print(f"keep={options['keep']}: {score:.1%} right in cross-validation")
    best = grid.best_estimator_
    print(f"on test images {best.score(x_test, y_test):.1%}, with {1 - best.sparsity_:.0%} of the weights\n")

    x, x_test, y, y_test = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
    pipeline = make_pipeline(PowerTransformer(), DropConnectRegressor((50,), keep=0.2, random_state=0)).fit(x, y)
    mean, deviation = pipeline.predict(x_test, return_std=True)
    inside = (abs(y_test - mean) < 1.64 * deviation).mean()
    print(f"diabetes: R² {pipeline.score(x_test, y_test):.2f}; {inside:.0%} of the patients in 90% intervals")


if __name__ == "__main__":
    main()
