"""Numbers and settings as text for a reader. A value that is missing or not finite is a dash, never NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dropconnectpp.lab.report.statistics import LARGEST

DASH = "–"


def finite(value: object) -> float | None:
    """The value as a float if it is a number that can be averaged, else None.

    >>> finite(3), finite(float("nan")), finite("3"), finite(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None


def fixed(value: float | None, digits: int = 2) -> str:
    """With ``digits`` decimals, and without the sign of a negative zero.

    >>> fixed(-0.001), fixed(75.698), fixed(None)
    ('0.00', '75.70', '–')
    """
    return DASH if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def signed(value: float | None, digits: int = 2) -> str:
    """Like `fixed`, with a plus sign before positive numbers.

    >>> signed(1.25), signed(-0.5), signed(0.001)
    ('+1.25', '-0.50', '0.00')
    """
    text = fixed(value, digits)
    return f"+{text}" if value is not None and round(value, digits) > 0 else text


def significant(value: float | None, digits: int = 3) -> str:
    """With ``digits`` significant digits; suits seconds.

    >>> [significant(value) for value in (9.0, 0.01234, 9.996, 1234.5, 0.0, 1.5e-7)]
    ['9.00', '0.0123', '10.0', '1230', '0', '1.50e-07']
    """
    if value is None:
        return DASH
    if value == 0.0:
        return "0"
    text = f"{value:.{digits - 1}e}"
    exponent = int(text.split("e")[1])
    return text if exponent < -4 else f"{float(text):.{max(0, digits - 1 - exponent)}f}"


def interval(ends: Sequence[float] | None, digits: int = 2) -> str:
    """Both ends of an interval.

    >>> interval((75.1, 76.349))
    '75.10 to 76.35'
    """
    return DASH if ends is None else f"{fixed(ends[0], digits)} to {fixed(ends[1], digits)}"


def p_value(p: float | None) -> str:
    """A p value, written as in `statistics.sentence`.

    >>> p_value(0.00001), p_value(0.04)
    ('< 0.0001', '0.0400')
    """
    if p is None:
        return DASH
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def percent(share: float | None) -> str:
    """A share as a percentage.

    >>> percent(1 / 6)
    '16.7%'
    """
    return DASH if share is None else f"{100.0 * share:.1f}%"


def kept(share: float | None) -> str:
    """A share of connections as a percentage, which may be far below one percent.

    >>> kept(0.05), kept(0.0067), kept(0.019683)
    ('5%', '0.67%', '1.97%')
    """
    return DASH if share is None else f"{100.0 * share:.3g}%"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers, with runs shortened.

    >>> ranges([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9, 10'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts: list[str] = []
    for first, last in runs:
        parts += [f"{first}-{last}"] if last - first > 1 else [str(n) for n in range(first, last + 1)]
    return ", ".join(parts)


def setting(value: object) -> str:
    """A setting or a piece of evidence on one line.

    >>> setting(None), setting([True, 2]), setting(float("inf")), setting({"a": 1.5})
    ('none', 'yes, 2', 'not finite', 'a: 1.5')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else "not finite"
    if isinstance(value, list | tuple):
        return ", ".join(setting(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {setting(item)}" for name, item in value.items()) or "none"
    return str(value)
