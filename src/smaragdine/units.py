"""Quantities as a person reads them: SI prefixes, and no more digits than carry information."""

from __future__ import annotations

import math
from decimal import Decimal

_PREFIXES = (
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
    (1e-12, "p"),
)
J_PER_KWH = 3.6e6
_NOISE = 1e-9  # of a mean: a smaller spread comes from the arithmetic


def si(value: float | None, unit: str, digits: int = 3) -> str:
    """1234.5, "J" → "1.23 kJ". None, an absent figure, is a dash: never a zero."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return f"0 {unit}"
    if math.isinf(value):
        return f"{value} {unit}"
    # Rounding first keeps 999.96 from being printed as "1000 J" instead of "1.00 kJ".
    rounded = float(f"{value:.{digits - 1}e}")
    if abs(rounded) < _PREFIXES[-1][0]:
        return f"{rounded:.{digits - 1}e} {unit}"
    scale, prefix = next((s, p) for s, p in _PREFIXES if abs(rounded) >= s)
    scaled = rounded / scale
    whole = len(str(int(abs(scaled))))
    return f"{scaled:.{max(0, digits - whole)}f} {prefix}{unit}"


def plain(value: float, digits: int = 2) -> str:
    """A number without a unit: 0.35, 3.5, 350, never 3.5e+02."""
    return format(Decimal(f"{value:.{digits}g}"), "f")


def joules(value_j: float | None) -> str:
    return si(value_j, "J")


def watts(value_w: float | None) -> str:
    return si(value_w, "W")


def carbon_g(energy_j: float, intensity_g_per_kwh: float) -> float:
    """CO₂ of that energy, of a grid of that carbon intensity."""
    return energy_j / J_PER_KWH * intensity_g_per_kwh


def joule_seconds(value_js: float | None) -> str:
    return si(value_js, "J·s")


def seconds(value_s: float | None) -> str:
    """Short times with a prefix, long ones as h:mm:ss: nobody reads 12.3 ks."""
    if value_s is None or math.isnan(value_s):
        return "–"
    if abs(value_s) < 120:
        return si(value_s, "s")
    hours, rest = divmod(round(abs(value_s)), 3600)
    minutes, left = divmod(rest, 60)
    sign = "-" if value_s < 0 else ""
    return f"{sign}{hours}:{minutes:02d}:{left:02d}" if hours else f"{sign}{minutes}:{left:02d} min"


def plus_minus(mean: float, std: float, unit: str) -> str:
    """1234.5 ± 67.8 J → "1.23 ± 0.07 kJ": one prefix for both, and digits only as far as the spread goes."""
    if not std > _NOISE * abs(mean):
        return f"{si(mean, unit)} ± 0"
    if mean == 0 or std >= abs(mean):
        return f"{si(mean, unit)} ± {si(std, unit, 2)}"
    prefixed = si(mean, unit).partition(" ")[2]
    scale = next(s for s, p in _PREFIXES if p + unit == prefixed)
    # Two digits of a spread below 3, else one: the usual rule of the physics laboratory.
    digits = 2 if f"{std:e}"[0] in "12" else 1
    decimals = max(0, digits - 1 - math.floor(math.log10(std / scale)))
    return f"{mean / scale:.{decimals}f} ± {std / scale:.{decimals}f} {prefixed}"
