"""The daemon's logic: messages in, messages out. No clock, socket or file.

`Server.turn` is a pure step: it gets the time, the frames that came in and what is known about
living processes, and returns the frames to send. `serve` in `daemon.py` feeds it.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.core.directory import Directory
from tierkv.core.values import Event, Job, Ready, Recall, Run, TaskEnded
from tierkv.errors import ProtocolError
from tierkv.numa import Placement
from tierkv.pool import Held
from tierkv.service import wire
from tierkv.service.stats import Report, collect
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

logger = logging.getLogger(__name__)

Frame = tuple[bytes, bytes]  # (peer identity, message)
SESSIONS_MAX = 4_096
ADMINISTRATORS_MAX = 64
OUTCOMES_KEPT = 1_000
TASKS_MAX = 64


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server tells its clients. `node` is the daemon's `node:` part as JSON text."""

    pool: str
    capacity: int
    generation: int
    node: str
    node_strict: bool
    quarantine_min_s: float
    placement: Placement = field(default_factory=lambda: Placement("local"))


@dataclass(slots=True, eq=False)
class Session:
    """One connection.

    Attributes:
        engine: None for an administrator.
        seq: highest number seen; a smaller one is a duplicate.
        granted: request number -> lease that its reply granted, while the lease lives.
        devices: how the engine's ranks copy, as it told.
    """

    peer: bytes
    engine: EngineId | None
    seq: int
    spaces: set[NamespaceId] = field(default_factory=set)
    granted: dict[int, LeaseId] = field(default_factory=dict)
    devices: list[wire.Device] = field(default_factory=list)


