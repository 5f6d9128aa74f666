"""The first commands: `quantizer demo` writes a small trained example and says what to try.
`quantizer init` writes a preset as a first config, and fits it to a model if one is given.
`quantizer convert` converts a config to the other form. Import no torch.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from quantizer.cli.arguments.grouped_command import GroupedOption, command, refuse_typed
from quantizer.cli.arguments.options import (
    MODEL,
    Options,
    output_option,
    overwrite_option,
    takes,
)
from quantizer.cli.arguments.places import DestinationWord, PathType, write_output
from quantizer.cli.terminal.render import print_diagnostics, say_note
from quantizer.commands.start.findings import ConvertedDocument, inexpressible, one_per_reason
from quantizer.commands.start.to_hierarchical import to_hierarchical
from quantizer.commands.start.to_layered import to_layered
from quantizer.config.diagnostics import Diagnostics, Place, by_place
from quantizer.config.document.document import Document
from quantizer.config.forms.form import Form, form_of
from quantizer.config.load import check_document, load_config
from quantizer.config.model import ResolvedConfig
from quantizer.config.resources import load_resource, preset_text, presets, resource
from quantizer.config.wording import joined
from quantizer.errors import UsageError
from quantizer.export.destinations import DESTINATIONS, destination_named
from quantizer.storage.replacing import replace_file


@dataclass(frozen=True)
class _Example:
    """What a form of `quantizer demo` writes.

    Attributes:
        model: what `quantizer run` takes.
        about: the model in words.
        files: all files, by their names in examples/.
        kind: that of the destinations to try, as in `Destination.stands_for`.
        data: the option for the data, unless the model's file has them.
    """

    model: str
    about: str
    files: tuple[str, ...]
    kind: str
    data: str = ""


_NETWORK = _Example(
    "mnist.py",
    "a network that reads digits; its weights and its data are next to it",
    ("mnist.py", "resnet.py", "mnist.safetensors", "mnist_data.safetensors"),
    "network",
)
_LANGUAGE_MODEL = _Example(
    "tales",
    "a language model of short tales; tales.txt has some that it was not trained on",
    (
        "tales/README.md",
        "tales/config.json",
        "tales/generation_config.json",
        "tales/model.safetensors",
        "tales/tokenizer.json",
        "tales/tokenizer_config.json",
        "tales.txt",
    ),
    "language model",
    " --data tales.txt",
)


@command()
@click.argument("folder", type=PathType(), default="quantizer_demo")
@click.option("--llm", is_flag=True, help="Write a small language model instead, with a text.")
def demo(folder: str, llm: bool) -> None:
    """Write a small trained network with its data to FOLDER (by default quantizer_demo), and
    print commands to try on it.

    \b
    quantizer demo
    quantizer demo --llm
    """
    example = _LANGUAGE_MODEL if llm else _NETWORK
    place = Path(folder)
    missing: dict[Path, bytes] = {}
    for name in example.files:
        content = resource("examples", name).read_bytes()
        path = place / name
        if not path.exists():
            missing[path] = content
        elif not path.is_file() or path.read_bytes() != content:
            # A demo that was stopped has left complete files only
            raise UsageError(
                f"{path} already exists", help="give another folder: `quantizer demo FOLDER`"
            )
    try:
        for path, content in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror or error}") from None
    click.echo(f"wrote {place}: {example.model} is {example.about}. Try:\n\n  cd {place}")
    run = f"  quantizer run {example.model}{example.data} --to"
    others = []
    for name, destination in DESTINATIONS.items():
        if destination.stands_for == example.kind:
            click.echo(f"{run} {name}")
        if llm and destination.smaller:
            others.append(name)
        elif not llm and destination.wider:
            others.append(destination.wider)
    for name in others:
        click.echo(f"{run} {name} -o small")


_DEVICES = {"CPU": "cpu_int8", "GPU": "gpu", "DPU": "dpu"}
"""The preset of each value of `--device`, an older word for `--preset`."""
_STRATEGIES = {
    "weight_only": "weight_int8",
    "static": "static_fp8",
    "dynamic": "dynamic_int8",
    "smoothquant": "smoothquant_int8",
    "awq": "awq_int4_group",
    "gptq": "gptq_int4_group",
}
"""The preset of each value of `--strategy`, an older word for `--preset`."""


@command()
@click.option(
    "--to",
    type=DestinationWord(),
    metavar="NAME",
    help="Where the network goes, as `quantizer targets` lists it: write the preset for it.",
)
@click.option(
    "--preset",
    type=click.Choice(presets()),
    metavar="NAME",
    help=f"Write a preset of --list.  [default: {_DEVICES['CPU']}]",
)
@click.option("--device", type=click.Choice(list(_DEVICES), case_sensitive=False), hidden=True)
@click.option("--strategy", type=click.Choice([*_STRATEGIES, *presets()]), hidden=True)
@click.option("--list", "list", is_flag=True, help="List all presets and when to use them.")
@output_option(
    default="quantize_config.json",
    show_default=True,
    help="The file to write; - is standard output.",
)
@overwrite_option()
@takes(*MODEL, model="Change the preset so that it fits this model, and say what was changed.")
def init(
    *,
    to: str | None,
    device: str | None,
    strategy: str | None,
    preset: str | None,
    list: bool,  # noqa: A002 - the option
    output: str,
    overwrite: bool,
    options: Options,
) -> None:
    """Write a config to start from. With --model, calibration of that model accepts it.

    \b
    quantizer init --list
    quantizer init --preset dpu -o net.json
    quantizer init --to tensorrt -o net.json
    quantizer init --to w4 --model my_llama -o net.json
    """
    if list:
        click.echo(_listing(), nl=False)
        return
    named = {"--to": to, "--strategy": strategy, "--preset": preset}
    given = [option for option, word in named.items() if word]
    if len(given) > 1:
        raise UsageError(f"{joined(given, 'and')} exclude each other", help="give one of them")
    if to:
        destination, own_preset = destination_named(to)
        preset = own_preset or DESTINATIONS[destination].preset
    name = preset or _DEVICES[device or "CPU"]
    if strategy:
        name = _STRATEGIES.get(strategy, strategy)
    text = _text(name, device, strategy, preset)
    text = _fitted(text, name, options)
    if output == "-":
        click.echo(text, nl=False)
        return
    write_output(output, text)
    say_note(
        f"wrote {output}; `quantizer validate {output}` checks it, `quantizer explain KEY` "
        "explains a key"
    )


def _fitted(text: str, name: str, options: Options) -> str:
    """Return the text of a preset, changed as the model asks for, and print the changes."""
    if options.model is None:
        refuse_typed(MODEL, "it needs --model: then init fits the preset to the model")
        return text
    # These import torch
    from quantizer.cli.traced_model import traced_model
    from quantizer.plan.fit.fitted_config import fitted_text

    traced = traced_model(options)
    fitted, changes = fitted_text(text, name, traced.graph)
    for change in changes:
        say_note(change)
    if not changes:
        say_note(f"the preset {name} fits the model as it is")
    return fitted


def _listing() -> str:
    """Return each preset with its comment, which says when to use it."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    rows = []
    for name in presets():
        comment = load_resource("configs", f"{name}.json")["//"]
        rows.append((name, comment))
    formatter = click.HelpFormatter(indent_increment=0, width=width)
    formatter.write_dl(rows)
    return f"{formatter.getvalue()}`quantizer init --preset NAME` writes one of them\n"


