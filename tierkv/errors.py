"""Operating errors. Each message names the thing, the value and the remedy.

Expected outcomes are values, not errors; bugs are assertions. What stands here is the third kind:
something outside the program is wrong and somebody can put it right.
"""


class TierKVError(Exception):
    """Base of all operating errors of TierKV."""


class ConfigError(TierKVError):
    """A configuration file, key or value cannot be used."""


class LayoutMismatchError(TierKVError):
    """KV cache tensors or ranks do not have a layout that can be cached correctly."""


class ProtocolError(TierKVError):
    """A peer sent something that the wire protocol does not allow; its session ends."""


class DaemonUnavailableError(TierKVError):
    """The daemon is not there, does not answer, or refuses this client."""


class RefusedError(DaemonUnavailableError):
    """The daemon answered that it will not do this.

    Attributes:
        code: see `tierkv.service.wire.Failed`.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class PoolError(TierKVError):
    """The shared-memory pool cannot be created, adopted or attached."""


class TierError(TierKVError):
    """A secondary tier cannot be used."""


class TierUnavailableError(TierError):
    """The store of a tier does not answer, or refuses; nothing was done."""


class LoadFailedError(TierKVError):
    """Blocks of a hit could not be copied; their device memory is undefined. Compute them."""


class UsageError(TierKVError):
    """A caller of the SDK broke one of its rules; nothing was done."""
