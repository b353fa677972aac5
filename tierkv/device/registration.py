"""Registers the pool's mapping with the driver, piece by piece, behind a fence.

Rule 1: a piece counts as registered only after the driver has said so; until then its slots are
copied by a rung that needs no registration. A transfer that began before registration had ended
has corrupted memory in the field.
Rule 2: what was registered stays as long as the mapping; a daemon that adopts the pool changes
nothing here.
Rule 3: no copy of a piece is running, and none can be queued, when it is unregistered.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierkv.device.base import Descriptors
from tierkv.device.hooks import DeviceCallError, DeviceHooks
from tierkv.units import approximate_size

logger = logging.getLogger(__name__)

PIECE_BYTES_MAX = 64 << 30  # larger single registrations are known to fail
PIECE_BYTES_MIN = 64 << 20  # below it the rest is given up, not halved again
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class RegistrationFacts:
    """How far registration of the newest mapping came. Bytes.

    Attributes:
        problem: why the rest is not registered; empty if nothing is wrong.
    """

    registered: int
    asked: int
    problem: str = ""


class Registration:
    """Which host memory the driver knows.

    Written by the thread that registers, read by those that copy: the list of pieces is replaced,
    never changed, and under `lock`, which whoever queues a copy holds from asking `covers` until
    the copy is queued.

    Args:
        settle: waits until no copy that was queued before is running; called before anything is
            unregistered, without the lock.
    """

    def __init__(
        self,
        hooks: DeviceHooks,
        settle: Callable[[], None],
        piece_bytes: int = PIECE_BYTES_MAX,
    ) -> None:
        self.lock = threading.Lock()
        self._hooks = hooks
        self._settle = settle
        self._piece_bytes = piece_bytes
        self._pieces: tuple[tuple[int, int], ...] = ()  # (first, end), sorted, joined never
        self._newest = (0, 0)  # (first, end) of the mapping that copies go to
        self._problem = ""

    def facts(self) -> RegistrationFacts:
        """How far it came, for log and statistics."""
        first, end = self._newest
        registered = sum(e - f for f, e in self._pieces if first <= f < end)
        return RegistrationFacts(registered, end - first, self._problem)

    def register(self, address: int, size: int, stop: threading.Event) -> None:
        """Register a mapping, in pieces; blocks, so run it in the background.

        A piece that the driver refuses is tried in halves down to `PIECE_BYTES_MIN`; if that does
        not help, the mapping is left unregistered as a whole, so that all its copies are alike and
        the lockable memory is left to others.

        Args:
            address: of the mapping, aligned to `ALIGNMENT`.
            stop: ends it between two pieces.
        """
        assert address % ALIGNMENT == 0, "a mapping begins at a page"
        began = time.monotonic()
        self._newest, self._problem = (address, address + size), ""
        at, end, piece = address, address + size, self._piece_bytes
        while at < end and not stop.is_set():
            length = min(piece, end - at)
            try:
                self._hooks.register(at, length)
            except DeviceCallError as error:
                if length <= PIECE_BYTES_MIN:
                    self._problem = str(error)
                    logger.warning(
                        "host memory could be registered up to %s of %s only (%s), so none of it "
                        "is; copies are slower: see memlock, the driver's and the kernel's version",
                        approximate_size(at - address), approximate_size(size), error,
                    )  # fmt: skip
                    self._take_back(address, size)
                    return
                piece = max(PIECE_BYTES_MIN, length // 2 // PIECE_BYTES_MIN * PIECE_BYTES_MIN)
                continue
            with self.lock:
                self._pieces = tuple(sorted([*self._pieces, (at, at + length)]))
            at += length
        logger.info(
            "host memory registered: bytes=%s pieces=%d seconds=%.1f",
            approximate_size(at - address), len(self._pieces), time.monotonic() - began,
        )  # fmt: skip

    def unregister(self, address: int, size: int) -> None:
        """Take the registration of a mapping back. Blocks until no copy of it is running."""
        self._take_back(address, size)
        if self._newest == (address, address + size):
            self._newest = (0, 0)

    def _take_back(self, address: int, size: int) -> None:
        inside = [p for p in self._pieces if address <= p[0] < address + size]
        with self.lock:  # from here on nobody queues a copy of it
            self._pieces = tuple(p for p in self._pieces if p not in inside)
        self._settle()
        for first, _ in inside:
            try:
                self._hooks.unregister(first)
            except DeviceCallError as error:
                logger.warning("host memory stays registered: %s", error)

    def covers(self, copies: Descriptors) -> bool:
        """Whether every byte on the host side is registered now."""
        pieces = self._pieces
        if not pieces or len(copies) == 0:
            return len(copies) == 0
        low = int(copies.host.min())
        high = int((copies.host + copies.sizes).max())
        at = bisect.bisect_right(pieces, (low, np.inf)) - 1
        if at < 0:
            return False
        end = pieces[at][1]
        while end < high and at + 1 < len(pieces) and pieces[at + 1][0] == end:
            at += 1
            end = pieces[at][1]
        return low >= pieces[0][0] and high <= end

    def split(self, copies: Descriptors) -> Descriptors:
        """The same copies, none across the border of two pieces: a driver may refuse those."""
        borders = np.array([first for first, _ in self._pieces], np.int64)
        ends = copies.host + copies.sizes
        crossed = np.searchsorted(borders, copies.host, "right") != np.searchsorted(
            borders, ends - 1, "right"
        )
        if not crossed.any():
            return copies
        device, host, sizes = [], [], []
        for source, target, size, is_crossed in zip(
            copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist(), crossed,
            strict=True,
        ):  # fmt: skip
            cuts = [target, target + size]
            if is_crossed:
                cuts[1:1] = [b for b in borders.tolist() if target < b < target + size]
            for first, end in itertools.pairwise(cuts):
                device.append(source + first - target)
                host.append(first)
                sizes.append(end - first)
        columns = (np.array(column, np.int64) for column in (device, host, sizes))
        return Descriptors(*columns)
