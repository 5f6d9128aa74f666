"""The folder of a plug-in can be removed, and so can all of them: the rest works."""

from __future__ import annotations

import ast
import compileall
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support import fresh_processes
from support.fresh_processes import PACKAGES, QUANTIZER, TORCH
from support.ledger import MODULES, PACKAGE, source

from quantizer.cli.main import subcommands
from quantizer.config.resources import load_resource
from quantizer.export.targets import EXPORTERS
from quantizer.plugins import plugins

ROOT = PACKAGE.parent
FOLDERS = {path.parent.name: path.parent for path in sorted(PACKAGE.glob("*/*/plugin.py"))}
PLUGINS = plugins(with_commands=True)
CALIBRATING = [plugin.name for plugin in plugins() if plugin.steps or plugin.algorithms]
"""The plug-ins that calibrations may need."""
TARGETS = {plugin.name: list(plugin.targets) for plugin in PLUGINS}
COMMANDS = {plugin.name: list(plugin.commands) for plugin in PLUGINS}
_IN_ONE_PROCESS = """
import json, sys
from quantizer.cli.main import run_command, subcommands
from quantizer.export.destinations import DESTINATIONS
from quantizer.config.resources import load_resource
from quantizer.export.targets import EXPORTERS

codes = [run_command(words) for words in json.loads(sys.argv[1])]
torch = "torch" in sys.modules
words = {"targets": list(EXPORTERS), "destinations": list(DESTINATIONS)}
print(json.dumps({"codes": codes, "torch": torch, "commands": list(subcommands()), **words}))
"""
_WITHOUT_EACH = """
import importlib, json, os, sys

options = ["--config_file", "plain.json", "--model", "net.py", "-q"]
codes = {}
for folder in json.loads(sys.argv[1]):
    os.rename(folder, "removed")
    importlib.invalidate_caches()
    from quantizer.cli.main import run_command

    for mode in ("calib", "test"):
        words = ["--quant_mode", mode, *options, "-o", os.path.basename(folder)]
        codes[folder + " " + mode] = run_command(words)
    os.rename("removed", folder)
    # The next is imported anew
    for name in list(sys.modules):
        if name.partition(".")[0] == "quantizer":
            del sys.modules[name]
print(json.dumps(codes))
"""
_NET = """
import torch

def model():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(144, 3)).eval()

def calibration_data():
    return [torch.ones(4, 1, 8, 8) * step for step in range(4)]
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the package, compiled, with links to its files."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(PACKAGE, folder / "quantizer")
    compileall.compile_dir(folder / "quantizer", quiet=1)
    link(ROOT, folder, "schemas", "configs", "examples")
    return folder


@pytest.fixture
def place(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of the test's own, from which processes import the copy."""
    monkeypatch.setenv("COLUMNS", "400")
    link(tree, tmp_path, "quantizer", "schemas", "configs", "examples")
    return tmp_path


def link(source: Path, target: Path, *names: str) -> None:
    for name in names:
        (target / name).symlink_to(source / name)


@contextmanager
def without(tree: Path, names: Iterable[str]) -> Iterator[None]:
    """Move some plug-ins out of the copy for a while."""
    with TemporaryDirectory(dir=tree) as aside, ExitStack() as returns:
        for name in names:
            folder = tree / FOLDERS[name].relative_to(ROOT)
            moved = Path(aside, name)
            folder.rename(moved)
            returns.callback(moved.rename, folder)
        yield


def run(
    place: Path, code: str, *words: str, begins_with: str = TORCH
) -> subprocess.CompletedProcess[str]:
    return fresh_processes.run(code, *words, cwd=place, begins_with=begins_with)


def run_in_one_process(
    place: Path, commands: list[list[str]]
) -> subprocess.CompletedProcess[str]:
    return run(place, _IN_ONE_PROCESS, json.dumps(commands), begins_with=PACKAGES)


def run_mode(
    place: Path, mode: str, *more: str, config: str = ""
) -> subprocess.CompletedProcess[str]:
    options = ["--config_file", config] if config else []
    options += ["--model", "examples/digits.py", "--subset_len", "64"]
    return run(place, QUANTIZER, "--quant_mode", mode, *options, *more)


def words_of_sources(name: str) -> set[str]:
    """Return the words by which the help names the kinds of data and models of a plug-in, and
    no other.
    """
    own: set[str] = set()
    others: set[str] = set()
    for plugin in PLUGINS:
        words = {model.form for model in plugin.models}
        for kind in plugin.data:
            words |= {kind.form, kind.word}
            words |= {f"--{option} " for option in kind.options}
            words |= set() if kind.form or kind.word else {kind.name}
        words |= {f"--{option} " for option in plugin.options}
        (own if plugin.name == name else others).update(words)
    return own - others - {""}


