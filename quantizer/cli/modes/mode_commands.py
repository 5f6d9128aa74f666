"""The commands `quantizer calib`, `test` and `float`: each runs the mode of its name, with the
options of that mode.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from quantizer.cli.arguments.grouped_command import SETTINGS, command
from quantizer.cli.arguments.options import LISTED, RUN, Options, takes
from quantizer.cli.arguments.places import from_start
from quantizer.cli.terminal import process
from quantizer.cli.terminal.render import say_note
from quantizer.config.resources import preset_text
from quantizer.errors import UsageError

_MODE = "quantizer.cli.modes.run_mode:run_mode"
_PRESET = "cpu_int8"
"""The config of a calibration for which neither a config nor a destination is given."""
_TESTING = ("report_dir", "exact", "gate", "skip_len", "eval_data", "evaluate", "deploy")
"""Options without a meaning for calibration."""
_CALIBRATING = ("dynamic", "memory", "resume", "for_")
"""Options without a meaning for a test."""
_OF_FLOAT = (
    *("model", "weights", "trust", "device", "data", "eval_data", "evaluate", "preprocess"),
    *("max_unpacked", "subset_len", "skip_len", "batch_size", "tokenizer", "seq_len", "stride"),
    *("shuffle", "seed", "gate", "json", "debug"),
)


_mode_command = functools.partial(
    command, context_settings={**SETTINGS, "auto_envvar_prefix": "QUANTIZER"}
)
"""Defines a command whose options are set by the variables of `--quant_mode`."""


def _others(*names: str) -> tuple[str, ...]:
    return tuple(name for name in RUN if name not in ("quant_mode", *names))


@_mode_command("calib")
@takes(
    *_others(*_TESTING),
    to_=f"Where the network goes{LISTED}: it is checked that it can. May be repeated.",
    config_file="The JSON config.  [default: quantize_config.json in the result folder, "
    f"written from the preset of --to, or {_PRESET}, if it is not there]",
)
def calib(options: Options) -> int:
    """Calibrate a model: choose all scales and write them to the result folder.

    \b
    quantizer calib --config_file net.json --model my_model.py
    """
    options = replace(options, quant_mode="calib")
    if options.config_file is not None or options.model is None:
        return _run(options)
    if process.is_rank():
        raise UsageError("torchrun needs a config", help="give one with --config_file")
    # It imports what only an installation with torch has
    from quantizer.config.run_config import restored_if_refused

    folder = from_start(options.output_dir)
    with restored_if_refused(folder):
        return _run(replace(options, config_file=_config_of(options)))


@_mode_command("test")
@takes(
    *_others(*_CALIBRATING),
    to_=f"Also write the network for NAME{LISTED}, to DIR/export. May be repeated.",
    config_file="The JSON config, to check that calibration had it.",
)
def test(options: Options) -> int:
    """Compare the calibrated network with the float one, and write it for other engines.

    \b
    quantizer test --model my_model.py
    quantizer test --to onnx --gate 'sqnr_db>=20' --model my_model.py
    """
    return _run(replace(options, quant_mode="test"))


@_mode_command("float")
@takes(*_OF_FLOAT)
def float_command(options: Options) -> int:
    """Measure the float network on the evaluation data.

    \b
    quantizer float --model my_model.py
    """
    return _run(replace(options, quant_mode="float"))


def _run(options: Options) -> int:
    run_mode: Callable[[Options], int] = process.load(_MODE)
    return run_mode(options)


def _config_of(options: Options) -> str:
    """Return the config in the result folder; write it from a preset if it is not there.

    Raises:
        ResultError: it cannot be written, or the folder is not one for results.
    """
    # It imports what only an installation with torch has
    from quantizer.config.run_config import RUN_CONFIG, write_config
    from quantizer.results.result_set import mark_result_folder, require_result_folder

    folder = from_start(options.output_dir)
    path = folder / RUN_CONFIG
    shown = f"{options.output_dir}/{RUN_CONFIG}"
    if path.exists():
        say_note(f"there is no --config_file: {shown} is used")
        return str(path)
    preset = _PRESET
    for word in options.to_[:1]:
        # Only runs for a target need it
        from quantizer.export.destinations import DESTINATIONS, destination_named

        name, own_preset = destination_named(word)
        preset = own_preset or DESTINATIONS[name].preset
    require_result_folder(folder)
    mark_result_folder(folder)
    write_config(path, preset_text(preset))
    say_note(f"there is no --config_file: wrote {shown} from the preset {preset}")
    return str(path)
