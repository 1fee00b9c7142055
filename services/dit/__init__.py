"""The DiT worker: the causal rollout over the published transformer, its KV cache and its adapters."""
