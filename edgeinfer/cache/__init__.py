"""The prefix cache: KV state of texts' beginnings, on disk. Knows tokens and bytes, and nothing of models or of C."""
