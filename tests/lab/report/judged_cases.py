"""What is stored of judged networks, made up."""

from __future__ import annotations

from typing import Any

CORRUPTIONS = ("contrast", "pixelate")


def entries(way: str, nll: float, auroc: float) -> list[dict[str, Any]]:
    """All that is judged of a replica, from two numbers."""

    def scores(worse: float) -> dict[str, float]:
        return {"accuracy": 80.0 - worse, "nll": nll + worse / 10, "ece": nll / 10 + worse / 100, "brier": nll / 2}

    found: list[dict[str, Any]] = [{"prediction": way, "images": "test", "severity": 0, **scores(0.0)}]
    foreign = {"images": "foreign", "severity": 0, "data": "svhn", "auroc": auroc, "fpr95": 1 - auroc, "entropy": 1.0}
    found.append({"prediction": way, **foreign})
    for place, name in enumerate(CORRUPTIONS):
        for severity in range(1, 6):
            found.append({"prediction": way, "images": name, "severity": severity, **scores(severity + place)})
    return found
