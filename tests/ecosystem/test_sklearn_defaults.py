"""scikit-learn's contract with the estimators' defaults, which take minutes: in `make test-ecosystem` alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from dropconnectpp.integrations.sklearn import DropConnectClassifier, DropConnectRegressor


@pytest.mark.skipif("DROPCONNECTPP_OUTCOMES" not in os.environ, reason="make test-ecosystem checks the defaults")
@parametrize_with_checks([DropConnectClassifier(), DropConnectRegressor()])
def test_the_contract_of_scikit_learn_holds_with_the_defaults(estimator: Any, check: Any) -> None:
    check(estimator)
