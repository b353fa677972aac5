"""Buffered I/O through aiofiles: no rule of alignment, any file system."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable

from aiofiles.os import wrap

from tierkv.tiers.fs.transfer import CALL_BYTES_MAX, Move, Transfer, move_all


class BufferedTransfer(Transfer):
    """Moves slots through the page cache. Blocks.

    An event loop per calling thread, because the threads of the I/O process are the tier's
    concurrency and none of them may wait for another's file.

    Args:
        read, write: what moves the bytes of one call.
    """

    def __init__(
        self,
        read: Move = os.preadv,
        write: Move = os.pwritev,
        call_bytes_max: int = CALL_BYTES_MAX,
    ) -> None:
        self._read = wrap(read)
        self._write = wrap(write)
        self._call_bytes_max = call_bytes_max
        self._local = threading.local()
        self._lock = threading.Lock()
        self._loops: list[asyncio.AbstractEventLoop] = []  # one per thread that ever called

    @property
    def is_direct(self) -> bool:
        return False

    def read(self, file: int, view: memoryview) -> int:
        loop = self._get_loop()

        def move(file: int, views: list[memoryview], at: int) -> int:
            return self._run(loop, self._read(file, views, at))

        return move_all(move, file, view, 1, self._call_bytes_max)

    def write(self, file: int, view: memoryview) -> int:
        loop = self._get_loop()

        def move(file: int, views: list[memoryview], at: int) -> int:
            return self._run(loop, self._write(file, views, at))

        return move_all(move, file, view, 1, self._call_bytes_max)

    def close(self) -> None:
        with self._lock:
            for loop in self._loops:
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()
            self._loops.clear()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop, call: Awaitable[int]) -> int:
        """Run one call.

        Raises:
            OSError: also EAGAIN, when the system lets us have no thread.
        """
        try:
            return loop.run_until_complete(call)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop | None = getattr(self._local, "loop", None)
        if loop is None:
            loop = self._local.loop = asyncio.new_event_loop()
            with self._lock:
                self._loops.append(loop)
        return loop
