"""The ways in which `quantizer analyze` finds the noise at the outputs. It imports no torch."""

NOISE_METHODS = ("network", "every", "fast")
"""How the output noise is found: measured at the smallest width and scaled by the layer's
error, measured at every width, or predicted from gradients.
"""
MAX_MEASURED = 200
"""With more weights, noise is predicted from gradients if nothing else is asked for."""
