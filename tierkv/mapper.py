"""Maps the pool in a worker process, in the background."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Protocol

from tierkv.errors import PoolError
from tierkv.pool import MapperLock, Pool, attach_pool, make_private
from tierkv.types import EngineId

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.02


class Adopter(Protocol):
    """Who wants to know of mappings; see `tierkv.device.base.PoolAdopter`."""

    def adopt(self, address: int, size: int, stop: threading.Event) -> None:
        """A mapping is there."""

    def abandon(self, address: int, size: int) -> None:
        """A mapping is about to go."""


class PoolMapper:
    """Maps the pool in the background, so that no engine step pays for it.

    The file may appear late, or be replaced by a daemon with another capacity; the mapper looks
    until it has the right one. One thread, which ends after each success.

    Args:
        adopter: is shown each mapping, after it can be used; None: nobody needs to know.
    """

    def __init__(
        self,
        path: Path,
        run_directory: Path,
        engine: EngineId,
        adopter: Adopter | None = None,
    ) -> None:
        self._adopter = adopter
        self._path = path
        self._run_directory = run_directory
        self._engine = engine
        self._lock: MapperLock | None = None
        self._pool: Pool | None = None
        self._mapped: list[Pool] = []  # kept, because queued copies know raw addresses only
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._look()

    def get(self, path: str, generation: int) -> Pool | None:
        """The mapping of this pool in this generation, or None if it is not there yet.

        Never blocks; a None starts another look in the background.
        """
        pool = self._pool
        if pool is not None and str(pool.path) == path and pool.generation == generation:
            return pool
        is_looking = self._thread is not None and self._thread.is_alive()
        is_useless = pool is None or not pool.is_current or str(pool.path) != path
        if is_useless and not is_looking:
            self._path = Path(path)
            self._look()
        return None

    def note_copies(self, copies: int) -> None:
        """Say how many copies are in flight; before `get`, and again when they ended."""
        if self._lock is not None:
            self._lock.note_copies(copies)

    def close(self) -> None:
        """Stop looking and give up the lock. Copies must have ended."""
        self._stop.set()
        # The garbage collector may close us in any thread, so in this one, too.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._pool = None
        for pool in self._mapped:
            if self._adopter is not None:
                self._adopter.abandon(pool.address, pool.capacity)
            pool.close()
        self._mapped.clear()
        if self._lock is not None:
            self._lock.release()

    def _look(self) -> None:
        self._thread = threading.Thread(target=self._attach, name="tierkv-map", daemon=True)
        self._thread.start()

    def _attach(self) -> None:
        while not self._stop.wait(LOOK_PERIOD_S):
            if not self._path.exists():
                continue
            try:
                if self._lock is None:
                    make_private(self._run_directory)
                    self._lock = MapperLock(self._run_directory, self._engine)
                    self._lock.note_copies(0)
                pool = attach_pool(self._path)
            except (PoolError, OSError) as error:
                logger.debug("pool not attached yet: %s", error)
                continue
            self._mapped.append(pool)
            self._pool = pool  # usable now; a page that is not there yet comes on first use
            logger.info("pool mapped: path=%s generation=%d", pool.path, pool.generation)
            pool.prefault(self._stop)
            if self._adopter is not None:
                self._adopter.adopt(pool.address, pool.capacity, self._stop)
            return
