"""Named sets of layer options, for `convert(model, preset=...)`. A new one is a new entry of `PRESETS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dropconnectpp.errors import check_choice

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": MappingProxyType(
            {
                "estimator": "bbvi",
                "hyper": "learned",
                "alpha": 1.0,
                "beta": 1.0,
                "keep_probability": 0.5,
            }
        ),
        "sparse": MappingProxyType(
            {
                "estimator": "straight-through",
                "hyper": "marginal",
                "alpha": 1.0,
                "beta": 99.0,
                "keep_probability": 0.9,
            }
        ),
        "sparse-beta10": MappingProxyType(
            {
                "estimator": "straight-through",
                "hyper": "optimal",
                "alpha": 10.0,
                "beta": 90.0,
                "keep_probability": 0.5,
                "logit_step": 100.0,
            }
        ),
        "per-example": MappingProxyType(
            {
                "estimator": "local",
                "hyper": "optimal",
                "alpha": 10.0,
                "beta": 90.0,
                "keep_probability": 0.5,
                "kl_weight": 4.0,
                "logit_step": 100.0,
            }
        ),
    }
)
"""Options of DropConnect++ layers by the name of their set; read-only.

- "paper": the paper's own setting, to repeat it.
- "sparse": few connections, with a `SparsityPlan`; how: docs/how-to/train-a-sparse-model.md.
- "sparse-beta10": a posterior to prune by, without a plan; `logit_step` needs `parameter_groups`.
- "per-example": noise for each example, to overfit less; `logit_step` needs `parameter_groups`.

"paper", "sparse-beta10" and "per-example" were measured on CIFAR-10, Fashion-MNIST and SVHN with 50 networks each.
docs/results.md has the figures; its tables call "sparse-beta10" by its former name, "sparse". The preset that has that
name now was measured with `SparsityPlan` on MNIST, 20 networks a share: docs/results/sparsity.md.
"""


def preset_options(name: str) -> dict[str, Any]:
    """The options of a preset, the caller's own to change.

    >>> preset_options("paper")["hyper"]
    'learned'
    """
    return dict(PRESETS[check_choice("preset", name, PRESETS)])
