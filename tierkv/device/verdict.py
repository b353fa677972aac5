"""Tells how copies on a stream ended, where events do not.

Rule: the Ascend runtime tells a failed asynchronous copy in a synchronisation of its stream only,
once, to whoever asks first. Events and queries say that the copy is done. So one judge per stream
is the only one who synchronises it, in a thread of its own: the thread that computes never waits.

A synchronisation does not say which copy failed, so all that are open then have failed: a block
too many is computed again, never one too few.
"""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger(__name__)


class Mark:
    """Copies of one submission, open until the judge has spoken.

    Attributes:
        kept: lives until then, whoever forgets the event of the copies.
    """

    def __init__(self) -> None:
        self.kept: list[object] = []
        self._ended = threading.Event()
        self._has_failed = False

    @property
    def is_done(self) -> bool:
        """Whether the copies ended, well or not."""
        return self._ended.is_set()

    @property
    def is_ok(self) -> bool:
        """Whether all bytes are in place."""
        return self._ended.is_set() and not self._has_failed

    def wait(self) -> None:
        """Block until the judge has spoken."""
        self._ended.wait()

    def fail(self) -> None:
        """A copy of it was refused; the others may still run."""
        self._has_failed = True

    def end(self) -> None:
        """Nothing of it runs any more. Called by the judge."""
        self.kept.clear()
        self._ended.set()


class StreamJudge:
    """The only one who synchronises a stream.

    Args:
        stream: of copies only.
        name: of the thread, which starts with the first mark.
    """

    def __init__(self, stream: torch.Stream, name: str) -> None:
        self.stream = stream
        self._name = name
        self._open: list[Mark] = []  # from before the first copy is queued until the verdict
        self._sealed: list[Mark] = []  # those of `_open` whose copies are all queued
        self._changed = threading.Condition()
        self._asking = threading.Lock()  # held while the stream is synchronised
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def open(self) -> Mark:
        """A mark for copies that are about to be queued: before, so that no failure misses it."""
        mark = Mark()
        with self._changed:
            self._open.append(mark)
        return mark

    def seal(self, mark: Mark) -> None:
        """All copies of a mark are queued; its verdict comes by itself."""
        with self._changed:
            self._sealed.append(mark)
            is_late = self._is_closing
        if is_late:
            self.judge()  # nobody else will
            return
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def judge(self) -> None:
        """Wait until the stream is idle, and speak on every sealed mark. Blocks."""
        with self._asking:
            with self._changed:
                marks = list(self._sealed)
            try:
                self.stream.synchronize()
            except RuntimeError as error:
                logger.warning("a copy failed on the device: %s", error)
                with self._changed:
                    for mark in self._open:
                        mark.fail()
            with self._changed:
                for mark in marks:
                    self._sealed.remove(mark)
                    self._open.remove(mark)
            for mark in marks:
                mark.end()

    def close(self) -> None:
        """Speak on what is sealed, and end. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        torch.accelerator.set_device_index(self.stream.device.index or 0)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sealed or self._is_closing)
                if not self._sealed:
                    return
            self.judge()
