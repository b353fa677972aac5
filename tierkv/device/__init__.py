"""Moving KV between device memory and slots."""
