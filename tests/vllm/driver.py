"""Drives an in-process vLLM engine step by step, and looks at the daemon behind it."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.processes import wait_for
from tierkv.bench.demo.engine import start_engine
from tierkv.bench.tiny_models import VOCABULARY
from tierkv.config import block_tokens_of
from tierkv.errors import DaemonUnavailableError
from tierkv.hashing import block_key
from tierkv.pool import DaemonLock, attach_pool
from tierkv.service import wire
from tierkv.service.client import Client
from tierkv.types import FRAME_BYTES

TOLERANCE = 1e-4
DAMAGE_MIN = 100 * TOLERANCE  # a damaged block changes log-probabilities by more
STEPS_MAX = 20_000


def prompt(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY) for _ in range(length)]


@dataclass
class Result:
    """What a request produced."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str | None
    top: dict[int, float]
    hashes: list[bytes]


def difference(one: Result, other: Result) -> float:
    """Largest difference of log-probabilities; infinite where tokens differ."""
    if one.tokens != other.tokens:
        return math.inf
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs)


def daemon_pid(run: Path) -> int:
    client = Client(run / "d.sock", None)
    try:
        client.connect(20)
        return client.welcome.pid
    finally:
        client.close()


def stop_daemon(run: Path) -> None:
    """End the daemon of a run directory, if there is one."""
    if DaemonLock(run / "d.sock").is_held():
        os.kill(daemon_pid(run), signal.SIGTERM)


