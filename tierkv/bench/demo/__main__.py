"""Run the demonstration: ``python -m tierkv.bench.demo``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tierkv.bench.demo.child import Engine
from tierkv.bench.demo.node import SOURCES, DemoNode
from tierkv.bench.demo.workload import (
    BLOCK_TOKENS,
    CONVERSATIONS,
    TURNS,
    converse,
    hits_since,
    negative_control,
    options_of,
    summarise,
    tierkv_tree,
)
from tierkv.bench.tiny_models import make_model

RESTART_WAIT_S = 60.0


def run_modes(model: Path, run: Path) -> dict[str, Any]:
    """All modes, one after the other, and the negative controls."""
    log = run / "engines.log"
    tree, node = tierkv_tree(run), DemoNode(run)
    modes: dict[str, Any] = {}

    def tell(name: str) -> None:
        print(f"[{len(modes) + 1}/6] {name} ...", file=sys.stderr, flush=True)

    def measure(engine: Engine) -> dict[str, Any]:
        before = node.tokens()
        results = converse(engine)
        return summarise(results, reference, hits_since(node, before, len(results)))

    tell("no_cache: prefix caching off")
    engine = Engine(options_of(model, None, False), log)
    reference = converse(engine)
    modes["no_cache"] = summarise(reference, None)
    engine.stop()

    tell("device_only: vLLM's own prefix cache")
    engine = Engine(options_of(model, None, True), log)
    modes["device_only"] = summarise(converse(engine), reference)
    engine.stop()

    tell("dram: with TierKV, daemon started by the engine")
    engine = Engine(options_of(model, tree, True), log)
    modes["dram"] = measure(engine)

    tell("dram_after_engine_restart: the engine is killed with SIGKILL, the daemon lives")
    engine.kill()
    engine = Engine(options_of(model, tree, True), log)
    modes["dram_after_engine_restart"] = measure(engine)

    tell("second_engine: another engine beside it, which never computed these tokens")
    second = Engine(options_of(model, tree, True), log)
    modes["second_engine"] = measure(second)
    second.stop()

    tell("ssd_after_daemon_restart: the daemon is killed with SIGKILL, the engine starts another")
    node.wait_written()
    node.kill_daemon()
    restart_daemon(engine, node)
    engine.reset_device_cache()
    modes["ssd_after_daemon_restart"] = measure(engine)

    print(
        "negative controls: one block in the pool, then one file ...", file=sys.stderr, flush=True
    )
    controls = {tier: negative_control(engine, node, reference[-1], tier) for tier in SOURCES}
    engine.stop()
    return {"modes": modes, "negative_control": controls}


def restart_daemon(engine: Engine, node: DemoNode) -> None:
    """Let the engine notice that its daemon is gone; an engine looks when it works."""
    end = time.monotonic() + RESTART_WAIT_S
    while not node.socket.exists() or not node.is_serving():
        if time.monotonic() > end:
            raise SystemExit(f"no daemon came back within {RESTART_WAIT_S:.0f} s")
        engine.generate([1] * BLOCK_TOKENS, 1)
    engine.generate([1] * BLOCK_TOKENS, 1)


def print_table(result: dict[str, Any]) -> None:
    """The figures for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{CONVERSATIONS} conversations, {TURNS} turns, vLLM on CPU")
    for name in ("mode", "computed", "from device", "from DRAM", "from SSD", "TTFT p50 ms",
                 "outputs equal"):  # fmt: skip
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, row in result["modes"].items():
        hits = row["hit_tokens"]
        table.add_row(
            name, str(row["computed_tokens"]), str(hits["device"]), str(hits["dram"]),
            str(hits["fs"]), f"{row['ttft_ms_p50']:.1f}", "yes" if row["outputs_equal"] else "NO",
        )  # fmt: skip
    Console(width=112).print(table)
    for tier, control in result["negative_control"].items():
        changed = "changed" if control["output_changed"] else "DID NOT CHANGE"
        where = "in the pool" if tier == "dram" else "on the SSD, with a valid frame"
        print(f"negative control: one block overwritten {where}, the output {changed}")


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong with the figures; empty if nothing."""
    modes = result["modes"]
    wrong = [f"{name}: outputs differ" for name, row in modes.items() if not row["outputs_equal"]]
    for name, tier in (
        ("dram", "dram"),
        ("dram_after_engine_restart", "dram"),
        ("second_engine", "dram"),
        ("ssd_after_daemon_restart", "fs"),
    ):
        if modes[name]["computed_tokens"] >= modes["device_only"]["computed_tokens"]:
            wrong.append(f"{name}: computes no less than device_only")
        if modes[name]["hit_tokens"][tier] <= 0:
            wrong.append(f"{name}: no hits from {tier}")
    for tier, control in result["negative_control"].items():
        if not (control["output_changed"] and control["equal_before"] and control["hit_tokens"]):
            wrong.append(f"the negative control of {tier} proves nothing")
    return wrong


def main() -> int:
    """Run it, print a table, write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tierkv.bench.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--models", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    start = time.monotonic()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    model = make_model(arguments.models / "gqa-0.2").resolve()
    with tempfile.TemporaryDirectory(prefix="tierkv-demo-", ignore_cleanup_errors=True) as folder:
        try:
            result = run_modes(model, Path(folder))
        finally:
            DemoNode(Path(folder)).stop_daemon()
    result["seconds"] = round(time.monotonic() - start, 1)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)
    print(f"{result['seconds']} s; figures in {arguments.output}")
    wrong = verdict(result)
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
