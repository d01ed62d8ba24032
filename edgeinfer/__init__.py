"""edgeinfer: from a Hugging Face checkpoint to an answer on the machine at hand."""

__version__ = "0.1.0"
