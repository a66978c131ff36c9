"""The weight bridge: from Megatron shards into vLLM shards, planned as data, proven, published as one version."""
