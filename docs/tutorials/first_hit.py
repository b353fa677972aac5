"""The same prompt twice; vLLM's own prefix cache is emptied before each."""

import os
import random
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB of "device" memory
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # INFO shows what TierKV says


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from tierkv.bench.tiny_models import VOCABULARY, make_model

    llm = LLM(
        model=str(make_model(Path("build/models/gqa-0.2"))),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        distributed_executor_backend="uni",
        max_model_len=4096,
        kv_transfer_config={
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": "configs/cpu-node.yaml"},
        },
    )
    dice = random.Random(1)
    prompt = TokensPrompt(prompt_token_ids=[dice.randrange(VOCABULARY) for _ in range(3000)])
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for name in ("first", "second"):
        llm.reset_prefix_cache()  # empties the device's cache, not TierKV
        start = time.perf_counter()
        output = llm.generate([prompt], sampling, use_tqdm=False)[0]
        took = time.perf_counter() - start
        print(f"{name}: {output.num_cached_tokens} of 3000 tokens came from DRAM, {took:.2f} s")


if __name__ == "__main__":
    main()