class Driver:
    """One engine. `extra` is TierKV's configuration tree, or None for vLLM without TierKV."""

    def __init__(
        self,
        model: Path,
        run: Path | None,
        engine: dict | None = None,
        *,
        node: dict | None = None,
        gated: bool = False,
        transfer: dict | None = None,
        **options,
    ) -> None:
        self.run_directory = run
        settings = {"max_model_len": 2048, "block_size": 128, **options}
        page = settings["block_size"]
        self.engine_blocks = block_tokens_of((engine or {}).get("block_tokens"), page) // page
        if run is not None:
            tree = {
                "node": {
                    "dram": {"capacity": "64MiB", "extent_unit": "8MiB"},
                    **(node or {}),
                    "service": {
                        "socket": str(run / "d.sock"),
                        "linger": "60s",
                        "quarantine_min": "200ms",
                        **(node or {}).get("service", {}),
                    },
                },
                "engine": {"swap_in_threshold": 0, "request_deadline": "5s", **(engine or {})},
            }
            settings["kv_transfer_config"] = {
                "kv_connector": "GatedConnector" if gated else "TierKVConnector",
                "kv_connector_module_path": (
                    "tests.vllm.gates" if gated else "tierkv.connectors.vllm"
                ),
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": tree,
                **(transfer or {}),
            }
        self.llm = start_engine({"model": str(model), **settings})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self._count = 0
        if run is not None:
            self._wait_mapped()

    def _wait_mapped(self) -> None:
        """The worker maps the pool in the background; until then its copies fail."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().worker_half
        half = self.core.scheduler.connector.scheduler_half
        wait_for(lambda: half.is_ready, half.client, what="the namespace to be attached")
        stats = self.stats()
        wait_for(lambda: worker.is_mapped(stats["pool"], stats["generation"]), what="the pool")

    # ---- requests ------------------------------------------------------------------------------

    def add(self, tokens: list[int], new: int = 8, top: int = 1, **inputs) -> str:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            max_tokens=new, temperature=0, logprobs=top, ignore_eos=True, detokenize=False
        )
        self._count += 1
        name = f"r{self._count}"
        given = TokensPrompt(prompt_token_ids=tokens, **inputs)
        self.engine.add_request(name, given, sampling)
        return name

    def step(self) -> list:
        return self.engine.step()

    def finish(self, names: list[str]) -> list[Result]:
        """Step until all requests ended and nothing is left to commit."""
        final, hashes = {}, {}
        for _ in range(STEPS_MAX):
            for key, request in self.core.scheduler.requests.items():
                hashes[key] = [bytes(h) for h in request.block_hashes]
            if not self.engine.has_unfinished_requests():
                break
            for output in self.step():
                final[output.request_id] = output
        self.settle()
        return [self._result(final, hashes, name) for name in names]

    def settle(self) -> None:
        """Step on while copies are on their way."""
        for _ in range(STEPS_MAX):
            if not self.core.scheduler.has_requests():
                return
            self.core.step_fn()
        raise AssertionError("the engine never comes to rest")

    @staticmethod
    def _result(final: dict, hashes: dict, name: str) -> Result:
        # vLLM may add a suffix to request ids.
        output = next(v for k, v in final.items() if k == name or k.startswith(name + "-"))
        known = next((v for k, v in hashes.items() if k == name or k.startswith(name + "-")), [])
        done = output.outputs[0]
        steps = done.logprobs or []
        logprobs = [s[t].logprob for s, t in zip(steps, done.token_ids, strict=True)]
        top = {token: entry.logprob for token, entry in steps[0].items()} if steps else {}
        cached = int(output.num_cached_tokens or 0)
        return Result(list(done.token_ids), logprobs, cached, done.finish_reason, top, known)

    def generate(self, tokens: list[int], new: int = 8, top: int = 1, **inputs) -> Result:
        return self.finish([self.add(tokens, new, top, **inputs)])[0]

    def generate_all(self, prompts: list[list[int]], new: int = 8) -> list[Result]:
        return self.finish([self.add(tokens, new) for tokens in prompts])

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache(), "the device's cache was not reset"

    def device_hits(self) -> int:
        return sum(
            int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:prefix_cache_hits"
        )

    # ---- daemon --------------------------------------------------------------------------------

    def ask(self, make):
        client = Client(self.run_directory / "d.sock", None)
        try:
            client.connect(20)
            return client.ask(make, 10)
        finally:
            client.close()

    def stats(self) -> dict:
        """The daemon's numbers, everything counted that the engine has said so far."""
        client = self.core.scheduler.connector.scheduler_half.client
        with contextlib.suppress(DaemonUnavailableError):
            client.ask(wire.Ping, 5)
        return json.loads(self.ask(wire.Stats).body)

    def check(self) -> None:
        """The books are right and nothing is pinned or leased."""
        stats = self.stats()
        self.ask(wire.Check)
        assert stats["pinned_blocks"] == 0, stats
        assert stats["leases"] == 0, stats

    def purge(self) -> None:
        self.ask(lambda seq: wire.Purge(seq, ""))

    def daemon_pid(self) -> int:
        return daemon_pid(self.run_directory)

    # ---- negative control ----------------------------------------------------------------------

    def damage(self, prefix: list[bytes]) -> None:
        """Overwrite the payload of a prefix's last block in the pool, behind the product's back.

        Args:
            prefix: hashes of TierKV blocks, from the prompt's first block on.
        """
        half = self.core.scheduler.connector.scheduler_half
        wait_for(lambda: half.is_ready, half.client, what="the namespace to be attached")
        client, stats = half.client, self.stats()
        spaces = {bytes.fromhex(space["namespace"]): space for space in stats["namespaces"]}
        (namespace,) = filter(client.is_attached, spaces)  # after a reset there are others
        answer = client.lookup(namespace, [block_key(one) for one in prefix], 5)
        assert answer is not None, "the daemon did not answer"
        assert len(answer.offsets) == len(prefix), "the block to damage is not in DRAM"
        pool = attach_pool(Path(stats["pool"]))
        start, size = int(answer.offsets[-1]), spaces[namespace]["slot_bytes"]
        payload = pool.bytes[start + FRAME_BYTES : start + size]
        payload[:] = np.frombuffer(payload.tobytes()[::-1], np.uint8)
        client.release([answer.lease])

    def assert_damage_shows(
        self,
        want: Result,
        tokens: list[int],
        blocks: int = 3,
        *,
        device_tokens: int = 0,
        tries: int = 1,
        **inputs,
    ) -> None:
        """Blocks from the pool give the wanted output, and with one of them damaged another.

        For the end of a test: it forgets what the device has, and afterwards nothing is stored.

        Args:
            blocks: the last of so many leading TierKV blocks is damaged.
            device_tokens: of the prompt, computed on the device before.
            tries: more than one where the daemon may be late, which is a miss.
        """

        def generate() -> Result:
            for _ in range(tries):
                self.forget_device()
                if device_tokens:
                    self.generate(tokens[:device_tokens], new=1, **inputs)
                result = self.generate(tokens, len(want.tokens), **inputs)
                if result.cached > device_tokens:
                    return result
            raise AssertionError("nothing was loaded, so the outputs prove nothing")

        whole = generate()
        assert difference(want, whole) <= TOLERANCE
        per = self.engine_blocks
        prefix = whole.hashes[per - 1 : blocks * per : per]
        assert len(prefix) == blocks, "the prompt has no such block"
        self.damage(prefix)
        hurt = generate()
        assert hurt.cached == whole.cached, "the damaged block was not loaded"
        assert difference(want, hurt) > DAMAGE_MIN, "the damaged block changes nothing"
        self.check()
        self.purge()

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.engine is None:
            return
        self.engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.llm = self.engine = self.core = None
        gc.collect()
        cleanup_dist_env_and_memory()
