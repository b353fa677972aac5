"""A tier that fails on command, so that tests show what the rest does then.

The commands are files of one directory, because the tier may live in another process than the test:

- `hang-read`, `hang-write`: the call blocks while the file is there
- `slow-read`: the call takes longer by the milliseconds in the file
- `fail-read`, `fail-write`: blocks come back FAILED, and the store sees nothing
- `full`: a write comes back FULL, and the store sees nothing
- `corrupt-read`: one byte of a read block is flipped
- `lose`: a write is OK but nothing is kept
- `unavailable`: every call raises `TierUnavailableError`

The text of a file, but for `slow-read` and `unavailable`, may hold the first hex digits of keys,
one per line: only those blocks fail, and only calls with one of them hang. Empty means all; rename
a file into place if it has text, or a call may see it while it is still empty.

Every call leaves a line of JSON in `log` when it ends: `op`, `keys` in hex, `outcomes`. A call that
begins to hang leaves one more line then, with the fault's name as `op` and no outcomes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.errors import TierUnavailableError
from tierkv.tiers.base import BlockName, Change, Outcome, Tier, TierInfo
from tierkv.types import NamespaceId

HANG_POLL_S = 0.005
UNAVAILABLE = "UNAVAILABLE"

_Call = Callable[[], list[Outcome]]


class FaultTier(Tier):
    """Passes every call on to another tier, but for the faults in its control directory.

    Args:
        inner: owned; closed with this one.
        control: created if it is not there.
    """

    def __init__(self, inner: Tier, control: Path) -> None:
        control.mkdir(parents=True, exist_ok=True)
        self._inner = inner
        self._control = control

    @property
    def info(self) -> TierInfo:
        return self._inner.info

    def probe(self, names: Sequence[BlockName]) -> list[Outcome]:
        return self._logged("probe", names, lambda: self._inner.probe(names))

    def read(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        return self._logged("read", names, lambda: self._read(names, views))

    def write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        return self._logged("write", names, lambda: self._write(names, views))

    def drop(self, names: Sequence[BlockName]) -> list[Outcome]:
        return self._logged("drop", names, lambda: self._inner.drop(names))

    def purge(self, namespace: NamespaceId | None, older_than_s: float | None) -> int:
        removed = 0

        def purge() -> list[Outcome]:
            nonlocal removed
            removed = self._inner.purge(namespace, older_than_s)
            return []

        self._logged("purge", (), purge)
        return removed

    def close(self) -> None:
        self._inner.close()

    def touch(self, names: Sequence[BlockName]) -> None:
        self._inner.touch(names)

    def scan(self) -> bool:
        return self._inner.scan()

    def take_changes(self, most: int) -> list[Change]:
        return self._inner.take_changes(most)

    def statistics(self) -> dict[str, int]:
        return self._inner.statistics()

    def check(self) -> list[str]:
        return self._inner.check()

    def _read(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        self._hang("hang-read", names)
        delay_ms = self._text("slow-read")
        if delay_ms:
            time.sleep(float(delay_ms) / 1000)  # the fault itself is lost time
        failed = self._chosen("fail-read", names)
        outcomes = _merge(self._inner.read, names, views, dict.fromkeys(failed, Outcome.FAILED))
        corrupt = self._chosen("corrupt-read", names)
        for name, view, outcome in zip(names, views, outcomes, strict=True):
            if name in corrupt and outcome is Outcome.OK:
                view[-1] ^= 0xFF
        return outcomes

    def _write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        self._hang("hang-write", names)
        settled: dict[BlockName, Outcome] = {}
        for fault, outcome in (
            ("lose", Outcome.OK),
            ("full", Outcome.FULL),
            ("fail-write", Outcome.FAILED),
        ):
            settled |= dict.fromkeys(self._chosen(fault, names), outcome)
        return _merge(self._inner.write, names, views, settled)

    def _logged(self, op: str, names: Sequence[BlockName], call: _Call) -> list[Outcome]:
        if self._text("unavailable") is not None:
            self._log(op, names, [UNAVAILABLE])
            raise TierUnavailableError(f"{self._control / 'unavailable'} is there; remove it")
        try:
            outcomes = call()
        except TierUnavailableError:
            self._log(op, names, [UNAVAILABLE])
            raise
        self._log(op, names, [outcome.name for outcome in outcomes])
        return outcomes

    def _log(self, op: str, names: Sequence[BlockName], outcomes: Sequence[str]) -> None:
        line = {"op": op, "keys": [name.key.hex() for name in names], "outcomes": list(outcomes)}
        # One write to a file opened for appending: lines of several processes do not mix.
        with (self._control / "log").open("ab", buffering=0) as log:
            log.write(json.dumps(line).encode() + b"\n")

    def _hang(self, fault: str, names: Sequence[BlockName]) -> None:
        if not self._chosen(fault, names):
            return
        self._log(fault, names, ())
        while self._chosen(fault, names):
            # Whoever commands this may be another process, which can remove a file but not wake us.
            time.sleep(HANG_POLL_S)

    def _chosen(self, fault: str, names: Sequence[BlockName]) -> set[BlockName]:
        text = self._text(fault)
        if text is None:
            return set()
        prefixes = tuple(text.split()) or ("",)
        return {name for name in names if name.key.hex().startswith(prefixes)}

    def _text(self, fault: str) -> str | None:
        try:
            return (self._control / fault).read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None


def _merge(
    call: Callable[[Sequence[BlockName], Sequence[memoryview]], list[Outcome]],
    names: Sequence[BlockName],
    views: Sequence[memoryview],
    settled: dict[BlockName, Outcome],
) -> list[Outcome]:
    """Call for the blocks whose outcome is not settled; one outcome per name, in their order."""
    pairs = [pair for pair in zip(names, views, strict=True) if pair[0] not in settled]
    called = iter(call([name for name, _ in pairs], [view for _, view in pairs]) if pairs else [])
    return [settled[name] if name in settled else next(called) for name in names]
