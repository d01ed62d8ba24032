"""One short descriptive module per model architecture."""
