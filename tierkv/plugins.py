"""Names of eviction policies and of tiers: ours, and those that installed packages add.

A package adds a name by an entry point: group `tierkv.eviction`, something that makes an
`EvictionPolicy` when it is called without arguments, or group `tierkv.tiers`, something that makes
a `Tier` from `TierSettings`. Normally both are the class.

Rule 1: a package is imported only for a name that the configuration uses. Whether a name is known
is answered from the metadata of the installed packages alone.
Rule 2: a tier's package is imported by `load_tier` alone, so in its I/O process and nowhere else.
Rule 3: our names are ours. A package that takes one of them is refused and never preferred, and so
are two packages that take the same name: nobody should have to guess whose code runs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from tierkv.core.eviction.base import EvictionPolicy
    from tierkv.tiers.base import Tier, TierSettings

POLICY_GROUP = "tierkv.eviction"
TIER_GROUP = "tierkv.tiers"
OUR_POLICIES = ("lru", "slru", "arc")
OUR_TIERS = ("memory", "fs", "object")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")  # it becomes part of the names of locks and counters
_KINDS = {POLICY_GROUP: "eviction policy", TIER_GROUP: "tier"}
_OURS = {POLICY_GROUP: OUR_POLICIES, TIER_GROUP: OUR_TIERS}
# Names that stand beside those of tiers in statistics, and one that will be ours.
_RESERVED = {POLICY_GROUP: (), TIER_GROUP: ("dram", "device", "computed", "mooncake")}


def known_policies() -> list[str]:
    """What `node.eviction` may say: ours first, then those of packages."""
    return _known(POLICY_GROUP)


def known_tiers() -> list[str]:
    """What `node.tiers[].type` may say: ours first, then those of packages."""
    return _known(TIER_GROUP)


def check_policy(name: str) -> None:
    """Look whether a policy of this name can be asked for; imports nothing of it.

    Raises:
        ConfigError: nobody has it, or it is not clear who; names those that are known.
    """
    _find(POLICY_GROUP, name)


def check_tier(name: str) -> None:
    """Look whether a tier of this name can be asked for; imports nothing of it.

    Raises:
        ConfigError: nobody has it, or it is not clear who; names those that are known.
    """
    _find(TIER_GROUP, name)


def policy_factory(name: str) -> Callable[[], EvictionPolicy]:
    """What makes a policy of this name; one policy object serves one namespace.

    A package's policy is made once on trial, so that a broken one stops the start and nothing else.

    Raises:
        ConfigError: see `check_policy`; or the package cannot be imported, or makes something else.
    """
    from tierkv.core.eviction.base import EvictionPolicy

    entry = _find(POLICY_GROUP, name)
    if entry is None:
        return _our_policy(name)
    make = _load(entry)
    try:
        made = make()
    except Exception as error:
        raise ConfigError(f"{_title(entry)} cannot be made: {_text_of(error)}") from error
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(
            f"{_title(entry)} makes {_kind_of(made)}; it must subclass "
            "tierkv.core.eviction.base.EvictionPolicy"
        )

    def make_policy() -> EvictionPolicy:
        policy = make()
        assert isinstance(policy, EvictionPolicy), "it was one when it was tried"
        return policy

    return make_policy


def load_tier(settings: TierSettings) -> Tier:
    """Import the package of a tier and open its store. Blocks; only inside the I/O process.

    Raises:
        ConfigError: see `check_tier`; or the package cannot be imported, or makes something else.
        Exception: whatever opening the store raises.
    """
    from tierkv.tiers.base import Tier

    entry = _find(TIER_GROUP, settings.type)
    assert entry is not None, "our own tiers are opened by `open_tier`"
    tier = _load(entry)(settings)
    if not isinstance(tier, Tier):
        raise ConfigError(
            f"{_title(entry)} makes {_kind_of(tier)}; it must subclass tierkv.tiers.base.Tier"
        )
    if tier.info.type != settings.type:
        tier.close()
        raise ConfigError(
            f"{_title(entry)} says of itself that its type is '{tier.info.type}'; "
            "TierInfo.type and the entry point must have one name"
        )
    return tier


# ---- steps -------------------------------------------------------------------------------------


def _our_policy(name: str) -> Callable[[], EvictionPolicy]:
    match name:
        case "lru":
            from tierkv.core.eviction.lru import Lru

            return Lru
        case "slru":
            from tierkv.core.eviction.slru import Slru

            return Slru
        case _:
            from tierkv.core.eviction.arc import Arc

            assert name == "arc", "every name of ours is made here"
            return Arc


def _entries(group: str) -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and not every command needs it

    return list(entry_points(group=group))


def _known(group: str) -> list[str]:
    ours = _OURS[group]
    theirs = {e.name for e in _entries(group) if _NAME.fullmatch(e.name)}
    return [*ours, *sorted(theirs - {*ours, *_RESERVED[group]})]


def _find(group: str, name: str) -> EntryPoint | None:
    """The one entry point of a name; None if the name is ours.

    Raises:
        ConfigError: see `check_policy`.
    """
    kind = _KINDS[group]
    found = [entry for entry in _entries(group) if entry.name == name]
    packages = " and ".join(sorted(_package_of(entry) for entry in found))
    if found and name in {*_OURS[group], *_RESERVED[group]}:
        raise ConfigError(
            f"{kind} '{name}' is a name of TierKV's own, and {packages} takes it too; uninstall "
            "that package, or have it choose another name"
        )
    if name in _OURS[group]:
        return None
    if len(found) > 1:
        raise ConfigError(f"{kind} '{name}' is offered by {packages}; uninstall all but one")
    if found and not _NAME.fullmatch(name):
        raise ConfigError(
            f"{kind} '{name}' of {packages} cannot be used under that name; it must consist of "
            "small letters, digits, - and _, at most 32"
        )
    if found:
        return found[0]
    known = _known(group)
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"; did you mean {near[0]}? Known" if near else "; known"
    raise ConfigError(
        f"no {kind} is named '{name}'{advice} are {', '.join(known)}; "
        "install the package that adds another"
    )


def _load(entry: EntryPoint) -> Callable[..., object]:
    try:
        loaded: object = entry.load()
    except Exception as error:  # an import runs the package's code, and may raise anything
        raise ConfigError(
            f"{_title(entry)} cannot be imported: {_text_of(error)}; repair that package"
        ) from error
    if not callable(loaded):
        raise ConfigError(f"{_title(entry)} is {_kind_of(loaded)}; it must name a class")
    return loaded


def _package_of(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"package {dist.name}" if dist is not None else "a package without a name"


def _title(entry: EntryPoint) -> str:
    return f"{_KINDS[entry.group]} '{entry.name}' of {_package_of(entry)} ({entry.value})"


def _text_of(error: Exception) -> str:
    if isinstance(error, TierKVError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _kind_of(thing: object) -> str:
    return f"a {type(thing).__name__}"