def dependents(name: str) -> set[str]:
    """Return a plug-in and those that need it."""
    names = {name}
    for _ in PLUGINS:
        names |= {plugin.name for plugin in PLUGINS if names & set(plugin.needs)}
    return names


@pytest.mark.parametrize("name", FOLDERS)
def test_without_one_plugin_its_words_are_unknown_and_all_others_are_there(
    name: str, tree: Path, place: Path
) -> None:
    lost = dependents(name)
    asked = [
        ["--quant_mode", "test", "--deploy", word] for gone in lost for word in TARGETS[gone]
    ]
    asked += [[word] for gone in lost for word in COMMANDS[gone]]
    helps = [[word, "--help"] for word in ("explain", "init") if [word] not in asked]
    with without(tree, [name]):
        done = run_in_one_process(place, [["--help"], *helps, *asked])
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["codes"] == [*[0] * (1 + len(helps)), *[2] * len(asked)]
    kept = [word for word in EXPORTERS if not any(word in TARGETS[gone] for gone in lost)]
    assert facts["targets"] == kept
    gone_commands = [word for gone in lost for word in COMMANDS[gone]]
    assert facts["commands"] == [word for word in subcommands() if word not in gone_commands]
    named = [plugin.destinations for plugin in plugins() if plugin.name not in lost]
    assert facts["destinations"] == [word for words in named for word in words]
    assert not facts["torch"]
    of_targets = sum(len(TARGETS[gone]) for gone in lost)
    assert done.stderr.count("is not one of its values") == of_targets
    for word in gone_commands:
        assert f"there is no command '{word}'" in done.stderr
    for gone in lost - {name}:
        if not TARGETS[gone]:
            continue
        needed = f"is of the plug-in {gone}, which needs the plug-in"
        guessed = [
            f"'{word}' is not one of its values\nhelp: did you" for word in TARGETS[gone]
        ]
        assert any(said in done.stderr for said in (needed, *guessed))
    shown = " ".join(done.stdout.split())
    for gone in lost:
        for word in words_of_sources(gone):
            assert word not in shown, word
    if gone_commands and lost == {name}:
        assert f"install the package whose plug-in adds {gone_commands[0]}" in done.stderr