def _text(name: str, device: str | None, strategy: str | None, preset: str | None) -> str:
    """Return the text of the preset, with the URL of its schema instead of the path."""
    form = form_of(load_resource("configs", f"{name}.json"))
    text = preset_text(name)
    if not device or not (strategy or preset):
        return text
    if form == "layered":
        raise UsageError(
            f"the preset {name} already sets its device",
            help="leave out --device, or edit the file",
        )
    if device == "DPU":
        option = f"--strategy {strategy}" if strategy else f"--preset {preset}"
        raise UsageError(
            f"{option} and --device DPU exclude each other: the DPU needs the layered form",
            help="leave out one of them",
        )
    return text.replace('"target_device": "CPU"', f'"target_device": "{device}"')


WRITERS: Mapping[Form, Callable[[ResolvedConfig], ConvertedDocument]] = {
    "layered": to_layered,
    "hierarchical": to_hierarchical,
}
"""The function that writes each form."""


def convert_config(config: ResolvedConfig, form: Form) -> ConvertedDocument:
    """Return the document of `form` that means the same, checked as any file of that form is.
    Errors among its findings are what it cannot express.
    """
    conversion = WRITERS[form](config)
    findings = [*conversion.findings]
    if all(finding.severity != "error" for finding in findings):
        findings += _refused(config, form, conversion)
    return replace(conversion, findings=by_place(one_per_reason(findings)))


def _refused(config: ResolvedConfig, form: Form, conversion: ConvertedDocument) -> Diagnostics:
    """Yield the errors of a file of the form with this document, at the places of the
    source.
    """
    document = Document.of(conversion.document, config.source)
    for error in check_document(document).diagnostics:
        if error.severity == "error":
            yield inexpressible(
                f"the {form} form would refuse it, {error.code}: {error.message}",
                _origin(config, conversion, error.place),
                error.help or "change it",
            )


def _origin(
    config: ResolvedConfig, conversion: ConvertedDocument, place: Place | None
) -> Place | None:
    """Return where in the source the value at a place of the document comes from; the first
    rule, if that is not known.
    """
    pointer = place.pointer if place else ""
    origins: list[Place | None] = []
    for part, origin in conversion.origins.items():
        if pointer == part or pointer.startswith(f"{part}/"):
            origins.append(origin)
    for rule in config.rules:
        origins.append(rule.selector.place or rule.roles_place)
    return next((origin for origin in origins if origin), None)


@command()
@click.argument("file", type=PathType())
@click.option(
    "--form",
    cls=GroupedOption,
    old_names=["--to"],
    type=click.Choice(list(WRITERS)),
    help="The form to write.  [default: the other one]",
)
@output_option(default="-", help="Write to FILE.  [default: standard output]")
@overwrite_option()
def convert(file: str, form: Form | None, output: str, overwrite: bool) -> int:
    """Convert a config to the other form. If that form cannot express the config, print why and
    write nothing.

    Exit codes: 0 written, 1 the other form cannot express it, 2 the file is not valid.

    \b
    quantizer convert net.json
    quantizer convert net.json --form hierarchical -o other.json
    """
    result = load_config(file)
    config = result.require()
    other_form: Form = "hierarchical" if config.form == "layered" else "layered"
    wanted = form or other_form
    if wanted == config.form:
        raise UsageError(
            f"{file} already has the {wanted} form",
            help="leave out --form to write the other form",
        )
    other = convert_config(config, wanted)
    findings = [one for one in result.diagnostics if one.severity != "note"]
    findings += other.findings
    print_diagnostics(by_place(findings), result.sources)
    if any(finding.severity == "error" for finding in other.findings):
        return 1
    text = json.dumps(other.document, indent=2, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_output(output, text)
    return 0
