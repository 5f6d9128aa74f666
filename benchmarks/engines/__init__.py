"""Runs what the quantizer writes in the engines that read it."""
