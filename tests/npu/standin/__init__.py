"""What tests may ask and order of the stand-in for the Ascend runtime.

The library itself is C++, beside this file; `make test-npu` builds it and lets the real torch_npu
run on it. This module needs neither torch nor torch_npu.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from enum import IntEnum

LIBRARY = "libascendcl.so"


class Way(IntEnum):
    """Which way the bytes of a copy go; work of operators counts as `ON_DEVICE`."""

    TO_DEVICE = 0
    TO_HOST = 1
    ON_DEVICE = 2


REGISTRATIONS = 3  # a gate like those of the ways
ANY = -1  # of the ways


class Code(IntEnum):
    """Error codes of the Ascend runtime that the stand-in gives; see rt_error_codes.h."""

    OK = 0
    BAD_ARGUMENTS = 100000  # found before the runtime proper is asked
    INVALID = 107000  # addresses, sizes, places or flags
    NO_CONTEXT = 107002  # this thread has not set a device
    CAPTURING = 107030
    NOT_SUPPORTED = 207000
    NO_MEMORY = 207001
    DMA_FAILED = 507013
    SYNC_TIMEOUT = 507046
    DRIVER_FAILED = 507899
    ALREADY_REGISTERED = 507910
    NOT_REGISTERED = 507911


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What has happened since the last reset, and, from `device_bytes_in_use` on, what is now."""

    async_copies: int
    batch_copies: int
    descriptors: int
    blocking_copies: int
    copies_to_device: int
    copies_to_host: int
    copies_on_device: int
    bytes_to_device: int
    bytes_to_host: int
    failed_copies: int
    stream_synchronizations: int
    event_synchronizations: int
    device_synchronizations: int
    main_thread_waits: int
    registrations: int
    unregistrations: int
    refused_registrations: int
    violations: int
    device_allocations: int
    device_bytes_in_use: int
    host_bytes_in_use: int
    registered_ranges: int
    registered_bytes: int
    waiting_at_gates: int
    waiting_for_events: int
    waiting_for_streams: int

    @property
    def host_waits(self) -> int:
        """Calls in which the host waited for the device, or would have if it had been busy.

        `main_thread_waits` are those that the main thread of the process made.
        """
        return (
            self.stream_synchronizations
            + self.event_synchronizations
            + self.device_synchronizations
            + self.blocking_copies
        )

    def since(self, before: Counts) -> dict[str, int]:
        """What differs from earlier counts, by name."""
        names = [field.name for field in dataclasses.fields(self)]
        changes = {name: getattr(self, name) - getattr(before, name) for name in names}
        return {name: change for name, change in changes.items() if change}


