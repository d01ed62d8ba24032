"""Measurements, made through the same API that users have."""
