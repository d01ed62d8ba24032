"""The one door to the C library: numpy in, numpy out, return codes turned into values or errors."""
