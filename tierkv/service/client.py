"""The engine's side of the protocol.

Belongs to one thread. Nothing here blocks but `request`-like calls, and those at most for their
deadline; everything that is unknown, late or broken is a miss. A lost daemon is found by its lock,
not by waiting, and started anew where the configuration allows it.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq

from tierkv.errors import DaemonUnavailableError, ProtocolError
from tierkv.pool import DaemonLock, MapperLock
from tierkv.service import wire
from tierkv.service.breaker import Breaker
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

logger = logging.getLogger(__name__)

HELLO_WAIT_S = 1.0
START_PAUSE_MAX_S = 30.0
LOCK_PERIOD_S = 0.25
UNACKNOWLEDGED_MAX = 4_096
ANSWERS_MAX = 16_384


class Link(Enum):
    """State of the connection."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A namespace that the client attaches anew in every session."""

    namespace: NamespaceId
    slot_bytes: int
    label: str
    is_private: bool


@dataclass(slots=True)
class Answer:
    """What is known of one lookup; grows while blocks are on their way.

    Attributes:
        lease: 0 if nothing was found.
        offsets: byte offsets in the pool of the readable blocks, from the first key on.
        pending: blocks behind them that may still come.
    """

    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    pending: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots to write. `offsets`: per asked key, -1 where nothing is to be written."""

    lease: LeaseId
    offsets: npt.NDArray[np.int64]


class Client:
    """One engine's session with the daemon, kept up across crashes of the daemon.

    Args:
        run socket: see `node.service.socket`.
        engine: id of the engine, or None for an administrator.
        node: the engine's `node:` part as canonical JSON.
        start: starts a daemon, or None to only connect.
    """

    def __init__(
        self,
        socket: Path,
        engine: EngineId | None,
        *,
        node: str = "",
        deadline_s: float = 0.05,
        start: Callable[[], subprocess.Popen[bytes]] | None = None,
        start_wait_s: float = 30.0,
    ) -> None:
        self.socket_path = socket
        self.engine = engine
        self.deadline_s = deadline_s
        self.welcome: wire.Welcome | None = None
        self.generation = 0
        self.ignored_leases = 0
        self.refusal: str | None = None
        self.recalled: list[LeaseId] = []
        self.leases: set[LeaseId] = set()
        self.breaker = Breaker()
        self._node = node
        self._start = start
        self._start_wait_s = start_wait_s
        self._launcher: subprocess.Popen[bytes] | None = None
        self._daemon_lock = DaemonLock(socket)
        self._session_lock: MapperLock | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._link = Link.DOWN
        self._seq = 0
        self._hello_seq = 0
        self._retry_at = 0.0
        self._pause_s = 0.05
        self._give_up_at = 0.0
        self._look_at = 0.0
        self._had_session = False
        self._attachments: dict[NamespaceId, Attachment] = {}
        self._attached: set[NamespaceId] = set()
        self._attaching: dict[int, NamespaceId] = {}
        self._waiting: set[int] = set()
        self._replies: dict[int, wire.Reply] = {}
        self._answers: dict[LeaseId, Answer] = {}
        self._unacknowledged: deque[wire.Commit | wire.Trim] = deque()

    # ---- connection ----------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether requests have a chance now."""
        return self._link is Link.UP and not self.breaker.is_open

    @property
    def link(self) -> Link:
        return self._link

    def is_attached(self, namespace: NamespaceId) -> bool:
        """Whether lookups in this namespace have a chance now."""
        return self.is_up and namespace in self._attached

    def poll(self) -> None:
        """Take in what came, and get on with connecting. Never waits."""
        now = time.monotonic()
        if self._link is not Link.DOWN:
            self._drain()
            if now >= self._look_at:
                self._look_at = now + LOCK_PERIOD_S
                if not self._daemon_lock.is_held():
                    self._lose("the daemon is gone")
        if self._link is Link.GREETING and now >= self._give_up_at:
            self._lose("the daemon does not answer")
        if self._link is Link.UP and self.breaker.may_try(now):
            self._post(wire.Ping(self._next()))
        if self._link is Link.DOWN and now >= self._retry_at:
            self._connect_or_start(now)

    def connect(self, wait_s: float) -> None:
        """Connect, waiting at most `wait_s`. For administrators and tests.

        Raises:
            DaemonUnavailableError: no session came about; says why.
        """
        end = time.monotonic() + wait_s
        while not self.is_up and self.refusal is None and time.monotonic() < end:
            self.poll()
            if self._socket is not None:
                self._socket.poll(20)
            else:
                time.sleep(0.01)
        if self.refusal is not None:
            raise DaemonUnavailableError(self.refusal)
        if not self.is_up:
            raise DaemonUnavailableError(
                f"{self.socket_path}: no daemon answers; start one with `tierkv serve`"
            )

    def close(self) -> None:
        """End the session politely and free everything."""
        if self._link is Link.UP:
            self._post(wire.Bye(self._next()))
        if self._socket is not None:
            self._socket.close(linger=200)
        self._socket = None
        self._link = Link.DOWN
        self._context.term()
        if self._session_lock is not None:
            self._session_lock.release()
        if self._launcher is not None:
            self._launcher.poll()

    def _connect_or_start(self, now: float) -> None:
        if self._launcher is not None and self._launcher.poll() is not None:
            self._launcher = None
        if self._daemon_lock.is_held():
            if self.socket_path.exists():  # else it is still preparing its pool
                self._greet(now)
            return
        self._retry_at = now + 0.02
        if self._start is None or self._launcher is not None or now < self._give_up_at:
            return
        try:
            self._launcher = self._start()
        except (OSError, DaemonUnavailableError) as error:
            logger.warning("the daemon cannot be started: %s", error)
        self._give_up_at = now + min(self._start_wait_s, self._pause_s * 20)
        self._pause_s = min(self._pause_s * 2, START_PAUSE_MAX_S)

    def _greet(self, now: float) -> None:
        if self.engine is not None and self._session_lock is None:
            self._session_lock = MapperLock(self.socket_path.parent, self.engine, is_session=True)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
        self._socket.connect(f"ipc://{self.socket_path}")
        self._link = Link.GREETING
        self._give_up_at = now + HELLO_WAIT_S
        self._look_at = now + LOCK_PERIOD_S
        self._seq = 0
        committing = {LeaseId(m.lease) for m in self._unacknowledged}
        held = sorted(self.leases | committing)[: wire.LEASES_MAX]
        self._hello_seq = self._next()
        self._post(wire.Hello(
            self._hello_seq, wire.VERSION_MIN, wire.VERSION_MAX, self.engine or "",
            self._had_session, list(held), self._node,
        ))  # fmt: skip

    def _welcomed(self, welcome: wire.Welcome) -> None:
        if self._had_session and welcome.generation != self.generation:
            # Another daemon, or the same memory under a new one: no lease of before means anything.
            self.leases.clear()
            self._answers.clear()
            self._unacknowledged.clear()
        self.welcome = welcome
        self.generation = welcome.generation
        self._had_session = True
        self._link = Link.UP
        self._pause_s = 0.05
        self.refusal = None
        self.breaker.close()
        self._attached.clear()
        self._attaching.clear()
        again, self._unacknowledged = self._unacknowledged, deque()
        for message in again:
            seq = self._next()
            if isinstance(message, wire.Commit):
                self._post_kept(wire.Commit(seq, message.lease, message.is_ok))
            else:
                self._post_kept(wire.Trim(seq, message.lease, message.blocks))
        for attachment in self._attachments.values():
            self._attach(attachment)
        logger.info("connected: pid=%d generation=%d", welcome.pid, welcome.generation)

    def _lose(self, reason: str) -> None:
        if self._link is Link.UP:
            logger.warning("%s; serving without cache until it is back", reason)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
        self._link = Link.DOWN
        self._attached.clear()
        self._waiting.clear()
        self._replies.clear()
        self._retry_at = 0.0
        self._give_up_at = 0.0

    # ---- namespaces ----------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Attach a namespace now and in every later session. One-way; see `is_attached`."""
        self._attachments[attachment.namespace] = attachment
        if self._link is Link.UP:
            self._attach(attachment)

    def detach(self, namespace: NamespaceId) -> None:
        """Stop using a namespace."""
        self._attachments.pop(namespace, None)
        self._attached.discard(namespace)

    def _attach(self, wanted: Attachment) -> None:
        seq = self._next()
        self._attaching[seq] = wanted.namespace
        self._post(wire.Attach(
            seq, wanted.namespace, wanted.slot_bytes, wanted.label, wanted.is_private
        ))  # fmt: skip

    def wait_attached(self, namespace: NamespaceId, wait_s: float) -> bool:
        """Give a daemon that is just starting some time; whether the namespace is usable."""
        end = time.monotonic() + wait_s
        while not self.is_attached(namespace) and self.refusal is None:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.poll()
            if self._socket is not None:
                self._socket.poll(int(min(left, 0.02) * 1000))
            else:
                time.sleep(min(left, 0.01))
        return self.refusal is None

    # ---- load ----------------------------------------------------------------------------------

    def send_lookup(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Ask for a prefix without waiting.

        Returns:
            A ticket for `take_answer`; 0 if there is nobody to ask.
        """
        if not keys or len(keys) > wire.KEYS_MAX or not self.is_attached(namespace):
            return 0
        seq = self._next()
        frame = wire.Lookup(seq, namespace, len(keys[0]), b"".join(keys))
        if not self._post(frame):
            return 0
        self._waiting.add(seq)
        return seq

    def has_answer(self, ticket: int) -> bool:
        """Whether the answer is here, or will never come."""
        return ticket in self._replies or ticket not in self._waiting

    def take_answer(self, ticket: int, deadline_s: float | None = None) -> Answer | None:
        """The answer to a lookup, waiting at most the deadline; None is a miss.

        A lookup that gets no answer in time is abandoned: what it pinned is taken back.
        """
        reply = self._await(ticket, self.deadline_s if deadline_s is None else deadline_s)
        if not isinstance(reply, wire.FoundReply):
            return None
        answer = Answer(LeaseId(reply.lease), wire.unpack_offsets(reply.offsets), reply.pending)
        if reply.lease:
            early = self._answers.get(answer.lease)
            if early is not None:  # a push overtook us reading the reply
                answer = early
            self._answers[answer.lease] = answer
            self.leases.add(answer.lease)
        return answer

    def lookup(
        self, namespace: NamespaceId, keys: Sequence[BlockKey], deadline_s: float | None = None
    ) -> Answer | None:
        """`send_lookup` and `take_answer` in one."""
        ticket = self.send_lookup(namespace, keys)
        return self.take_answer(ticket, deadline_s) if ticket else None

    def forget_lookup(self, ticket: int) -> None:
        """Give up a lookup whose answer was not taken."""
        if ticket in self._waiting:
            self._waiting.discard(ticket)
            reply = self._replies.pop(ticket, None)
            if isinstance(reply, wire.FoundReply):
                if reply.lease:
                    self._answers.pop(LeaseId(reply.lease), None)
                    self.release([LeaseId(reply.lease)])
            else:
                self._post(wire.Abandon(self._next(), ticket))

    def trim(self, lease: LeaseId, blocks: int) -> None:
        """Keep the first blocks of a lease; a copy of them is about to be issued."""
        self._answers.pop(lease, None)
        if lease in self.leases:
            if blocks == 0:
                self.leases.discard(lease)
            self._post_kept(wire.Trim(self._next(), lease, blocks))

    def release(self, leases: Iterable[LeaseId]) -> None:
        """End read leases. One-way; a lost release is repaired at the next session."""
        listed = list(leases)
        for lease in listed:
            self.leases.discard(lease)
            self._answers.pop(lease, None)
        if listed and self._link is Link.UP:
            self._post(wire.Release(self._next(), [int(lease) for lease in listed]))

    def touch(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Note a use of a prefix that needs no load. One-way."""
        if keys and len(keys) <= wire.KEYS_MAX and self.is_attached(namespace):
            self._post(wire.Touch(self._next(), namespace, len(keys[0]), b"".join(keys)))

    # ---- store ---------------------------------------------------------------------------------

    def reserve(
        self,
        namespace: NamespaceId,
        runs: Sequence[tuple[BlockKey | None, Sequence[BlockKey]]],
        deadline_s: float | None = None,
    ) -> Grant | None:
        """Take slots for runs of new blocks, given as (predecessor, keys).

        Returns:
            None if nobody answered in time; a grant with lease 0 if nothing is to be written.
        """
        keys = [key for _, run in runs for key in run]
        if not keys or len(keys) > wire.KEYS_MAX or not self.is_attached(namespace):
            return None
        seq = self._next()
        counts = [(bytes(before or b""), len(run)) for before, run in runs]
        if not self._post(wire.Reserve(seq, namespace, len(keys[0]), b"".join(keys), counts)):
            return None
        self._waiting.add(seq)
        reply = self._await(seq, self.deadline_s if deadline_s is None else deadline_s)
        if not isinstance(reply, wire.GrantedReply):
            return None
        if reply.lease:
            self.leases.add(LeaseId(reply.lease))
        return Grant(LeaseId(reply.lease), wire.unpack_offsets(reply.offsets))

    def commit(self, lease: LeaseId, is_ok: Sequence[bool]) -> None:
        """End a write lease, one flag per granted block in the order of the grant. One-way."""
        if lease not in self.leases:
            return
        self.leases.discard(lease)
        self._post_kept(wire.Commit(self._next(), lease, bytes(1 if ok else 0 for ok in is_ok)))

    def say_outcome(self, device: int, dram: int, computed: int) -> None:
        """Report where a request's prompt tokens came from. One-way."""
        if self.is_up:
            self._post(wire.Outcome(self._next(), device, dram, computed))

    def say_quiesced(self) -> None:
        """Say that nothing is in flight from before this generation. One-way."""
        self._post(wire.Quiesced(self._next(), self.generation))

    # ---- administration ------------------------------------------------------------------------

    def ask(self, make: Callable[[int], wire.Request], deadline_s: float) -> wire.Reply:
        """Send one request and wait for its reply.

        Raises:
            DaemonUnavailableError: no reply in time, or the daemon refused.
        """
        seq = self._next()
        if not self._post(make(seq)):
            raise DaemonUnavailableError(f"{self.socket_path}: not connected")
        self._waiting.add(seq)
        reply = self._await(seq, deadline_s)
        if reply is None:
            raise DaemonUnavailableError(
                f"{self.socket_path}: no answer within {deadline_s:g} s; is the daemon stopped?"
            )
        if isinstance(reply, wire.Failed):
            raise DaemonUnavailableError(reply.message)
        return reply

    # ---- messages ------------------------------------------------------------------------------

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _post(self, message: wire.Request) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose("the daemon takes no messages")
            return False
        return True

    def _post_kept(self, message: wire.Commit | wire.Trim) -> None:
        """Send a one-way message that must arrive; it is sent again in the next session."""
        self._unacknowledged.append(message)
        if len(self._unacknowledged) > UNACKNOWLEDGED_MAX:
            self._lose("the daemon acknowledges nothing")
            return
        self._post(message)
        if len(self._unacknowledged) % 256 == 0:
            self._post(wire.Ping(self._next()))  # its reply acknowledges them

    def _await(self, seq: int, deadline_s: float) -> wire.Reply | None:
        end = time.monotonic() + deadline_s
        while seq in self._waiting and seq not in self._replies:
            left = end - time.monotonic()
            if left <= 0 or self._socket is None:
                break
            self._socket.poll(max(1, int(left * 1000)))
            self._drain()
        reply = self._replies.pop(seq, None)
        if seq in self._waiting:
            self._waiting.discard(seq)
            if self._link is Link.UP:
                self.breaker.note(reply is not None, time.monotonic())
            if reply is None:
                self._post(wire.Abandon(self._next(), seq))
        return reply

    def _drain(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take_in(wire.decode_reply(frame))
            except ProtocolError as error:
                self._lose(f"the daemon sent {error}")

    def _take_in(self, reply: wire.Reply) -> None:
        match reply:
            case wire.ReadyPush():
                self._grow(reply)
            case wire.RecallPush():
                if LeaseId(reply.lease) in self._answers:
                    self.recalled.append(LeaseId(reply.lease))
            case wire.Welcome():
                self._welcomed(reply)
            case wire.Failed():
                self._failed(reply)
            case _:
                self._acknowledge(reply.to)
                if not isinstance(reply, wire.StatsReply):
                    self.ignored_leases = reply.ignored
                namespace = self._attaching.pop(reply.to, None)
                if namespace is not None and namespace in self._attachments:
                    self._attached.add(namespace)
                self._settle(reply.to, reply)

    def _settle(self, to: int, reply: wire.Reply) -> None:
        if self.breaker.is_open:
            self.breaker.close()
            logger.warning("the daemon answers again")
        if to in self._waiting:
            self._replies[to] = reply

    def _failed(self, reply: wire.Failed) -> None:
        if reply.code in ("version", "refused") and reply.to == self._hello_seq:
            if self.refusal is None:
                logger.error("the daemon refuses this engine: %s", reply.message)
            self.refusal = reply.message
            self._lose("refused")
            self._retry_at = time.monotonic() + START_PAUSE_MAX_S
        elif reply.code in ("protocol", "closed"):
            self._lose(f"the daemon closed the session: {reply.message}")
        elif reply.to in self._attaching:
            namespace = self._attaching.pop(reply.to)
            self._attachments.pop(namespace, None)
            self.refusal = reply.message
            logger.error("TierKV is off for this engine: %s", reply.message)
        else:
            self._acknowledge(reply.to)
            self._settle(reply.to, reply)

    def _acknowledge(self, seq: int) -> None:
        kept = self._unacknowledged
        while kept and kept[0].seq <= seq:
            kept.popleft()

    def _grow(self, push: wire.ReadyPush) -> None:
        lease = LeaseId(push.lease)
        offsets = wire.unpack_offsets(push.offsets)
        answer = self._answers.get(lease)
        if answer is None:
            if lease in {LeaseId(r.lease) for r in self._replies.values()
                         if isinstance(r, wire.FoundReply)}:  # fmt: skip
                self._answers[lease] = Answer(lease, offsets, 0 if push.done else 1)
            return
        grown = len(offsets) - len(answer.offsets)
        answer.offsets = offsets
        answer.pending = 0 if push.done else max(1, answer.pending - grown)
