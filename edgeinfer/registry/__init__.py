"""Where models come from when they are not a path on this machine."""
