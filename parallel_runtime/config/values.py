"""What every field is asked: is it large enough, finite, one of these, a divisor. Messages name the nearest legal value."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} {value} must be at least {least}: take {least}")


def finite(configuration: object) -> None:
    """No option may be NaN or infinite: comparisons let them pass, and run.json has no words for them."""
    for name, value in vars(configuration).items():
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} {value} must be finite")


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} {value!r} is unknown: take one of {', '.join(choices)}")


def divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """`value` must divide `whole`; else the nearest divisor is named."""
    if whole % value:
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - value), n))
        raise ValueError(f"{name} {value} must divide {whole_name} {whole}: take {nearest}")