class StandIn:
    """The stand-in of this process: what torch_npu calls is what this changes and counts."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        number, text, stream = ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p
        code = ctypes.c_int
        self._declare("standin_set", code, text, number)
        self._declare("standin_count", number, text)
        self._declare("standin_last_violation", text)
        self._declare("standin_reset", None)
        self._declare("standin_fail_submissions", None, code, number, number, code)
        self._declare("standin_fail_copies", None, code, number, number, code)
        self._declare("standin_fail_registrations", None, number, number, code)
        self._declare("standin_close_gate", None, code)
        self._declare("standin_open_gate", None, code)
        self._declare("standin_let_pass", None, code, number)
        self._declare("standin_close_stream", None, stream)
        self._declare("standin_open_stream", None, stream)
        self._declare("standin_set_driver_version", None, text)
        self._declare("standin_set_runtime_version", None, text)

    def _declare(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self.library, name)
        function.restype = result
        function.argtypes = arguments

    # ---- questions ----

    def counts(self) -> Counts:
        """All counters now."""
        names = [field.name for field in dataclasses.fields(Counts)]
        found = {name: self.library.standin_count(name.encode()) for name in names}
        unknown = [name for name in names if found[name] < 0]
        assert not unknown, f"the library has no counters {unknown}"
        return Counts(**found)

    @property
    def last_violation(self) -> str:
        return self.library.standin_last_violation().decode()

    # ---- orders ----

    def reset(self) -> None:
        """Open all gates, let all streams end, and forget settings, failures and counters.

        Memory and registrations stay.
        """
        self.library.standin_reset()

    def set(self, **settings: int) -> None:
        """Change settings until the next reset; 0 is "none" for each limit and delay.

        latency_to_device_us, latency_to_host_us, latency_on_device_us: of each single copy.
        bytes_per_us_to_device, bytes_per_us_to_host, bytes_per_us_on_device: bandwidth.
        device_bytes: memory of each device, 4 GiB at first.
        batch_is_supported: 1; with 0 a batch is answered with `Code.NOT_SUPPORTED`.
        batch_descriptors_max: per call.
        batch_reads_late: 1 if the lists of a batch are read when it runs, not in the call.
        register_is_supported: 1; 0 is a kernel that cannot pin the memory of others.
        register_call_max, register_total_max: bytes of one registration, of all together.
        register_delay_us: what a registration takes.
        errors_show_in_queries: 1 if failed copies show in queries and event waits, too.
        graph_is_captured: 1 as if some thread captured a graph: registrations and blocking copies
            of threads whose mode is not "relaxed" are refused, and are violations.
        """
        for name, value in settings.items():
            known = self.library.standin_set(name.encode(), value) == 0
            assert known, f"the library has no setting {name}"

    def fail_submissions(
        self, times: int = 1, after: int = 0, way: int = ANY, code: Code = Code.DRIVER_FAILED
    ) -> None:
        """The next copies are refused when they are handed to a stream, `after` others.

        Each copy of a batch counts. Those before the refused one are on their way. A refusal of
        what torch_npu itself queues ends its queue: torch_npu is of no use afterwards.
        """
        self.library.standin_fail_submissions(way, after, times, code)

    def fail_copies(
        self, times: int = 1, after: int = 0, way: int = ANY, code: Code = Code.DMA_FAILED
    ) -> None:
        """The next copies that run, `after` others, move nothing.

        A blocking call returns the code. A stream goes on, and its next synchronisation tells,
        once; events and queries do not.
        """
        self.library.standin_fail_copies(way, after, times, code)

    def fail_registrations(
        self, times: int = 1, after: int = 0, code: Code = Code.DRIVER_FAILED
    ) -> None:
        """The next registrations fail, `after` others."""
        self.library.standin_fail_registrations(after, times, code)

    def set_driver_version(self, version: str) -> None:
        """torch_npu asks once, at its first use of host memory: call this before.

        For a process of its own, the variables STANDIN_DRIVER_VERSION and STANDIN_RUNTIME_VERSION
        do the same.
        """
        self.library.standin_set_driver_version(version.encode())

    def set_runtime_version(self, version: str) -> None:
        """See `set_driver_version`."""
        self.library.standin_set_runtime_version(version.encode())

    # ---- gates: what a stream is to do is held until a test lets it go on ----

    def close_gate(self, which: int) -> None:
        """Hold all copies of a way, in all streams, or all registrations."""
        self.library.standin_close_gate(which)

    def open_gate(self, which: int) -> None:
        self.library.standin_open_gate(which)

    def let_pass(self, which: int, how_many: int = 1) -> None:
        """Let some through a closed gate."""
        self.library.standin_let_pass(which, how_many)

    @contextlib.contextmanager
    def held(self, which: int) -> Iterator[None]:
        """The gate is closed inside this block."""
        self.close_gate(which)
        try:
            yield
        finally:
            self.open_gate(which)

    @contextlib.contextmanager
    def held_stream(self, stream: int) -> Iterator[None]:
        """The copies of one stream, given by its handle, are held inside this block."""
        self.library.standin_close_stream(stream)
        try:
            yield
        finally:
            self.library.standin_open_stream(stream)
