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
from tierkv.bench.demo.workload import (
    CONVERSATIONS,
    TURNS,
    converse,
    negative_control,
    options_of,
    summarise,
    tierkv_tree,
)
from tierkv.bench.tiny_models import make_model


def run_modes(model: Path, run: Path) -> dict[str, Any]:
    """All modes, one after the other, and the negative control."""
    log = run / "engines.log"
    tree = tierkv_tree(run)
    modes: dict[str, Any] = {}

    def tell(name: str) -> None:
        print(f"[{len(modes) + 1}/5] {name} ...", file=sys.stderr, flush=True)

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
    modes["dram"] = summarise(converse(engine), reference)

    tell("dram_after_engine_restart: the engine is killed with SIGKILL, the daemon lives")
    engine.kill()
    engine = Engine(options_of(model, tree, True), log)
    modes["dram_after_engine_restart"] = summarise(converse(engine), reference)

    tell("second_engine: another engine beside it, which never computed these tokens")
    second = Engine(options_of(model, tree, True), log)
    modes["second_engine"] = summarise(converse(second), reference)
    second.stop()

    print("negative control: one block in the pool is overwritten ...", file=sys.stderr, flush=True)
    control = negative_control(engine, run, reference[-1])
    engine.stop()
    return {"modes": modes, "negative_control": {"dram": control}}


def print_table(result: dict[str, Any]) -> None:
    """The figures for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{CONVERSATIONS} conversations, {TURNS} turns, vLLM on CPU")
    for name in ("mode", "computed", "from device", "from DRAM", "TTFT p50 ms", "outputs equal"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, row in result["modes"].items():
        hits = row["hit_tokens"]
        table.add_row(
            name, str(row["computed_tokens"]), str(hits["device"]), str(hits["dram"]),
            f"{row['ttft_ms_p50']:.1f}", "yes" if row["outputs_equal"] else "NO",
        )  # fmt: skip
    Console().print(table)
    control = result["negative_control"]["dram"]
    changed = "changed" if control["output_changed"] else "DID NOT CHANGE"
    print(f"negative control: one block overwritten in the pool, the output {changed}")


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong with the figures; empty if nothing."""
    modes = result["modes"]
    wrong = [f"{name}: outputs differ" for name, row in modes.items() if not row["outputs_equal"]]
    for name in ("dram", "dram_after_engine_restart", "second_engine"):
        if modes[name]["computed_tokens"] >= modes["device_only"]["computed_tokens"]:
            wrong.append(f"{name}: computes no less than device_only")
        if modes[name]["hit_tokens"]["dram"] <= 0:
            wrong.append(f"{name}: no hits from DRAM")
    control = result["negative_control"]["dram"]
    if not (control["output_changed"] and control["equal_before"] and control["hit_tokens"] > 0):
        wrong.append("the negative control proves nothing")
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
    with tempfile.TemporaryDirectory(prefix="tierkv-demo-") as folder:
        result = run_modes(model, Path(folder))
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
