"""What quantizing costs in quality: perplexity, and the divergence from a reference."""
