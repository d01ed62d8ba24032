"""From a checkpoint's tokenizer files to GGUF's vocabulary."""
