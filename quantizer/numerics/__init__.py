"""Pure functions on tensors: rounding, number formats, scales, fake quantization, metrics.
Knows no modules.
"""
