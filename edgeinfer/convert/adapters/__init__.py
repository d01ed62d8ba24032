"""LoRA adapters as PEFT saves them: read, turned into GGUF adapters, merged into weights."""
