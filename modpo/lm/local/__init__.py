"""The sampler that runs in this process, and the models it can pull."""
