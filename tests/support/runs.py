"""Runs the command line in this process, for tests that look at its results."""

from __future__ import annotations

from pathlib import Path

from quantizer.cli.main import run_command

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
EXAMPLE = str(ROOT / "configs" / "example.json")


def calibrate(
    folder: Path, *more: str, model: str = DIGITS, config: str | None = EXAMPLE
) -> int:
    """Calibrate on a few samples, other models than the digits without a config; returns the
    exit code.
    """
    given = (
        ["--config_file", config] if config and (model == DIGITS or config != EXAMPLE) else []
    )
    return run_command(
        [
            "--quant_mode",
            "calib",
            "--model",
            model,
            "--output_dir",
            str(folder),
            "-q",
            *given,
            "--subset_len",
            "64",
            *more,
        ]
    )


def check(folder: Path, *more: str, model: str = DIGITS) -> int:
    """Run test mode on a few images; returns the exit code."""
    return run_command(
        [
            "--quant_mode",
            "test",
            "--model",
            model,
            "--output_dir",
            str(folder),
            "-q",
            "--subset_len",
            "64",
            *more,
        ]
    )
