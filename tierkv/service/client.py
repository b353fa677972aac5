"""The engine's side of the protocol: verbs, answers and deadlines.

Belongs to one thread. Nothing here blocks but `request`-like calls, and those at most for their
deadline; everything that is unknown, late or broken is a miss.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tierkv.config import differing_keys
from tierkv.core.values import Granted
from tierkv.device.facts import CopyFacts
from tierkv.errors import DaemonUnavailableError, RefusedError
from tierkv.service import wire
from tierkv.service.answers import Answer, Attachment, device_rows
from tierkv.service.breaker import Breaker
from tierkv.service.connection import Connection, Link
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

logger = logging.getLogger(__name__)

__all__ = ["Answer", "Attachment", "Client"]

UNACKNOWLEDGED_MAX = 4_096
PING_EVERY = 256


class Client:
    """One engine's session with the daemon.

    Args:
        socket: see `node.service.socket`.
        engine: id of the engine, or None for an administrator.
        node: the engine's `node:` part as canonical JSON.
        deadline_s: how long one answer is waited for.
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
        self.ignored_leases = 0
        self.recalled: list[LeaseId] = []
        self.leases: set[LeaseId] = set()
        self.breaker = Breaker()
        self._refusal: str | None = None
        self._node = node
        self._warned_of: str | None = None
        self._trial = 0
        self._attachments: dict[NamespaceId, Attachment] = {}
        self._attached: set[NamespaceId] = set()
        self._attaching: dict[int, NamespaceId] = {}
        self._waiting: set[int] = set()
        self._replies: dict[int, wire.Reply] = {}
        self._answers: dict[LeaseId, Answer] = {}
        self._unacknowledged: deque[wire.Commit | wire.Trim] = deque()
        self._devices: list[wire.Device] = []
        self._connection = Connection(
            socket, engine, self, node=node, start=start, start_wait_s=start_wait_s
        )

    # ---- connection ----------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether requests have a chance now."""
        return self.link is Link.UP and not self.breaker.is_open

    @property
    def link(self) -> Link:
        """State of the connection."""
        return self._connection.link

    @property
    def welcome(self) -> wire.Welcome | None:
        """What the last daemon said of itself."""
        return self._connection.welcome

    @property
    def generation(self) -> int:
        """Generation of the last daemon; leases of another one mean nothing."""
        return self._connection.generation

    @property
    def refusal(self) -> str | None:
        """Why the daemon does not serve this engine, if it does not."""
        return self._refusal or self._connection.refusal

    def is_attached(self, namespace: NamespaceId) -> bool:
        """Whether lookups in this namespace have a chance now."""
        return self.is_up and namespace in self._attached

    def poll(self) -> None:
        """Take in what came, and get on with connecting. Never waits."""
        now = time.monotonic()
        self._connection.poll(now)
        if self.link is Link.UP and self.breaker.may_try(now):
            self._trial = self._next()
            self._post(wire.Ping(self._trial))

    def wait(self, wait_s: float) -> None:
        """Wait for one message, at most `wait_s`, and take in what came."""
        self._connection.wait(wait_s)
        self.poll()

    def connect(self, wait_s: float) -> None:
        """Connect, waiting at most `wait_s`. For administrators and tests.

        Raises:
            DaemonUnavailableError: no session came about; says why.
        """
        self._poll_until(lambda: self.is_up, wait_s)
        if self.refusal is not None:
            raise DaemonUnavailableError(self.refusal)
        if not self.is_up:
            raise DaemonUnavailableError(
                f"{self.socket_path}: no daemon answers; start one with `tierkv serve`"
            )

    def wait_attached(self, namespace: NamespaceId, wait_s: float) -> bool:
        """Give a daemon that is just starting some time; whether the namespace is usable."""
        self._poll_until(lambda: self.is_attached(namespace), wait_s)
        return self.is_attached(namespace)

    def close(self) -> None:
        """End the session politely and free everything."""
        self._connection.close()

    def _poll_until(self, is_reached: Callable[[], bool], wait_s: float) -> None:
        end = time.monotonic() + wait_s
        self.poll()
        while not is_reached() and self.refusal is None:
            left = end - time.monotonic()
            if left <= 0:
                return
            self._connection.wait(min(left, 0.02))
            self.poll()

    def leases_held(self) -> Iterable[LeaseId]:
        """Leases that a new session should keep: ours, and those whose end may be lost."""
        return self.leases | {LeaseId(message.lease) for message in self._unacknowledged}

    def on_welcome(self, welcome: wire.Welcome, is_other_daemon: bool) -> None:
        """A session is open: attach again, and send again what may be lost."""
        self._compare_nodes(welcome.node)
        if is_other_daemon:
            self.leases.clear()
            self._answers.clear()
            self._unacknowledged.clear()
        self.breaker.close(time.monotonic())
        self._refusal = None
        again, self._unacknowledged = self._unacknowledged, deque()
        for message in again:
            seq = self._next()
            if isinstance(message, wire.Commit):
                self._post_kept(wire.Commit(seq, message.lease, message.is_ok))
            else:
                self._post_kept(wire.Trim(seq, message.lease, message.blocks))
        for attachment in self._attachments.values():
            self._attach(attachment)
        self._tell_devices()

    def _compare_nodes(self, theirs: str) -> None:
        """One warning if the daemon runs with another `node:` part; the starter's rules."""
        if not self._node or theirs in (self._node, self._warned_of):
            return
        self._warned_of = theirs
        try:
            found = differing_keys(json.loads(self._node), json.loads(theirs))
        except ValueError:
            found = ["not readable"]
        logger.warning(
            "the daemon was started with another node: part, which counts (ours / the daemon's): "
            "%s", "; ".join(found),
        )  # fmt: skip

    def on_loss(self) -> None:
        """What was waited for will not come."""
        self._attached.clear()
        self._attaching.clear()
        self._waiting.clear()
        self._replies.clear()
        self._answers = {lease: a for lease, a in self._answers.items() if lease in self.leases}

    # ---- namespaces ----------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Attach a namespace now and in every later session. One-way; see `is_attached`."""
        self._attachments[attachment.namespace] = attachment
        if self.link is Link.UP:
            self._attach(attachment)

    def detach(self, namespace: NamespaceId) -> None:
        """Stop using a namespace; a private one is purged."""
        self._attachments.pop(namespace, None)
        if namespace in self._attached:
            self._attached.discard(namespace)
            self._post(wire.Detach(self._next(), namespace))

    def _attach(self, wanted: Attachment) -> None:
        seq = self._next()
        self._attaching[seq] = wanted.namespace
        self._post(wire.Attach(
            seq, wanted.namespace, wanted.slot_bytes, wanted.label, wanted.is_private,
            wanted.block_tokens,
        ))  # fmt: skip

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
        offsets = wire.unpack_offsets(reply.offsets)
        answer = Answer(
            LeaseId(reply.lease), offsets, reply.pending, reply.is_promoting, bytes(len(offsets))
        )
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
        listed = set(leases)
        if not listed:
            return
        self.leases -= listed
        for lease in listed:
            self._answers.pop(lease, None)
        if any(message.lease in listed for message in self._unacknowledged):
            kept = (m for m in self._unacknowledged if m.lease not in listed)
            self._unacknowledged = deque(kept)  # a trim sent again would hold the lease
        self._post(wire.Release(self._next(), [int(lease) for lease in listed]))

    def touch(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Note a use of a prefix that needs no load. One-way."""
        if keys and len(keys) <= wire.KEYS_MAX and self.is_attached(namespace):
            self._post(wire.Touch(self._next(), namespace, len(keys[0]), b"".join(keys)))

    # ---- store ---------------------------------------------------------------------------------

    def send_reserve(
        self,
        namespace: NamespaceId,
        runs: Sequence[tuple[BlockKey | None, Sequence[BlockKey]]],
    ) -> int:
        """Ask for slots for runs of new blocks, given as (predecessor, keys), without waiting.

        Returns:
            A ticket for `take_grant`; 0 if there is nobody to ask.
        """
        keys = [key for _, run in runs for key in run]
        if not keys or len(keys) > wire.KEYS_MAX or not self.is_attached(namespace):
            return 0
        seq = self._next()
        counts = [(bytes(before or b""), len(run)) for before, run in runs]
        if not self._post(wire.Reserve(seq, namespace, len(keys[0]), b"".join(keys), counts)):
            return 0
        self._waiting.add(seq)
        return seq

    def take_grant(self, ticket: int, deadline_s: float | None = None) -> Granted | None:
        """The answer to a reserve, waiting at most the deadline.

        Returns:
            None if nobody answered in time; a grant with lease 0 if nothing is to be written.
        """
        reply = self._await(ticket, self.deadline_s if deadline_s is None else deadline_s)
        if not isinstance(reply, wire.GrantedReply):
            return None
        if reply.lease:
            self.leases.add(LeaseId(reply.lease))
        return Granted(LeaseId(reply.lease), wire.unpack_offsets(reply.offsets))

    def reserve(
        self,
        namespace: NamespaceId,
        runs: Sequence[tuple[BlockKey | None, Sequence[BlockKey]]],
        deadline_s: float | None = None,
    ) -> Granted | None:
        """`send_reserve` and `take_grant` in one."""
        ticket = self.send_reserve(namespace, runs)
        return self.take_grant(ticket, deadline_s) if ticket else None

    def commit(self, lease: LeaseId, is_ok: Sequence[bool]) -> None:
        """End a write lease, one flag per granted block in the order of the grant. One-way."""
        if lease not in self.leases:
            return
        self.leases.discard(lease)
        self._post_kept(wire.Commit(self._next(), lease, bytes(1 if ok else 0 for ok in is_ok)))

    def say_outcome(self, device: int, tiers: Sequence[int], computed: int) -> None:
        """Report where a request's prompt tokens came from. One-way.

        Args:
            tiers: tokens by source: DRAM, then the secondary tiers in order.
        """
        if self.is_up:
            self._post(wire.Outcome(self._next(), device, list(tiers), computed))

    def say_devices(self, facts: Mapping[int, CopyFacts]) -> None:
        """Tell how the ranks' copies are made, now and in every later session. One-way."""
        self._devices = device_rows(facts)
        self._tell_devices()

    def _tell_devices(self) -> None:
        if self._devices and self._connection.version >= wire.VERSION_DEVICES:
            self._post(wire.Devices(self._next(), self._devices))

    def say_quiesced(self) -> None:
        """Say that nothing is in flight from before this generation. One-way."""
        self._post(wire.Quiesced(self._next(), self.generation))

    # ---- administration ------------------------------------------------------------------------

    def ask(self, make: Callable[[int], wire.Request], deadline_s: float) -> wire.Reply:
        """Send one request and wait for its reply.

        Raises:
            DaemonUnavailableError: no reply in time.
            RefusedError: the daemon will not do it; says why.
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
            raise RefusedError(reply.message, reply.code)
        return reply

    # ---- messages ------------------------------------------------------------------------------

    def _next(self) -> int:
        return self._connection.next_seq()

    def _post(self, message: wire.Request) -> bool:
        return self._connection.post(message)

    def _post_kept(self, message: wire.Commit | wire.Trim) -> None:
        """Send a one-way message that must arrive; it is sent again in the next session."""
        self._unacknowledged.append(message)
        if len(self._unacknowledged) > UNACKNOWLEDGED_MAX:
            self._connection.lose("the daemon acknowledges nothing")
            return
        self._post(message)
        if len(self._unacknowledged) % PING_EVERY == 0:
            self._post(wire.Ping(self._next()))  # its reply acknowledges them

    def _await(self, seq: int, deadline_s: float) -> wire.Reply | None:
        wait_s = 0.0 if self.breaker.is_open else deadline_s
        end = time.monotonic() + wait_s
        while seq in self._waiting and seq not in self._replies:
            left = end - time.monotonic()
            if left <= 0 or self.link is Link.DOWN:
                break
            self._connection.wait(left)
        reply = self._replies.pop(seq, None)
        if seq in self._waiting:
            self._waiting.discard(seq)
            if self.link is Link.UP and (wait_s > 0 or reply is not None):
                self.breaker.note(reply is not None, time.monotonic())
            if reply is None:
                self._post(wire.Abandon(self._next(), seq))
        return reply

    def on_reply(self, reply: wire.Reply) -> None:
        """Anything but Welcome and the end of the session."""
        match reply:
            case wire.ReadyPush():
                self._grow(reply)
            case wire.RecallPush():
                self._recall(LeaseId(reply.lease))
            case wire.Failed() if reply.to in self._attaching:
                del self._attaching[reply.to]  # tried again with the next daemon
                self._refusal = reply.message
                logger.error("TierKV is off for this engine: %s", reply.message)
            case wire.Welcome():
                return
            case _:
                self._acknowledge(reply.to)
                if isinstance(reply, wire.Done | wire.FoundReply | wire.GrantedReply):
                    self.ignored_leases = reply.ignored
                namespace = self._attaching.pop(reply.to, None)
                if namespace is not None and namespace in self._attachments:
                    self._attached.add(namespace)
                elif namespace is not None and isinstance(reply, wire.Done):
                    self._post(wire.Detach(self._next(), namespace))  # given up meanwhile
                self._settle(reply.to, reply)

    def _recall(self, lease: LeaseId) -> None:
        """Note a recall; an answer that nobody has read yet becomes a miss at once."""
        for ticket, reply in self._replies.items():
            if isinstance(reply, wire.FoundReply) and reply.lease == lease:
                self._replies[ticket] = wire.FoundReply(ticket, reply.ignored, 0, b"", 0, False)
                self.release([lease])
                return
        if lease in self._answers:
            self.recalled.append(lease)

    def _settle(self, to: int, reply: wire.Reply) -> None:
        if self.breaker.is_open and (to in self._waiting or to == self._trial):
            self.breaker.close(time.monotonic())
            logger.warning("the daemon answers again")
        if to in self._waiting:
            self._replies[to] = reply

    def _acknowledge(self, seq: int) -> None:
        kept = self._unacknowledged
        while kept and kept[0].seq <= seq:
            kept.popleft()

    def _grow(self, push: wire.ReadyPush) -> None:
        lease = LeaseId(push.lease)
        grown = Answer(
            lease, wire.unpack_offsets(push.offsets), push.pending, push.is_promoting, push.sources
        )
        answer = self._answers.get(lease)
        if answer is None:
            if lease in {LeaseId(r.lease) for r in self._replies.values()
                         if isinstance(r, wire.FoundReply)}:  # fmt: skip
                self._answers[lease] = grown
            return
        answer.offsets, answer.sources = grown.offsets, grown.sources
        answer.pending, answer.is_promoting = grown.pending, grown.is_promoting
