"""Training: the prefix trie, attention over it, LoRA adapters and their updates."""
