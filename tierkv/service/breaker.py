"""When to stop asking: a circuit breaker. Pure; time is an argument."""

from __future__ import annotations

from collections import deque

FAILURES_IN_A_ROW_MAX = 3
WINDOW = 100
FAILURE_SHARE_MAX = 0.1
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
SOON_S = 60.0


class Breaker:
    """Opens after 3 failures in a row or 10 % of the last 100; one trial at growing intervals."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._in_a_row = 0
        self._retry_s = RETRY_FIRST_S
        self._retry_at = 0.0
        self._closed_at = float("-inf")
        self.is_open = False

    def note(self, is_ok: bool, now: float) -> None:
        """Note the end of one request."""
        self._recent.append(is_ok)
        self._in_a_row = 0 if is_ok else self._in_a_row + 1
        failures = self._recent.count(False)
        is_bad = len(self._recent) == WINDOW and failures > WINDOW * FAILURE_SHARE_MAX
        if not self.is_open and (self._in_a_row >= FAILURES_IN_A_ROW_MAX or is_bad):
            self.is_open = True
            is_again = now - self._closed_at < SOON_S
            self._retry_s = min(self._retry_s * 2, RETRY_MAX_S) if is_again else RETRY_FIRST_S
            self._retry_at = now + self._retry_s

    def may_try(self, now: float) -> bool:
        """Whether an open breaker should send one trial now; the interval doubles each time."""
        if not self.is_open or now < self._retry_at:
            return False
        self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)
        self._retry_at = now + self._retry_s
        return True

    def close(self, now: float) -> None:
        """The other side answers again. If it soon fails again, trials become rarer."""
        if self.is_open:
            self._closed_at = now
        self.is_open = False
        self._in_a_row = 0
        self._recent.clear()
