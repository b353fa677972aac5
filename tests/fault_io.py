"""An I/O process whose store fails on command; for `Node(..., io_command=faulty_io(...))`.

Run as ``python -m tests.fault_io CONTROL``: the configured tier in a `FaultTier` whose control
directory is `CONTROL/<type>`. More commands than those of `FaultTier`:

- `hang-written`: a write is done in the store, and the call does not come back while the file is
  there
- `outlive`: looked at when the process starts: it does not die with its daemon, as a process does
  not whose thread hangs in the kernel. Stop it to keep it from seeing that the daemon is gone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from tierkv.service.io_process import main
from tierkv.testing import FaultTier
from tierkv.tiers import open_tier
from tierkv.tiers.base import BlockName, Outcome, Tier, TierSettings

ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1


class LiveFaultTier(FaultTier):
    """`FaultTier` with the commands above."""

    def write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        outcomes = super().write(names, views)
        self._hang("hang-written", names)
        return outcomes


def faulty_io(control: Path) -> tuple[str, ...]:
    """The command of such an I/O process."""
    # The daemon starts it in another directory than ours.
    return ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.fault_io", str(control))


def _open(settings: TierSettings) -> Tier:
    control = Path(sys.argv[1]) / settings.type
    if (control / "outlive").exists():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return LiveFaultTier(open_tier(settings), control)


if __name__ == "__main__":
    main(_open)
