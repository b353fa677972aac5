"""How bytes get between an open file and a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# A single call moves at most this much, and says nothing about the rest (Linux; faults L7).
CALL_BYTES_MAX = 2**31 - 4096
_INTERRUPTS_MAX = 1000

Move = Callable[[int, "list[memoryview]", int], int]
"""`os.preadv`, `os.pwritev`, or what stands for them: file, buffers, offset; bytes moved."""


class Transfer(Protocol):
    """Moves whole blocks. Called from several threads at once. Files are open and stay so."""

    @property
    def is_direct(self) -> bool:
        """Whether bytes go past the page cache, for blocks whose place and length allow it."""

    def read(self, file: int, view: memoryview) -> int:
        """Fill the view from the start of a file.

        Returns:
            Bytes moved; fewer than the view has if the file or the call came to an end.
        Raises:
            OSError: the store's word, untranslated.
        """

    def write(self, file: int, view: memoryview) -> int:
        """Write the view to the start of a file. Returns and raises as `read`."""

    def close(self) -> None:
        """Give everything back. No other call is running."""


def move_all(
    move: Move, file: int, view: memoryview, step: int = 1, call_bytes_max: int = CALL_BYTES_MAX
) -> int:
    """Repeat a call until all bytes are moved, or it moves none.

    Args:
        step: every call begins at a multiple of it.
    Returns:
        Bytes moved.
    Raises:
        OSError: the call's own.
    """
    at = interrupts = 0
    while at < len(view):
        try:
            count = move(file, [view[at : at + call_bytes_max]], at)
        except InterruptedError:
            # The interpreter repeats real ones; a file system in user space may send more.
            interrupts += 1
            if interrupts > _INTERRUPTS_MAX:
                raise
            continue
        end = at + count
        if end < len(view):
            end -= end % step
        if end <= at:
            break
        at = end
    return at
