"""Sizes, durations and shares as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_SIZES = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 1 << 10,
    "m": 10**6, "mb": 10**6, "mib": 1 << 20,
    "g": 10**9, "gb": 10**9, "gib": 1 << 30,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_DURATIONS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0,
}  # fmt: skip


def _split(text: str) -> tuple[float, str] | None:
    match = re.fullmatch(r"\s*([0-9]{1,24}(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*", text)
    return (float(match[1]), match[2].lower()) if match else None


def _plain(value: float) -> str:
    """The exact number without an exponent."""
    return format(Decimal(repr(value)), "f")


def parse_size(value: object) -> object:
    """Bytes from ``64GiB``, ``500MB`` or a number; other values pass through unchanged.

    Raises:
        ValueError: text that is no size.
    """
    if isinstance(value, bool):
        raise ValueError("is no size; write for example 64GiB or 512MiB")
    if not isinstance(value, str) or value == "auto":
        return value
    parts = _split(value)
    if parts is None or parts[1] not in _SIZES:
        raise ValueError("is no size; write for example 64GiB or 512MiB")
    return int(parts[0] * _SIZES[parts[1]])


def parse_duration(value: object) -> object:
    """Seconds from ``500ms``, ``30s``, ``5min`` or a number of seconds.

    Raises:
        ValueError: text that is no duration.
    """
    if not isinstance(value, str):
        return value
    parts = _split(value)
    if parts is None or parts[1] not in _DURATIONS:
        raise ValueError("is no duration; write for example 500ms, 30s or 7d")
    return parts[0] * _DURATIONS[parts[1]]


def parse_share(value: object) -> object:
    """A share between 0 and 1 from ``15%`` or a number.

    Raises:
        ValueError: text that is no share.
    """
    if not isinstance(value, str):
        return value
    parts = _split(value)
    if parts is None or parts[1] not in {"", "%"}:
        raise ValueError("is no share; write for example 15% or 0.15")
    return parts[0] / 100 if parts[1] == "%" else parts[0]


def format_size(value: int | str) -> str:
    """The shortest exact binary form: ``67108864`` becomes ``64MiB``."""
    if isinstance(value, str):
        return value
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value and value % scale == 0:
            return f"{value // scale}{unit}"
    return str(value)


def approximate_size(value: float) -> str:
    """A size for people to read: ``1.4 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(value: float | str) -> str:
    """``0.05`` becomes ``50ms``."""
    if isinstance(value, str):
        return value
    milliseconds = round(value * 1000, 6)
    if 0 < value < 1 and milliseconds == int(milliseconds) and milliseconds / 1000 == value:
        return f"{int(milliseconds)}ms"
    return f"{int(value)}s" if value == int(value) else f"{_plain(value)}s"


def format_share(value: float) -> str:
    """``0.15`` becomes ``15%``; what has no short percentage stays a number."""
    percent = round(value * 100, 6)
    return f"{percent:g}%" if percent / 100 == value and percent >= 0.01 else _plain(value)
