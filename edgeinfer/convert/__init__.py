"""From a Hugging Face checkpoint to a GGUF file in one streaming pass."""
