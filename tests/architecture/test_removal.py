"""The folder of a plug-in can be removed, and so can all of them: the rest works."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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
import json, os, sys
import torch

# Forks share what torch imports, and may use no threads of the parent
torch.set_num_threads(1)
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(2, 1),))
options = ["--config_file", "plain.json", "--model", "net.py", "-q"]
codes = {}
for folder in json.loads(sys.argv[1]):
    os.rename(folder, "removed")
    child = os.fork()
    if not child:
        from quantizer.cli.main import run_command

        place = ["-o", os.path.basename(folder)]
        modes = [["--quant_mode", mode, *options, *place] for mode in ("calib", "test")]
        os._exit(max(map(run_command, modes)))
    codes[folder] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.rename("removed", folder)
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


def without(folder: Path, names: list[str]) -> Path:
    """Copy the package with its files, without some plug-ins."""
    removed = {FOLDERS[name] for name in names}

    def ignored(place: str, entries: list[str]) -> list[str]:
        return [
            entry
            for entry in entries
            if entry == "__pycache__" or Path(place, entry) in removed
        ]

    shutil.copytree(PACKAGE, folder / "quantizer", ignore=ignored)
    for name in ("schemas", "configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "400"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=place,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def run_mode(
    place: Path, mode: str, *more: str, config: str = "plain.json"
) -> subprocess.CompletedProcess[str]:
    options = ("--config_file", config, "--model", "examples/digits.py")
    return run(
        place, "-m", "quantizer", "--quant_mode", mode, *options, "--subset_len", "64", *more
    )


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
    name: str, tmp_path: Path
) -> None:
    place = without(tmp_path, [name])
    lost = dependents(name)
    asked = [
        ["--quant_mode", "test", "--deploy", word] for gone in lost for word in TARGETS[gone]
    ]
    asked += [[word] for gone in lost for word in COMMANDS[gone]]
    helps = [[word, "--help"] for word in ("explain", "init") if [word] not in asked]
    done = run(place, "-c", _IN_ONE_PROCESS, json.dumps([["--help"], *helps, *asked]))
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


def test_without_kinds_of_data_and_models_what_asks_for_them_is_refused(tmp_path: Path) -> None:
    place = without(tmp_path, [name for name in FOLDERS if "/sources/" in str(FOLDERS[name])])
    (place / "pictures").mkdir()
    (place / "pictures" / "a.png").touch()
    (place / "a.txt").write_text("text")
    calib = ["--quant_mode", "calib", "--model", "examples/digits.py"]
    data = ["synthetic", "pictures", "a.txt"]
    asked = [[*calib, "--data", word] for word in data]
    asked.append(["--quant_mode", "calib", "--model", "pictures"])
    asked.append([*calib, "--tokenizer", "pictures"])
    done = run(place, "-c", _IN_ONE_PROCESS, json.dumps(asked))
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
def test_a_config_that_asks_for_an_absent_plugin_is_refused(name: str, tmp_path: Path) -> None:
    place = without(tmp_path, [name])
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
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(config))
        commands.append(["validate", str(path)])
    done = run(place, "-c", _IN_ONE_PROCESS, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["codes"] == [0, *[1] * len(asked)], done.stdout
    said = done.stdout + done.stderr
    assert said.count(f"needs the plug-in {name}, which is not there") == len(asked)


@pytest.mark.slow
def test_results_of_an_absent_plugin_are_refused_and_the_default_needs_none(
    tmp_path: Path,
) -> None:
    place = without(tmp_path, [])
    words = ("-m", "quantizer", "--model", "examples/digits.py", "--quant_mode")
    short = ("--subset_len", "64")
    done = run(place, *words, "calib", *short)
    assert done.returncode == 0, done.stderr
    for name in CALIBRATING:
        shutil.rmtree(place / FOLDERS[name].relative_to(ROOT))
    done = run(place, *words, "test", *short)
    assert done.returncode == 5
    missing = next(line for line in done.stderr.splitlines() if "is not there" in line)
    assert "equalization" in missing and "bias_correction" in missing
    done = run_mode(place, "calib", config="configs/cpu_int8.json")
    assert done.returncode == 2
    assert "include_bias_corr needs the plug-in bias_correction" in done.stderr
    done = run(place, *words, "calib", *short, "--fast_finetune", "adaround")
    assert done.returncode == 2
    assert "needs the plug-in finetuning, which is not there" in done.stderr
    for mode in ("calib", "test"):
        done = run(place, *words, mode, *short)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_any_one_plugin_a_network_is_calibrated_and_tested(tmp_path: Path) -> None:
    """Modes import no plug-ins of commands."""
    place = without(tmp_path, [])
    (place / "plain.json").write_text(json.dumps(plain_config()))
    (place / "net.py").write_text(_NET)
    folders = [folder.relative_to(ROOT).as_posix() for folder in FOLDERS.values()]
    removed = [folder for folder in folders if "/commands/" not in folder]
    done = run(place, "-c", _WITHOUT_EACH, json.dumps(removed))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(removed, 0), done.stderr
    for folder in removed:
        assert (place / Path(folder).name / "report.json").exists()


@pytest.mark.slow
def test_without_any_plugin_the_core_works_and_one_alone_writes_its_files(
    tmp_path: Path,
) -> None:
    """The two that come back need no package but torch."""
    place = without(tmp_path, list(FOLDERS))
    (place / "plain.json").write_text(json.dumps(plain_config()))
    done = run_mode(place, "calib")
    assert done.returncode == 0, done.stderr
    done = run_mode(place, "test")
    assert done.returncode == 0, done.stderr
    assert (place / "quantize_result" / "report.json").exists()
    assert not (place / "quantize_result" / "report.html").exists()
    asked = [["--quant_mode", "test", "--deploy", "gguf"], ["tune", "--help"]]
    done = run(place, "-c", _IN_ONE_PROCESS, json.dumps(asked))
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["codes"] == [2, 2]
    assert facts["commands"] == ["validate", "explain", "schema", "help"]
    assert "there is none; install the package whose plug-in adds gguf" in done.stderr
    assert "install the package whose plug-in adds tune" in done.stderr
    for name in ("safetensors", "torch_export"):
        shutil.copytree(FOLDERS[name], place / FOLDERS[name].relative_to(ROOT))
    done = run_mode(place, "test", "--deploy", "safetensors", "--deploy", "pt2")
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
        ".".join(folder.relative_to(ROOT).parts): name for name, folder in FOLDERS.items()
    }
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, packages))})\b")
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
                    faults.append(f"{path.relative_to(PACKAGE)} names {package}")
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
