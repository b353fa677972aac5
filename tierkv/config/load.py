"""Reads the configuration: files, inline trees and overrides become one checked model."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tierkv.config.models import TierConfig, TierKVConfig
from tierkv.errors import ConfigError

ENV_PREFIX = "TIERKV_"
FILE_BYTES_MAX = 1 << 20


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
            is_group = isinstance(item["input"], Mapping) and item["type"] == "value_error"
            is_open = not is_group and ".options" not in path
            got = "" if not is_open else f" (got {item['input']!r})"  # a group may hold a secret
            message = f"{path or 'configuration'}: {text}{got}"
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
