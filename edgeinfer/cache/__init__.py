"""What has been computed already: a tree of what the KV cache holds, and blocks of its state on disk.

Knows tokens and bytes, and nothing of models or of C.
"""
