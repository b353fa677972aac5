"""Hugging Face `generate` with a KV cache that is kept between processes.

    python docs/examples/generate.py
    python docs/examples/generate.py

The first process computes a prompt and stores its KV. The second one finds it: only the end of the
prompt goes through the model. Both compare their output with that of `generate` without any cache,
and fail if it is another one.

`generate` has no paged KV cache: a `DynamicCache` holds one tensor per layer that grows token by
token. So there is a *staging tensor* between the two, cut into blocks as TierKV wants them.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: the model is made on the spot

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tierkv
from tierkv.errors import LoadFailedError

BLOCK_TOKENS = 16
STAGING_BLOCKS = 32  # enough for the longest prompt, here 512 tokens
PROMPT_TOKENS = 200
NEW_TOKENS = 20
SEED = 0
MODEL = f"tiny-llama@seed-{SEED}"  # of a real model: name and revision
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    # Ten times the usual: with such weights the output depends on what the KV cache holds.
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)


def make_model() -> LlamaForCausalLM:
    """Random weights, the same in every process."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(CONFIG).eval()


def make_staging() -> Tensor:
    """Memory of STAGING_BLOCKS blocks: (block, layer, key or value, heads, token, head_dim)."""
    layers, heads = CONFIG.num_hidden_layers, CONFIG.num_key_value_heads
    return torch.zeros(STAGING_BLOCKS, layers, 2, heads, BLOCK_TOKENS, CONFIG.head_dim)


# ---- between a DynamicCache and the staging tensor ----------------------------------------------


def unstage(staging: Tensor, blocks: int) -> DynamicCache:
    """A cache that holds the tokens of the first blocks."""
    past = DynamicCache()
    for layer, pages in enumerate(staging[:blocks].unbind(1)):
        # (block, 2, heads, token, dim) -> (2, heads, all tokens, dim); `update` wants a batch of 1
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3).unsqueeze(1)
        past.update(keys, values, layer)
    return past


def stage(past: DynamicCache, staging: Tensor, blocks: int) -> None:
    """Copy the first blocks of a cache into the staging tensor."""
    for number, layer in enumerate(past.layers):
        for which, tokens in enumerate((layer.keys[0], layer.values[0])):  # (heads, tokens, dim)
            pages = tokens[:, : blocks * BLOCK_TOKENS].unflatten(1, (blocks, BLOCK_TOKENS))
            staging[:blocks, number, which] = pages.transpose(0, 1)


# ---- generate -----------------------------------------------------------------------------------


def generate(
    model: LlamaForCausalLM, prompt: Sequence[int], past: DynamicCache
) -> tuple[list[int], DynamicCache]:
    """The tokens that follow a prompt, and the cache afterwards; `past` holds its beginning."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        past_key_values=past,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), output.past_key_values


def generate_cached(
    model: LlamaForCausalLM, prompt: Sequence[int], cache: tierkv.Cache, staging: Tensor
) -> tuple[list[int], int]:
    """The same with TierKV.

    Returns:
        The new tokens, and how many tokens of the prompt came from the cache.
    """
    # At least one token is left to compute: its logits give the first new token.
    wanted = cache.hash_tokens(prompt)[: (len(prompt) - 1) // BLOCK_TOKENS]
    with cache.lookup(wanted[:STAGING_BLOCKS]) as hit:
        try:
            found = cache.load(hit, range(hit.blocks))
        except LoadFailedError:
            found = 0  # the daemon was replaced just now; the prompt is computed
    output, past = generate(model, prompt, unstage(staging, found))

    # The KV of the last new token was not needed, so it is not there.
    keys = cache.hash_tokens([*prompt, *output[:-1]])[:STAGING_BLOCKS]
    stage(past, staging, len(keys))
    # What is stored already is skipped.
    cache.store(keys, range(len(keys)))
    return output, found * BLOCK_TOKENS


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer one prompt with TierKV and without, print both, compare."""
    default = Path(tempfile.gettempdir()) / f"tierkv-generate-{os.getuid()}"
    parser = argparse.ArgumentParser(description="`generate` with a cache kept between processes.")
    parser.add_argument(
        "--run", type=Path, default=default, help=f"directory of the daemon's socket ({default})"
    )
    run = parser.parse_args(arguments).run
    torch.set_num_threads(1)  # the model is too small for more
    config = {
        "node": {
            "dram": {"capacity": "16MiB", "extent_unit": "1MiB"},
            # The daemon is nobody's child: it goes on for ten minutes without any engine.
            "service": {"socket": str(run / "daemon.sock"), "linger": "10min"},
        },
        "engine": {"swap_in_threshold": 0, "request_deadline": "5s"},
    }
    model, staging = make_model(), make_staging()
    dice = random.Random(SEED)
    prompt = [dice.randrange(CONFIG.vocab_size) for _ in range(PROMPT_TOKENS)]
    with tierkv.Cache(
        {"staging": staging},
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        config=config,
        facts={"transformers": transformers.__version__},  # another release may compute otherwise
    ) as cache:
        if not cache.wait_ready():
            raise SystemExit(f"TierKV is not ready: {cache.refusal or 'no daemon'}")
        output, cached = generate_cached(model, prompt, cache, staging)
    print(f"{cached} of {PROMPT_TOKENS} tokens came from the cache")
    print("with TierKV:   ", *output)
    wanted, _ = generate(model, prompt, DynamicCache())
    print("without cache: ", *wanted)
    if output != wanted:
        raise SystemExit("the outputs are not equal")


if __name__ == "__main__":
    main()
