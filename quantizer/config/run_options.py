"""The options of a run that both surfaces check in the same way. `--dynamic` leaves sizes of
inputs open. `--dpu_accuracy high` turns on all methods that help on the DPU.

The DPU has one power-of-two scale per tensor, so a layer whose channels differ in range loses
most of its weights. Equalization makes the channels alike, finetuning learns the rounding, bias
correction takes care of what is left. Source: Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction" (2019), and "Up or Down? Adaptive Rounding for
Post-Training Quantization" (2020).
"""

from dataclasses import replace

from quantizer.config.forms.form import plugin_of_results, plugin_of_setting, remedy
from quantizer.config.model import ResolvedConfig
from quantizer.errors import ResultError, UsageError

AXES = {"height": (4, 2), "width": (4, 3), "length": (3, 2)}
"""By the name of a size: the number of axes of the inputs that have it, and its axis. Images
are [batch, channels, height, width], sounds [batch, channels, length].
"""
SIZE_CHOICES = ("height,width", "height", "width", "length")
"""The values of `--dynamic`, that of the option alone first."""

LEVELS = ("high",)
FINETUNE_MODES = ("adaround", "adaquant")
"""The values of `--fast_finetune`, that of the level first."""
_SWITCHES = ("include_cle", "include_bias_corr")


def dynamic_sizes(value: str | None) -> tuple[str, ...]:
    """Return the names of the sizes that a value of `--dynamic` leaves open.

    Raises:
        UsageError: there is no such value.

    >>> dynamic_sizes("height,width"), dynamic_sizes(None)
    (('height', 'width'), ())
    """
    if value is None:
        return ()
    if value not in SIZE_CHOICES:
        raise UsageError(
            f"dynamic={value!r} is not a size",
            help=f"it is {', '.join(map(repr, SIZE_CHOICES))} or None",
        )
    return tuple(value.split(","))


def with_dpu_accuracy(config: ResolvedConfig, level: str | None) -> ResolvedConfig:
    """Return the config for a level of accuracy: at "high" with equalization and bias
    correction.

    Raises:
        UsageError: a level that is unknown, or a config for another device.
    """
    if level is None:
        return config
    if level not in LEVELS:
        raise UsageError(
            f"dpu_accuracy={level!r} is not a level", help=f"it is {', '.join(LEVELS)}, or None"
        )
    for switch in _SWITCHES:
        _require_plugin(f"<--dpu_accuracy {level}>", plugin_of_setting(switch))
    settings = config.settings
    if settings.target_device != "DPU":
        raise UsageError(
            f"<--dpu_accuracy {level}> is for the DPU, and this config is for "
            f"{settings.target_device}",
            help="set include_cle and include_bias_corr in it, and add <--fast_finetune>",
        )
    # The file does not set these two
    places = {name: place for name, place in settings.places.items() if name not in _SWITCHES}
    settings = replace(settings, include_cle=True, include_bias_corr=True, places=places)
    return replace(config, settings=settings)


def finetuning(level: str | None, requested: str | None) -> str | None:
    """Return how weights are finetuned: as requested, or else as the level of accuracy asks.

    Raises:
        UsageError: an unknown mode.
    """
    if requested is None:
        return FINETUNE_MODES[0] if level else None
    if requested not in FINETUNE_MODES:
        raise UsageError(
            f"fast_finetune={requested!r} is not a mode",
            help=f"it is {', '.join(FINETUNE_MODES)}, or None",
        )
    return requested


def with_finetuning(
    config: ResolvedConfig, level: str | None, mode: str | None
) -> tuple[ResolvedConfig, str | None]:
    """Return the config and the mode of finetuning of a run with `--dpu_accuracy level` and
    `--fast_finetune mode`.

    Raises:
        UsageError: the level is for the DPU alone, or the mode does not go with the config.
    """
    config = with_dpu_accuracy(config, level)
    mode = finetuning(level, mode)
    if mode:
        _require_plugin(f"<--fast_finetune {mode}>", plugin_of_results("fast_finetune"))
        _check_mode(mode, config)
    return config, mode


def _require_plugin(option: str, plugin: str) -> None:
    """Refuse an option whose plug-in is not there; `plugin` is its name, or empty."""
    if plugin:
        raise UsageError(
            f"{option} needs the plug-in {plugin}, which is not there",
            help=f"leave it out, or {remedy(plugin)}",
        )


def _check_mode(mode: str, config: ResolvedConfig) -> None:
    """Refuse adaquant on the DPU, and an algorithm that rounds the same weights."""
    rounding = [algorithm.name for algorithm in config.algorithms if algorithm.stage == "round"]
    if rounding:
        raise UsageError(
            f"<--fast_finetune {mode}> and the config's {rounding[0]} both round the weights",
            help="leave out <--fast_finetune>, or the algorithm",
        )
    if mode == "adaquant" and config.settings.target_device == "DPU":
        raise UsageError(
            "<--fast_finetune adaquant> changes the scales of weights, and the DPU's are "
            "aligned to its shifters",
            help="use <--fast_finetune adaround>",
        )


def require_calibrated_with(option: str, asked: str | None, done: str | None) -> None:
    """Refuse results that were not calibrated with the `option` of test mode.

    Raises:
        ResultError: they were calibrated without it, or with another value.
    """
    if asked and asked != done:
        how = f"with {done}" if done else "without it"
        raise ResultError(
            f"{option} {asked}: these results were calibrated {how}",
            help=f"calibrate with {option} {asked}, or leave it out here",
        )
