"""One vLLM engine in a process of its own, driven by JSON lines on standard input.

Every answer is one JSON line on the descriptor named on the command line; vLLM's own output goes
where it likes. Commands: ``generate`` (tokens, new), ``reset`` (the device's prefix cache),
``stop``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def start_engine(options: dict[str, Any]) -> Any:
    """An in-process vLLM engine with the settings that all modes share."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    fixed: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": 0,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    return LLM(**{**fixed, **options})


def generate(llm: Any, number: int, tokens: list[int], new: int) -> dict[str, Any]:
    """Run one request to its end.

    Returns:
        tokens and logprobs of the output, prompt tokens by source, time to the first token in ms,
        and the engine's block hashes of the prompt.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = llm.llm_engine
    sampling = SamplingParams(
        max_tokens=new, temperature=0, logprobs=1, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    name = engine.add_request(str(number), TokensPrompt(prompt_token_ids=tokens), sampling)
    requests = engine.engine_core.engine_core.scheduler.requests
    request = requests.get(name) or next(iter(requests.values()))
    hashes = [bytes(block).hex() for block in request.block_hashes]
    first_ms = 0.0
    final = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids and not first_ms:
                first_ms = (time.perf_counter() - start) * 1000
            final = output
    assert final is not None, "a request ends with an output"
    _finish_stores(engine)
    done = final.outputs[0]
    logprobs = [
        step[token].logprob for step, token in zip(done.logprobs, done.token_ids, strict=True)
    ]
    return {
        "tokens": list(done.token_ids),
        "logprobs": logprobs,
        "cached": int(final.num_cached_tokens or 0),
        "ttft_ms": first_ms,
        "hashes": hashes,
    }


def _finish_stores(engine: Any) -> None:
    """Step on until the connector has committed what is on its way, as an engine process does."""
    core = engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step_fn()


def cached_by_source(llm: Any) -> dict[str, int]:
    """Prompt tokens so far that came from the device's cache and from the connector."""
    found = {"device": 0, "external": 0}
    for metric in llm.get_metrics():
        if metric.name == "vllm:prefix_cache_hits":
            found["device"] += int(metric.value)
        elif metric.name == "vllm:external_prefix_cache_hits":
            found["external"] += int(metric.value)
    return found


def main() -> None:
    """Serve commands until told to stop or the other side is gone."""
    answers: TextIO = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    llm = start_engine(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers)
    for number, line in enumerate(sys.stdin):
        command = json.loads(line)
        if command["op"] == "generate":
            before = cached_by_source(llm)
            answer = generate(llm, number, command["tokens"], command["new"])
            after = cached_by_source(llm)
            answer["hits"] = {name: after[name] - before[name] for name in after}
        elif command["op"] == "reset":
            answer = {"ok": bool(llm.reset_prefix_cache())}
        else:
            break
        print(json.dumps(answer), file=answers)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
