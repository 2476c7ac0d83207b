"""The sampler `vllm`: a server process with an environment of its own, spoken to over HTTP."""
