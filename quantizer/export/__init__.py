"""Writes a quantized network for other runtimes."""