def test_without_kinds_of_data_and_models_what_asks_for_them_is_refused(
    tree: Path, place: Path
) -> None:
    sources = [name for name in FOLDERS if "/sources/" in str(FOLDERS[name])]
    (place / "pictures").mkdir()
    (place / "pictures" / "a.png").touch()
    (place / "a.txt").write_text("text")
    calib = ["--quant_mode", "calib", "--model", "examples/digits.py"]
    data = ["synthetic", "pictures", "a.txt"]
    asked = [[*calib, "--data", word] for word in data]
    asked.append(["--quant_mode", "calib", "--model", "pictures"])
    asked.append([*calib, "--tokenizer", "pictures"])
    with without(tree, sources):
        done = run(place, _IN_ONE_PROCESS, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["codes"] == [4, 4, 4, 3, 2]
    assert "install the package whose plug-in adds synthetic, if there is one" in done.stderr
    assert "a.txt gives no tensor file" in done.stderr
    assert "install the package whose plug-in adds .txt, if there is one" in done.stderr
    assert "pictures is a folder, and no plug-in is there that loads a model" in done.stderr
    assert "no plug-in is there that reads --tokenizer" in done.stderr


def settings_of(name: str) -> list[str]:
    """Return the settings that a plug-in serves."""
    entries = load_resource("schemas", "layered.schema.json")["properties"].items()
    return [key for key, entry in entries if entry.get("plugin") == name]


def plain_config(**settings: bool) -> dict[str, Any]:
    """Return the config of the example without what needs a plug-in."""
    config = dict(load_resource("configs", "cpu_int8.json"))
    del config["$schema"]
    return {**config, "include_bias_corr": False, **settings}


@pytest.mark.parametrize("name", CALIBRATING)
def test_a_config_that_asks_for_an_absent_plugin_is_refused(
    name: str, tree: Path, place: Path
) -> None:
    asked: list[dict[str, Any]] = []
    for plugin in plugins():
        if plugin.name == name:
            weight = {"weight": {"dtype": "int8"}}
            for entry in plugin.algorithms:
                asked.append({"global_quant_config": weight, "algo_config": {"name": entry}})
    for key in settings_of(name):
        asked.append(plain_config(**{key: True}))
    commands: list[list[str]] = []
    for number, config in enumerate([plain_config(), *asked]):
        path = place / f"{number}.json"
        path.write_text(json.dumps(config))
        commands.append(["validate", str(path)])
    with without(tree, [name]):
        done = run_in_one_process(place, commands)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["codes"] == [0, *[1] * len(asked)], done.stdout
    said = done.stdout + done.stderr
    assert said.count(f"needs the plug-in {name}, which is not there") == len(asked)


@pytest.mark.slow
def test_results_of_an_absent_plugin_are_refused_and_the_default_needs_none(
    tree: Path, place: Path
) -> None:
    done = run_mode(place, "calib")
    assert done.returncode == 0, done.stderr
    with without(tree, CALIBRATING):
        done = run_mode(place, "test")
        assert done.returncode == 5
        missing = next(line for line in done.stderr.splitlines() if "is not there" in line)
        assert "equalization" in missing and "bias_correction" in missing
        done = run_mode(place, "calib", config="configs/cpu_int8.json")
        assert done.returncode == 2
        assert "include_bias_corr needs the plug-in bias_correction" in done.stderr
        done = run_mode(place, "calib", "--fast_finetune", "adaround")
        assert done.returncode == 2
        assert "needs the plug-in finetuning, which is not there" in done.stderr
        for mode in ("calib", "test"):
            done = run_mode(place, mode)
            assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_any_one_plugin_a_network_is_calibrated_and_tested(place: Path) -> None:
    """Modes import no plug-ins of commands."""
    (place / "plain.json").write_text(json.dumps(plain_config()))
    (place / "net.py").write_text(_NET)
    folders = [folder.relative_to(ROOT).as_posix() for folder in FOLDERS.values()]
    removed = [folder for folder in folders if "/commands/" not in folder]
    done = run(place, _WITHOUT_EACH, json.dumps(removed))
    assert done.returncode == 0, done.stderr
    runs = [f"{folder} {mode}" for folder in removed for mode in ("calib", "test")]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(runs, 0), done.stderr
    for folder in removed:
        assert (place / Path(folder).name / "report.json").exists()


@pytest.mark.slow
def test_without_any_plugin_the_core_works_and_one_alone_writes_its_files(
    tree: Path, place: Path
) -> None:
    """The two that come back need no package but torch."""
    (place / "plain.json").write_text(json.dumps(plain_config()))
    with without(tree, FOLDERS):
        for mode in ("calib", "test"):
            done = run_mode(place, mode, config="plain.json")
            assert done.returncode == 0, done.stderr
        assert (place / "quantize_result" / "report.json").exists()
        assert not (place / "quantize_result" / "report.html").exists()
        asked = [["--quant_mode", "test", "--deploy", "gguf"], ["tune", "--help"]]
        done = run_in_one_process(place, asked)
        facts = json.loads(done.stdout.splitlines()[-1])
        assert facts["codes"] == [2, 2]
        core = ["validate", "explain", "calib", "test", "float", "schema", "help"]
        assert facts["commands"] == core
        assert "there is none; install the package whose plug-in adds gguf" in done.stderr
        assert "install the package whose plug-in adds tune" in done.stderr
    alone = ("safetensors", "torch_export")
    with without(tree, FOLDERS.keys() - alone):
        targets = ("--deploy", "safetensors", "--deploy", "pt2")
        done = run_mode(place, "test", *targets, config="plain.json")
        assert done.returncode == 0, done.stderr
    written = {path.name for path in (place / "quantize_result" / "export").iterdir()}
    assert written >= {"ResNet.safetensors", "ResNet.pt2"}


def folder_of(path: Path) -> str:
    """Return the plug-in that a module is in; empty for the core."""
    for name, folder in FOLDERS.items():
        if path.is_relative_to(folder):
            return name
    return ""


def test_the_core_imports_no_plugin_and_a_plugin_those_that_it_needs() -> None:
    needs = {plugin.name: set(plugin.needs) for plugin in PLUGINS}
    packages = {
        ".".join(folder.relative_to(PACKAGE).parts): name for name, folder in FOLDERS.items()
    }
    pattern = re.compile(rf"\bquantizer\.({'|'.join(map(re.escape, packages))})\b")
    faults: list[str] = []
    for path in MODULES:
        here = folder_of(path)
        allowed = {here} | needs.get(here, set())
        named: set[str] = set()
        for node in source(path).nodes:
            if isinstance(node, ast.ImportFrom):
                named.add(f"{node.module}.")
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value)
        for text in sorted(named):
            for package in pattern.findall(text):
                if packages[package] not in allowed:
                    faults.append(f"{path.relative_to(PACKAGE)} names quantizer.{package}")
    assert not faults


def test_no_sentence_of_the_core_names_the_word_of_a_plugin() -> None:
    """Remedies take the words from the declarations; docstrings may have examples."""
    words: set[str] = set()
    for plugin in plugins():
        words |= {*plugin.targets, *plugin.profiles, *plugin.destinations}
    pattern = re.compile(rf"--(?:deploy|for|to) (?:{'|'.join(map(re.escape, words))})\b")
    faults: list[str] = []
    for path in MODULES:
        if folder_of(path):
            continue
        nodes = source(path).nodes
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in docstrings or not isinstance(node, ast.Constant):
                continue
            if isinstance(node.value, str) and pattern.search(node.value):
                faults.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value!r}")
    assert not faults
