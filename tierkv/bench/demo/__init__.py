"""The demonstration: a real vLLM on CPU skips prefill work because TierKV brings its KV back."""
