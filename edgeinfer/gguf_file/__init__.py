"""GGUF files: their headers read, checked and described, without the C library."""
