"""How the copies of a device are made, for log and statistics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """How the copies of one device are made. Sizes in bytes.

    Attributes:
        rung: how they are made now: `cpu`, or a rung of the accelerator's ladder.
        registered, pool: how much of the mapped pool the driver knows.
        staging: pinned host memory for copies that the driver cannot make by itself.
        device_bytes: device memory taken, all of it at the start.
        problem: why the rung is not the best one; empty if nothing is wrong.
    """

    device: str = "cpu"
    rung: str = "cpu"
    registered: int = 0
    pool: int = 0
    staging: int = 0
    device_bytes: int = 0
    problem: str = ""


def facts_of(copies: object) -> CopyFacts:
    """How a copy engine makes its copies; one that does not say is a CPU's."""
    facts = getattr(copies, "facts", None)
    return facts if isinstance(facts, CopyFacts) else CopyFacts()
