"""Numbers as people read them: units chosen by magnitude, at most 4 significant digits, a dash for undefined.

Only what is shown passes through here; what is computed, compared or exported stays in integer nanoseconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

DASH = "–"
"""What stands for an undefined number: never 0, never an empty cell."""

DIGITS = 4

_TIME = ((1, "ns"), (10**3, "µs"), (10**6, "ms"), (10**9, "s"))
_BYTES = ((1, "B"), (10**3, "kB"), (10**6, "MB"), (10**9, "GB"), (10**12, "TB"))
_COUNT = ((1, ""), (10**3, "k"), (10**6, "M"), (10**9, "G"), (10**12, "T"))


def undefined(value: object) -> bool:
    """Whether `value` is None, NaN or infinite: shown as a dash, written as null."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def significant(value: float, digits: int = DIGITS) -> str:
    """`value` with at most `digits` significant digits, no exponent, no trailing zeros: 0.5, 12.35, 123500."""
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(float(value), decimals)
    text = f"{rounded:.{max(decimals, 0)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("", "-0") else text


def _scaled(value: float | None, units: tuple[tuple[int, str], ...]) -> str:
    if value is None or undefined(value):
        return DASH
    shown = abs(float(significant(float(value))))  # as it will read: 999 960 ns is 1 ms, not 1000 µs
    factor, unit = max(((f, u) for f, u in units if shown >= f), default=units[0])
    return f"{significant(float(value) / factor)} {unit}".rstrip()


def duration(ns: float | None) -> str:
    """A time given in ns: `41 µs`, `12.35 ms`, `1.204 s`; a dash for None and NaN."""
    return _scaled(ns, _TIME)


def signed_duration(ns: float | None) -> str:
    """A difference of times given in ns, with its sign: `+1.2 ms`, `−340 µs`, `0 ns`."""
    text = duration(ns)
    if ns is None or undefined(ns) or ns == 0:
        return text
    return f"+{text}" if ns > 0 else text.replace("-", "−", 1)


def size(n: float | None) -> str:
    """Bytes in powers of ten: `4.194 MB`."""
    return _scaled(n, _BYTES)


def count(n: float | None) -> str:
    """A plain number or rate: `310.5`, `12.5 k`."""
    return _scaled(n, _COUNT)


def counted(number: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`; `many` where more than one is not `one` with an s: ("row has", "rows have")."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def share(fraction: float | None) -> str:
    """A fraction as per cent: 0.2727 -> `27.3 %`; three significant digits, since shares are read beside each other."""
    if fraction is None or undefined(fraction):
        return DASH
    return f"{significant(float(fraction) * 100, 3)} %"


def signed_share(fraction: float | None) -> str:
    """A relative difference as per cent, with its sign: `+3.2 %`."""
    text = share(fraction)
    if fraction is None or undefined(fraction) or text == "0 %":
        return text
    return f"+{text}" if fraction > 0 else text.replace("-", "−", 1)


class Scale(NamedTuple):
    """One unit for a whole column: divide by `factor`, print `decimals`, write `unit` in the head."""

    factor: int
    unit: str
    decimals: int

    def __call__(self, ns: float | None) -> str:
        """The number alone; `0` is exactly zero, `0.00` is less than what the column shows."""
        if ns is None or undefined(ns):
            return DASH
        if ns == 0:
            return "0"
        return f"{float(ns) / self.factor:.{self.decimals}f}".replace("-", "−")


def time_scale(values: Iterable[float | None]) -> Scale:
    """The unit of a column of times in ns: by its largest value, which gets 4 significant digits."""
    largest = max((abs(float(v)) for v in values if v is not None and not undefined(v)), default=0.0)
    factor, unit = max(((f, u) for f, u in _TIME if float(significant(largest)) >= f), default=_TIME[0])
    digits = len(str(int(float(significant(largest / factor)))))
    return Scale(factor, unit, 0 if factor == 1 else max(DIGITS - digits, 0))
