"""The keys of the configuration, their defaults and what they are for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tierkv.config.environment import default_run_directory
from tierkv.errors import ConfigError
from tierkv.plugins import OUR_POLICIES, OUR_TIERS, check_policy, check_tier
from tierkv.units import (
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)

_AS_TEXT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]})
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str),
    Field(ge=0),
    _AS_TEXT,
]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    Field(ge=0, allow_inf_nan=False),
    _AS_TEXT,
]
Share = Annotated[
    float,
    BeforeValidator(parse_share),
    PlainSerializer(format_share, return_type=str),
    Field(gt=0, le=1),
    _AS_TEXT,
]
_SECRET = re.compile(
    r"secret|token|password|credential|access_key|customer_key|\bsas\b", re.IGNORECASE
)
_USER_IN_URL = re.compile("//[^/]*@")
_DEADLINES = {"object": 10.0}
_DEADLINE_S = 2.0
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


def _checked(check: Callable[[str], None], name: str) -> str:
    """A name that somebody has; the package behind it is not imported."""
    try:
        check(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return name


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False)


class DramConfig(_Model):
    """The DRAM pool: one shared-memory file for all engines of the node."""

    capacity: Size | Literal["auto"] = Field(
        "auto",
        description="Total size of the pool for the whole node, never per rank. "
        "`auto` takes 25 % of the available memory.",
    )
    directory: Path = Field(
        Path("/dev/shm"), description="Directory of the pool file; should be a memory file system."
    )
    extent_unit: Size = Field(
        64 << 20, description="Granularity in which model layouts share the pool.", ge=4096
    )
    hugepages: Literal["auto", "off"] = Field(
        "auto", description="`auto` asks the kernel for transparent huge pages and reports it."
    )
    numa: Literal["interleave", "local", "bind"] = Field(
        "interleave",
        description="NUMA nodes of the pool's memory. `interleave`: all in turn. `bind`: only "
        "those of the CPUs that the daemon may run on. `local`: the kernel chooses, mostly the "
        "node where the daemon starts. A changed value takes effect with a new pool.",
    )
    pinned_share_max: Share = Field(
        0.5,
        description="Share of the pool that waiting requests may pin before leases are recalled.",
    )
    promote_share_max: Share = Field(
        0.25, description="Share of the pool that may be filled from tiers below at a time."
    )
    clean_tail: Share = Field(
        0.15,
        description="Least share of a layout's slots, coldest first, that write-back keeps "
        "written, so that room can be made without a wait; more if more was needed at once.",
    )
    dirty_max: Share = Field(
        0.5,
        description="Share of a layout's slots that may wait to be written before write-back "
        "works at full speed, whatever their age.",
    )

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.absolute()  # the daemon runs elsewhere than the engine

    @field_validator("capacity")
    @classmethod
    def _not_zero(cls, value: int | str) -> int | str:
        if value == 0:
            raise ValueError("must be above 0; give a size such as 64GiB, or auto")
        return value


class TierConfig(_Model):
    """One secondary tier below DRAM."""

    type: str = Field(
        examples=list(OUR_TIERS),
        description="Kind of tier. `fs`: one file per block on an SSD. `object`: an object store. "
        "`memory`: a copy in the I/O process, for tests. Installed packages may add others, which "
        "use `path`, `url`, `capacity` and `options` as they say.",
    )
    path: Path | None = Field(None, description="`fs`: directory of the blocks; ours alone.")
    url: str | None = Field(
        None,
        min_length=1,
        description="`object`: the store and a prefix, for example `s3://bucket/tierkv`. "
        "Credentials come from the environment.",
    )
    options: dict[str, str] = Field(
        {}, description="`object`: options of the store's client, for example `endpoint`."
    )
    capacity: Size | Literal["auto"] = Field(
        "auto",
        description="Most bytes that the tier may hold. `auto`: for `fs` half of the free space, "
        "`memory` needs a size; `object` takes none.",
    )
    reserve: Share = Field(
        0.05, description="`fs`: share of the file system's space and inodes left to others."
    )
    io: Literal["auto", "direct", "buffered"] = Field(
        "auto",
        description="`fs`: `direct` bypasses the page cache (O_DIRECT), `buffered` suits network "
        "file systems, `auto` tries `direct` once.",
    )
    deadline: Duration | None = Field(
        None,
        gt=0,
        description="An operation that takes longer is a miss; an I/O process whose oldest "
        "operation is older than three deadlines is replaced. Default: 2s, `object` 10s.",
    )
    read_threads: int = Field(4, ge=1, le=64, description="Reads that run at a time.")
    write_threads: int = Field(2, ge=1, le=64, description="Writes that run at a time.")
    backlog_max: Size = Field(
        1 << 30, description="Bytes of blocks that may wait to be written; more are not written."
    )
    promote_min_tokens: int = Field(
        0, ge=0, description="Shortest run of tokens that is worth a read from this tier."
    )
    write_policy: WritePolicy | None = Field(
        None, description="Overrides `node.write_policy` for this tier."
    )
    hits_min: int = Field(
        2,
        ge=1,
        le=255,
        description="`write_through_selective` writes a block once it was stored or used this "
        "often.",
    )

    @property
    def deadline_s(self) -> float:
        """The deadline, with the default of the type filled in."""
        return (
            self.deadline if self.deadline is not None else _DEADLINES.get(self.type, _DEADLINE_S)
        )

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value == "mooncake":
            raise ValueError(
                "tier type 'mooncake' is not available in this version; use fs or object"
            )
        return _checked(check_tier, value)

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value.absolute() if value is not None else None

    @model_validator(mode="after")
    def _is_complete(self) -> TierConfig:
        if self.type == "fs" and self.path is None:
            raise ValueError("a tier of type fs needs a path, for example path: /var/cache/tierkv")
        if self.type == "object" and self.url is None:
            raise ValueError("a tier of type object needs a url, for example s3://bucket/tierkv")
        if self.type == "memory" and self.capacity == "auto":
            raise ValueError("a tier of type memory needs a capacity, for example 1GiB")
        if self.type == "object" and self.capacity != "auto":
            raise ValueError("a tier of type object has no capacity; bound the bucket instead")
        self._hold_no_secret()
        if self.capacity == 0:
            raise ValueError("capacity must be above 0; remove the tier instead")
        return self

    def _hold_no_secret(self) -> None:
        """A configuration is told to every client and to the log."""
        secret = [
            name
            for name, value in self.options.items()
            if _SECRET.search(name) or _USER_IN_URL.search(value)
        ]
        url = self.url or ""
        if secret or _USER_IN_URL.search(url) or "?" in url or "@" in url.partition("/")[0]:
            where = f"options ({', '.join(secret)})" if secret else "url"
            raise ValueError(f"{where}: credentials belong into the environment of the daemon")


class ServiceConfig(_Model):
    """The daemon: how it is started and found."""

    mode: Literal["auto", "external"] = Field(
        "auto",
        description="`auto`: the first engine starts the daemon, and any engine starts it anew "
        "after a crash. `external`: never start one, only connect.",
    )
    socket: Path | None = Field(
        None,
        description="Unix socket of the daemon; its directory also holds locks. Default: "
        "`daemon.sock` in a per-user run directory.",
    )
    linger: Duration = Field(
        300.0, description="How long a daemon started by an engine outlives its last engine."
    )
    start_wait_max: Duration = Field(
        30.0,
        description="Longest pause between attempts to start the daemon; the first pause is 1 s, "
        "each later one twice as long.",
    )
    quarantine_min: Duration = Field(
        5.0,
        description="Time between an engine's death and the reuse of its slots; drivers may "
        "end their transfers late.",
    )
    flush_budget: Duration = Field(
        10.0,
        description="How long a daemon that is told to stop writes owed blocks to durable tiers. "
        "What is left then is lost, and the log says how much.",
    )

    @field_validator("socket")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.name:
            raise ValueError("must name a file, for example /run/tierkv/daemon.sock")
        return value.absolute() if value is not None else None

    @property
    def socket_path(self) -> Path:
        """The socket, with the per-user default filled in."""
        return self.socket if self.socket is not None else default_run_directory() / "daemon.sock"


class NodeConfig(_Model):
    """Everything that belongs to the daemon of a node."""

    dram: DramConfig = DramConfig()
    tiers: tuple[TierConfig, ...] = Field((), description="Secondary tiers, fastest first.")
    write_policy: WritePolicy = Field(
        "write_back",
        description="When blocks are copied to secondary tiers. `write_back`: before DRAM "
        "gives them up. `write_through`: as soon as they are stored. `write_through_selective`: "
        "once they were used `hits_min` times.",
    )
    eviction: str = Field(
        "slru",
        examples=list(OUR_POLICIES),
        description="Order in which DRAM gives up blocks. `lru`: the least recently used first. "
        "`slru`: those used once before those used again. `arc`: a balance of the two that misses "
        "teach. Installed packages may add others.",
    )
    service: ServiceConfig = ServiceConfig()
    node_strict: bool = Field(
        False,
        description="Refuse an engine whose `node:` part differs from the daemon's instead of "
        "attaching it with a warning.",
    )

    @field_validator("eviction")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return _checked(check_policy, value)

    @field_validator("tiers")
    @classmethod
    def _one_per_type(cls, value: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        types = [tier.type for tier in value]
        if len(set(types)) != len(types):
            raise ValueError("holds one type twice; a tier's type is its name")
        return value


class EngineConfig(_Model):
    """Everything that an engine decides for itself."""

    block_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens per cached block; a multiple of the engine's block size. Default: "
        "the engine's block size, raised to 128 where it divides 128.",
    )
    swap_in_threshold: int = Field(
        256,
        ge=0,
        description="Swap in only if DRAM holds at least this many tokens more than "
        "the device (0 = always).",
    )
    store_mode: Literal["step", "layerwise"] = Field(
        "step",
        description="`step`: one batch after the forward, overlapping the next step. "
        "`layerwise`: each layer as soon as it is computed.",
    )
    load_mode: Literal["async", "layerwise"] = Field(
        "async",
        description="`async`: the request waits while its blocks are loaded between "
        "steps. `layerwise`: blocks are loaded during the forward, layer by layer.",
    )
    offload: Literal["eager"] = Field("eager", description="Offload a block when it is full.")
    offload_prompt_only: bool = Field(False, description="Do not store generated tokens.")
    request_deadline: Duration = Field(
        0.05, gt=0, description="How long the scheduler waits for one answer of the daemon."
    )
    promote_wait_max: Duration = Field(
        1.0, description="How long a request may wait for blocks that are on their way to DRAM."
    )
    fill_wait_max: Duration | Literal["step"] = Field(
        "step",
        description="How long a request may wait for blocks that another engine is "
        "writing; `step`: ask again once.",
    )
    parked_loads_max: int = Field(
        64, ge=1, description="Asynchronous loads that one engine may have in flight."
    )
    model_version: str | None = Field(
        None,
        min_length=1,
        description="Explicit identity of the weights; replaces the fingerprint of their files.",
    )
    allow_failed_requests: bool = Field(
        False, description="Accept vLLM's load failure policy `fail`, which fails requests."
    )

    @field_validator("fill_wait_max", mode="before")
    @classmethod
    def _fill_wait(cls, value: object) -> object:
        return value if value == "step" else parse_duration(value)


class TierKVConfig(_Model):
    """The whole configuration."""

    node: NodeConfig = NodeConfig()
    engine: EngineConfig = EngineConfig()
