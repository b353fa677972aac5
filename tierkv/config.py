"""The configuration: one YAML file, a ``node:`` part and an ``engine:`` part.

``node:`` belongs to the daemon (the engine that starts it rules), ``engine:`` to each engine.
The same tree is accepted inline in vLLM's ``kv_connector_extra_config``. Environment variables
``TIERKV_NODE__DRAM__CAPACITY=4GiB`` override single keys (two underscores between levels).
This is the only module that reads the environment for settings.
"""

from __future__ import annotations

import difflib
import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tierkv.errors import ConfigError
from tierkv.units import (
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_share,
    parse_size,
)

ENV_PREFIX = "TIERKV_"
FILE_BYTES_MAX = 1 << 20

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
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


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
    pinned_share_max: Share = Field(
        0.5,
        description="Share of the pool that waiting requests may pin before leases are recalled.",
    )
    promote_share_max: Share = Field(
        0.25, description="Share of the pool that may be filled from tiers below at a time."
    )
    clean_tail: Share = Field(
        0.15,
        description="Share of a layout's slots, coldest first, that write-back keeps written, so "
        "that room can be made without a wait.",
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

    type: Literal["memory", "fs", "object", "mooncake"] = Field(
        description="Kind of tier. `fs`: one file per block on an SSD. `object`: an object store. "
        "`memory`: a copy in the I/O process, for tests."
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
        "for `object` no bound of ours; `memory` needs a size.",
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

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value.absolute() if value is not None else None

    @model_validator(mode="after")
    def _is_complete(self) -> TierConfig:
        if self.type == "mooncake":
            raise ValueError(
                "tier type 'mooncake' is not available in this version; use fs or object"
            )
        if self.type == "fs" and self.path is None:
            raise ValueError("a tier of type fs needs a path, for example path: /var/cache/tierkv")
        if self.type == "object" and self.url is None:
            raise ValueError("a tier of type object needs a url, for example s3://bucket/tierkv")
        if self.type == "memory" and self.capacity == "auto":
            raise ValueError("a tier of type memory needs a capacity, for example 1GiB")
        if self.capacity == 0:
            raise ValueError("capacity must be above 0; remove the tier instead")
        return self


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
    eviction: Literal["lru"] = Field("lru", description="Order in which DRAM gives up blocks.")
    service: ServiceConfig = ServiceConfig()
    node_strict: bool = Field(
        False,
        description="Refuse an engine whose `node:` part differs from the daemon's instead of "
        "attaching it with a warning.",
    )

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


def default_run_directory() -> Path:
    """Per-user directory of socket and locks: below XDG_RUNTIME_DIR, else the temporary one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "tierkv"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"tierkv-{user}"


def python_hash_seed() -> str | None:
    """PYTHONHASHSEED if it fixes anything: the root of an engine's block hashes."""
    seed = os.environ.get("PYTHONHASHSEED")
    return None if seed in (None, "", "random") else seed


def known_keys() -> list[str]:
    """Every key of the configuration as a dotted path, leaves and groups."""
    return sorted(_keys_below(TierKVConfig, ""))


def _keys_below(model: type[BaseModel], prefix: str) -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        names.append(path)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += _keys_below(kind, path + ".")
        elif name == "tiers":
            names += _keys_below(TierConfig, path + "[].")
    return names


_UNION_BRANCHES = ("int", "float", "literal[", "constrained-", "function-", "lax-or-strict")


def _path_of(location: tuple[int | str, ...], is_key: bool) -> str:
    """Dotted path of an error. The last part is the key itself if `is_key`."""
    text = ""
    for at, part in enumerate(location):
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.startswith(_UNION_BRANCHES) and not (is_key and at == len(location) - 1):
            continue  # the branch of a union, not a key
        else:
            text += f".{part}" if text else part
    return text


def _nearest(path: str) -> str | None:
    generic = re.sub(r"\[\d+\]", "[]", path)
    close = difflib.get_close_matches(generic, known_keys(), n=1, cutoff=0.6)
    if close:
        return close[0]
    leaf = generic.rsplit(".", 1)[-1]
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known_keys()}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


def _one_line(error: ValidationError, source: str) -> str:
    messages = []
    seen = set()
    for item in error.errors(include_url=False):
        path = _path_of(item["loc"], item["type"] == "extra_forbidden")
        if item["type"] == "extra_forbidden":
            near = _nearest(path)
            message = f"{path}: unknown key" + (f"; did you mean {near}?" if near else "")
        else:
            text = item["msg"].removeprefix("Value error, ")
            message = f"{path or 'configuration'}: {text} (got {item['input']!r})"
        if path not in seen:  # a union reports each of its branches
            messages.append(message)
        seen.add(path)
    return f"{source}: " + "; ".join(messages)


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> TierKVConfig:
    """Build the configuration from a tree of plain values, environment overrides applied.

    Raises:
        ConfigError: one line that names the key, the value and the remedy.
    """
    merged = _with_overrides(tree, os.environ)
    try:
        return TierKVConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_one_line(error, source)) from error


def load_config(path: str | Path) -> TierKVConfig:
    """Read a YAML file.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or a key is wrong.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: {len(raw)} bytes; a configuration has at most {FILE_BYTES_MAX}")
    try:
        tree = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}, column {where.column + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"{file}{line}: damaged YAML: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: damaged YAML: {error or 'nested too deeply'}") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must hold a mapping with node: and engine:")
    return parse_config(tree, str(file))


def from_extra_config(extra: Mapping[str, Any]) -> TierKVConfig:
    """Configuration from vLLM's ``kv_connector_extra_config``: ``config: FILE`` or the tree itself.

    Raises:
        ConfigError: see `parse_config`; also when a file and keys are both given.
    """
    if "config" not in extra:
        return parse_config(extra, "kv_connector_extra_config")
    others = sorted(set(extra) - {"config"})
    if others:
        raise ConfigError(
            f"kv_connector_extra_config: give either config or keys, not both (got {others})"
        )
    if not isinstance(extra["config"], str | Path):
        raise ConfigError(
            f"kv_connector_extra_config.config: must name a file (got {extra['config']!r})"
        )
    return load_config(extra["config"])


def _with_overrides(tree: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    merged: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()
    }
    for name, text in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        parts = name[len(ENV_PREFIX) :].lower().split("__")
        at = merged
        for part in parts[:-1]:
            below = at.get(part)
            at[part] = dict(below) if isinstance(below, Mapping) else {}
            at = at[part]
        try:
            at[parts[-1]] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: {text!r} is no YAML value; quote it") from error
    return merged


def block_tokens_of(configured: int | None, engine_block_tokens: int) -> int:
    """Tokens per TierKV block for an engine block size.

    Raises:
        ConfigError: the configured value is no multiple; names the two nearest that are.
    """
    target = 128
    if configured is None:
        fits = engine_block_tokens < target and target % engine_block_tokens == 0
        return target if fits else engine_block_tokens
    if configured % engine_block_tokens == 0:
        return configured
    low = configured // engine_block_tokens * engine_block_tokens
    nearest = [str(v) for v in (low, low + engine_block_tokens) if v > 0]
    raise ConfigError(
        f"engine.block_tokens: {configured} is no multiple of the engine's block size "
        f"{engine_block_tokens}; use {' or '.join(nearest)}"
    )


def differing_keys(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Keys whose values differ, as ``key: ours / theirs`` texts."""
    found: list[str] = []
    for name in sorted({*ours, *theirs}):
        left, right = ours.get(name), theirs.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differing_keys(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append(f"{prefix}{name}: {left} / {right}")
    return found
