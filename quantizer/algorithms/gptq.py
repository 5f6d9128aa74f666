"""GPTQ: weights are rounded one input channel after the other, and those left make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

from __future__ import annotations

from quantizer.algorithms.adjustment import Adjustment, Task
from quantizer.algorithms.gptq_target import GptqTarget
from quantizer.algorithms.sequential_rounding import in_order
from quantizer.config.algorithms import GPTQConfig


def gptq(task: Task, settings: GPTQConfig, found: Adjustment) -> Adjustment:
    """Round the weights that the plan quantizes, with the scales of their ranges or with those that were found before.

    Columns of zeros and layers that no token reached stay at round-to-nearest, and so is a layer whose outputs on the
    calibration data would be worse; the remarks say which.

    Raises:
        DataError: a value in the network is not finite; layer and batch are named.
    """
    return in_order(task, found, GptqTarget(settings))