class Server:
    """Sessions, and the directory behind them."""

    def __init__(
        self, directory: Directory, facts: ServerFacts, old_mappers: Sequence[EngineId] = ()
    ) -> None:
        self.directory = directory
        self.facts = facts
        self.outcomes: deque[Report] = deque(maxlen=OUTCOMES_KEPT)
        self.outcomes_total = Report()
        self._sessions: dict[bytes, Session] = {}
        self._peers: dict[EngineId, bytes] = {}
        self._free_since: dict[EngineId, float] = {}
        self._old_mappers: dict[EngineId, float | None] = dict.fromkeys(old_mappers)
        self._tasks: dict[int, tuple[bytes, int, bool]] = {}  # -> (peer, its request, a check?)
        self.stores: list[dict[str, int]] = [{} for _ in directory.tiering.lanes]
        self.is_ending = False  # a stop is flushing: nothing new is granted
        self._out: list[Frame] = []
        directory.may_grant = not self._old_mappers

    @property
    def engines_connected(self) -> int:
        return len(self._peers)

    @property
    def devices(self) -> list[tuple[EngineId, wire.Device]]:
        """What connected engines told of their ranks."""
        return [
            (session.engine, device)
            for session in self._sessions.values()
            if session.engine is not None
            for device in session.devices
        ]

    @property
    def engines_known(self) -> int:
        """Engines that are connected or whose death is not certain yet."""
        return len(self.directory.engines)

    @property
    def old_mappers(self) -> int:
        """Engines of older generations that may still touch any slot."""
        return len(self._old_mappers)

    def turn(
        self, now: float, inbox: Sequence[Frame], held: Mapping[EngineId, Held] | None = None
    ) -> list[Frame]:
        """One step.

        Args:
            inbox: frames in the order in which they came.
            held: locks held by living processes, if they were looked at.
        Returns:
            Frames to send, in order.
        """
        for peer, frame in inbox:
            self._receive(peer, frame, now)
        if held is not None:
            self._look_for_deaths(held, now)
            self.directory.tiering.tick(now)
        self._push_events()
        out, self._out = self._out, []
        return out

    def take_jobs(self, now: float) -> list[Job]:
        """Work for the I/O processes; outcomes go to `directory.tiering`, before the next turn."""
        return self.directory.tiering.take_jobs(now)

    def _push_events(self) -> None:
        events = self.directory.take_events()
        last = {e.lease: at for at, e in enumerate(events) if isinstance(e, Ready)}
        for at, event in enumerate(events):
            if not isinstance(event, Ready) or last[event.lease] == at:  # the last one tells all
                self._push(event)

    # ---- sessions ------------------------------------------------------------------------------

    def _receive(self, peer: bytes, frame: bytes, now: float) -> None:
        session = self._sessions.get(peer)
        try:
            message = wire.decode_request(frame)
            if isinstance(message, wire.Hello) and session is None:
                self._hello(peer, message)
            elif session is None:
                self._send(peer, wire.Failed(message.seq, "closed", "say Hello first"))
            elif message.seq > session.seq:
                session.seq = message.seq
                self._handle(session, message, now)
            else:
                self.directory.counters["duplicate_messages"] += 1
        except ProtocolError as error:
            self.directory.counters["protocol_errors"] += 1
            logger.warning("session closed: %s", error)
            self._send(peer, wire.Failed(session.seq if session else 0, "protocol", str(error)))
            if session is not None:
                self._close(session)

    def _hello(self, peer: bytes, hello: wire.Hello) -> None:
        if hello.version_max < wire.VERSION_MIN or hello.version_min > wire.VERSION_MAX:
            text = (
                f"the daemon speaks protocol {wire.VERSION_MIN} to {wire.VERSION_MAX}, the client "
                f"{hello.version_min} to {hello.version_max}; install the same TierKV on both sides"
            )
            self._send(peer, wire.Failed(hello.seq, "version", text))
            return
        refusal = self._refusal(hello)
        if refusal is not None:
            self._send(peer, wire.Failed(hello.seq, "refused", refusal))
            return
        engine = EngineId(hello.engine) if hello.engine else None
        if engine is not None:
            self._open_engine(engine, hello)
            self._peers[engine] = peer
        else:
            self._drop_old_administrators()
        self._sessions[peer] = Session(peer, engine, hello.seq)
        logger.info("session opened: engine=%s", engine or "administrator")
        facts = self.facts
        version = min(wire.VERSION_MAX, hello.version_max)
        self._send(peer, wire.Welcome(
            hello.seq, version, facts.generation, facts.pool, facts.capacity,
            engine in self._old_mappers, facts.node, os.getpid(),
        ))  # fmt: skip

    def _refusal(self, hello: wire.Hello) -> str | None:
        if len(self._sessions) >= SESSIONS_MAX:
            return f"{SESSIONS_MAX} sessions are open"
        if self.facts.node_strict and hello.engine and hello.node != self.facts.node:
            return "node: differs from the daemon's, and node_strict is set; make them equal"
        known = self.directory.engines.get(EngineId(hello.engine))
        if known is not None and not hello.is_return:
            return "an engine of this id is known already; engine ids are made once"
        return None

    def _open_engine(self, engine: EngineId, hello: wire.Hello) -> None:
        old = self._sessions.get(self._peers.get(engine, b""))
        if old is not None:
            del self._sessions[old.peer]
        self._free_since.pop(engine, None)
        known = self.directory.engines.get(engine)
        if known is None:
            self.directory.open_engine(engine)
            return
        known.is_closed = False
        self.directory.keep_leases(engine, [LeaseId(lease) for lease in hello.held])

    def _drop_old_administrators(self) -> None:
        """A killed administrator says no Bye and holds no lock; the oldest sessions go first."""
        peers = [peer for peer, session in self._sessions.items() if session.engine is None]
        for peer in peers[: max(0, len(peers) - ADMINISTRATORS_MAX + 1)]:
            del self._sessions[peer]

    def _close(self, session: Session) -> None:
        self._sessions.pop(session.peer, None)
        engine = session.engine
        if engine is not None and self._peers.get(engine) == session.peer:
            del self._peers[engine]
            self.directory.close_engine(engine)
            logger.info("session closed: engine=%s", engine)

    def _look_for_deaths(self, held: Mapping[EngineId, Held], now: float) -> None:
        """An engine is dead when its session is closed, its locks are free, and some time passed.

        The time is for drivers that end their transfers late, not a lease that runs out.
        """
        for engine, known in list(self.directory.engines.items()):
            locks = held.get(engine, Held())
            session = self._sessions.get(self._peers.get(engine, b""))
            if session is not None and not locks.has_session:
                self._close(session)
            if not known.is_closed or locks.has_session or locks.mappers:
                self._free_since.pop(engine, None)
                continue
            since = self._free_since.setdefault(engine, now)
            if now - since >= self.facts.quarantine_min_s:
                del self._free_since[engine]
                self.directory.end_engine(engine)
                logger.info("engine ended: engine=%s", engine)
        self._forget_old_mappers(held, now)

    def _forget_old_mappers(self, held: Mapping[EngineId, Held], now: float) -> None:
        """Engines of older generations keep all slots back until none of them can touch one.

        That is when they are gone for `quarantine_min`, have said so, or live and have had no copy
        in flight for as long: a new copy of theirs looks at the pool's generation first.
        """
        for engine, since in list(self._old_mappers.items()):
            locks = held.get(engine, Held())
            if locks.mappers > locks.idle_mappers:
                self._old_mappers[engine] = None
            elif since is None:
                self._old_mappers[engine] = now
            elif now - since >= self.facts.quarantine_min_s:
                del self._old_mappers[engine]
        self.directory.may_grant = not self._old_mappers and not self.is_ending

    # ---- messages ------------------------------------------------------------------------------

    def _handle(self, session: Session, message: wire.Request, now: float) -> None:
        directory = self.directory
        match message:
            case wire.Lookup():
                self._lookup(session, message, now)
            case wire.Reserve():
                self._reserve(session, message, now)
            case wire.Commit():
                if self._owns(session, message.lease):
                    flags = [flag == 1 for flag in message.is_ok]
                    directory.commit(LeaseId(message.lease), flags)
            case wire.Release():
                for lease in message.leases:
                    if self._owns(session, lease):
                        directory.release(LeaseId(lease))
            case wire.Trim():
                if self._owns(session, message.lease):
                    directory.trim(LeaseId(message.lease), message.blocks)
            case wire.Abandon():
                self._abandon(session, message.request)
            case wire.Touch():
                space = self._space(session, message.namespace)
                directory.touch(space, wire.split_keys(message.keys, message.key_bytes), now)
            case wire.Outcome():
                self._count_outcome(message)
            case wire.Devices():
                session.devices = message.ranks
            case wire.Detach():
                self._detach(session, message)
            case wire.Quiesced():
                self._quiesced(session, message)
            case wire.Bye():
                self._close(session)
            case _:
                self._administer(session, message, now)

    def _administer(self, session: Session, message: wire.Request, now: float) -> None:
        match message:
            case wire.Attach():
                self._attach(session, message)
            case wire.Ping():
                self._done(session, message.seq, 0)
            case wire.Stats():
                body = json.dumps(collect(self, now))
                self._send(session.peer, wire.StatsReply(message.seq, body))
            case wire.Check():
                self._check(session, message, now)
            case wire.Hello():
                raise ProtocolError("a connection is one session; open another for another")
            case wire.Purge():
                self._purge(session, message, now)

    def _attach(self, session: Session, message: wire.Attach) -> None:
        if session.engine is None:
            raise ProtocolError("an administrator cannot attach a namespace")
        namespace = NamespaceId(message.namespace)
        problem = self.directory.attach(
            session.engine, namespace, message.slot_bytes, message.label, message.is_private,
            block_tokens=message.block_tokens,
        )  # fmt: skip
        if problem is not None:
            self._send(session.peer, wire.Failed(message.seq, "refused", problem))
            return
        session.spaces.add(namespace)
        self._done(session, message.seq, 0)

    def _detach(self, session: Session, message: wire.Detach) -> None:
        space = self._space(session, message.namespace)
        session.spaces.discard(space)
        if session.engine is not None:
            self.directory.detach(session.engine, space)

    def _lookup(self, session: Session, message: wire.Lookup, now: float) -> None:
        space = self._space(session, message.namespace)
        keys = wire.split_keys(message.keys, message.key_bytes)
        engine = session.engine
        assert engine is not None, "only engines attach namespaces"
        found = self.directory.lookup(engine, space, keys, now)
        self._remember(session, message.seq, found.lease)
        offsets = wire.pack_offsets(found.offsets)
        self._send(session.peer, wire.FoundReply(
            message.seq, self._ignored, found.lease, offsets, found.pending, found.is_promoting
        ))  # fmt: skip

    def _reserve(self, session: Session, message: wire.Reserve, now: float) -> None:
        space = self._space(session, message.namespace)
        keys = wire.split_keys(message.keys, message.key_bytes)
        if sum(count for _, count in message.runs) != len(keys):
            raise ProtocolError("the runs of a reserve do not add up to its keys")
        runs, at = [], 0
        for predecessor, count in message.runs:
            before = BlockKey(predecessor) if predecessor else None
            runs.append(Run(before, keys[at : at + count]))
            at += count
        engine = session.engine
        assert engine is not None, "only engines attach namespaces"
        granted = self.directory.reserve(engine, space, runs, now)
        self._remember(session, message.seq, granted.lease)
        offsets = wire.pack_offsets(granted.offsets)
        self._send(
            session.peer, wire.GrantedReply(message.seq, self._ignored, granted.lease, offsets)
        )

    def _abandon(self, session: Session, request: int) -> None:
        """Take back what an unread reply granted. FIFO: it was granted before, or never will be."""
        lease = self.directory.leases.get(session.granted.pop(request, LeaseId(0)))
        if lease is None:
            return
        self.directory.counters["abandoned"] += 1
        if lease.is_write:
            self.directory.commit(lease.id, [False] * len(lease.rows))
        else:
            self.directory.release(lease.id)

    def _quiesced(self, session: Session, message: wire.Quiesced) -> None:
        if message.generation == self.facts.generation and session.engine is not None:
            self._old_mappers.pop(session.engine, None)
            self.directory.may_grant = not self._old_mappers and not self.is_ending

    def _purge(self, session: Session, message: wire.Purge, now: float) -> None:
        tiering, names = self.directory.tiering, self.directory.tiering.names
        known = {*self.directory.spaces} | tiering.presence.namespaces()
        target: NamespaceId | None = None
        refusal = None
        if message.namespace:
            matches = [n for n in known if n.hex().startswith(message.namespace)]
            target = matches[0] if matches else None
            is_whole = len(message.namespace) == 64
            if not matches and is_whole and not all(tiering.promoter.known_whole):
                target = NamespaceId(bytes.fromhex(message.namespace))  # a tier may know it
            elif len(matches) != 1:
                refusal = f"{len(matches)} namespaces begin with {message.namespace}"
        if tiering.tasks >= TASKS_MAX:
            refusal = f"{TASKS_MAX} purges and checks wait for tiers; try again later"
        for name in message.tiers:
            if name not in ("dram", *names):
                refusal = f"no tier is named {name}; there are {', '.join(['dram', *names])}"
        if refusal is not None:
            self._send(session.peer, wire.Failed(message.seq, "refused", refusal))
            return
        age = message.older_than_s or None
        dropped = None
        if not message.tiers or "dram" in message.tiers:
            is_here = target is None or target in self.directory.spaces
            dropped = self.directory.purge(target, age, now) if is_here else 0
        tiers = [t for t, name in enumerate(names) if not message.tiers or name in message.tiers]
        task = tiering.purge(target, tiers, age, dropped, now)
        self._tasks[task] = (session.peer, message.seq, False)

    def _check(self, session: Session, message: wire.Check, now: float) -> None:
        try:
            self.directory.check()
        except AssertionError as error:
            logger.error("the books are wrong: %s", error)
            self._send(session.peer, wire.Failed(message.seq, "check", str(error)))
            return
        if self.directory.tiering.tasks >= TASKS_MAX:
            text = f"{TASKS_MAX} purges and checks wait for tiers; try again later"
            self._send(session.peer, wire.Failed(message.seq, "refused", text))
            return
        task = self.directory.tiering.check(now)
        self._tasks[task] = (session.peer, message.seq, True)

    def _count_outcome(self, message: wire.Outcome) -> None:
        report = Report(1, message.device, tuple(message.tiers), message.computed)
        self.outcomes.append(report)
        self.outcomes_total = self.outcomes_total + report

    # ---- helpers -------------------------------------------------------------------------------

    def _space(self, session: Session, namespace: bytes) -> NamespaceId:
        space = NamespaceId(namespace)
        if space not in session.spaces:
            raise ProtocolError("the namespace is not attached in this session")
        return space

    def _owns(self, session: Session, lease_id: int) -> bool:
        lease = self.directory.leases.get(LeaseId(lease_id))
        if lease is None or lease.engine != session.engine:
            self.directory.counters["unknown_leases"] += 1
            return False
        return True

    @staticmethod
    def _remember(session: Session, seq: int, lease: LeaseId) -> None:
        """Note a grant until it can no longer be abandoned: a client abandons in FIFO order."""
        if lease:
            session.granted[seq] = lease
            if len(session.granted) > wire.LEASES_MAX:
                del session.granted[next(iter(session.granted))]

    @property
    def _ignored(self) -> int:
        return self.directory.counters["unknown_leases"]

    def _done(self, session: Session, seq: int, count: int) -> None:
        self._send(session.peer, wire.Done(seq, self._ignored, count))

    def _send(self, peer: bytes, message: wire.Reply) -> None:
        self._out.append((peer, wire.encode(message)))

    def _push(self, event: Event) -> None:
        match event:
            case TaskEnded():
                self._answer_task(event)
            case Ready() if event.engine in self._peers:
                self._send(self._peers[event.engine], wire.ReadyPush(
                    event.lease, wire.pack_offsets(event.offsets), event.sources, event.pending,
                    event.is_promoting,
                ))  # fmt: skip
            case Recall() if event.engine in self._peers:
                self._send(self._peers[event.engine], wire.RecallPush(event.lease))
            case _:
                return

    def _answer_task(self, event: TaskEnded) -> None:
        peer, seq, is_check = self._tasks.pop(event.task, (b"", 0, False))
        if peer not in self._sessions:
            return
        if is_check:
            blocks = sum(len(s.index) for s in self.directory.spaces.values())
            self._send(peer, wire.CheckedReply(seq, blocks, list(event.problems)))
        else:
            self._send(peer, wire.PurgedReply(seq, event.dropped, list(event.problems)))
