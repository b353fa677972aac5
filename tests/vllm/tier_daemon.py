"""A daemon whose tiers fail on command: ``tier_daemon.py CONTROL`` with its configuration on stdin.

Its I/O processes are this file too; each wraps the configured store in a `FaultTier` that obeys
`CONTROL/<type>`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tierkv.config import NodeConfig
from tierkv.service import io_process
from tierkv.service.daemon import serve
from tierkv.testing import FaultTier
from tierkv.tiers import open_tier

if __name__ == "__main__":
    control = sys.argv[1]
    if sys.argv[2:] == ["io"]:
        io_process.main(
            lambda settings: FaultTier(open_tier(settings), Path(control, settings.type))
        )
    else:
        config = NodeConfig.model_validate_json(sys.stdin.read())
        serve(config, io_command=[sys.executable, __file__, control, "io"])
