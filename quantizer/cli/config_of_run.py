"""Writes the config of `quantizer run` into the folder of the run."""

from functools import partial

from quantizer.cli.options import Options
from quantizer.cli.render import say_note
from quantizer.cli.search_context import watched_data
from quantizer.cli.session import OpenedRun
from quantizer.cli.start_folder import from_start
from quantizer.config.resources import preset_text
from quantizer.config.run_config import MadeFor, run_config
from quantizer.export.sized_widths import SizedRun, config_within
from quantizer.export.without_codes import layers_to_leave
from quantizer.graph.ir import Graph
from quantizer.plan.fitted_config import fitted_text


def config_of_run(
    options: Options, made_for: MadeFor, graph: Graph, opened: OpenedRun, *, target: str
) -> str:
    """Return the path of the run's config, and print what was fitted if it is a new one."""
    preset = made_for.preset

    def new_text() -> str:
        """Return the preset, fitted to the model and the file."""
        to_leave = layers_to_leave(target, options.target_choices)
        text, changes = fitted_text(preset_text(preset), preset, graph, to_leave)
        for change in changes:
            say_note(change)
        return text

    data = watched_data(options, opened.batches, graph)
    sized = SizedRun(opened.loaded.module, graph, data, say_note)
    finish = partial(config_within, max_mb=made_for.max_mb, run=sized)
    folder = from_start(options.output_dir)
    path = run_config(folder, made_for, new_text, finish=finish, overwrite=options.overwrite)
    return str(path)
