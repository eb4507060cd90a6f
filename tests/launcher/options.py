"""The command line of the parent, as far as it concerns the ranks."""

from typing import Any

import pytest

# These choose items, write files or ask the user; the parent alone does that.
PARENT_ONLY = {
    *("in_world", "world_dir", "file_or_dir", "keyword", "markexpr", "deselect", "ignore", "ignore_glob", "pyargs"),
    *("maxfail", "exitfirst", "collectonly", "continue_on_collection_errors", "lf", "failedfirst", "newfirst"),
    *("stepwise", "stepwise_skip", "stepwise_reset", "cacheshow", "cacheclear", "last_failed_no_failures"),
    *("xmlpath", "pastebin", "log_file", "basetemp", "debug", "usepdb", "usepdb_cls", "trace", "help", "version"),
    *("costs", "rootdir", "inifilename", "addopts", "override_ini", "plugins", "capture", "assertmode"),
}


def for_workers(config: pytest.Config) -> tuple[list[str], dict[str, Any]]:
    """Return what pytest must know before it loads plugins, as arguments, and the rest, as values to set."""
    option = config.option
    arguments = [
        *("-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"),
        *(f"--rootdir={config.rootpath}", f"--capture={option.capture}", f"--assert={option.assertmode}"),
        *(f"--import-mode={option.importmode}", f"--color={'yes' if option.capture == 'no' else 'no'}"),
    ]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    if option.confcutdir:
        arguments.append(f"--confcutdir={option.confcutdir}")
    for flag, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        arguments += [word for value in values or [] for word in (flag, value)]
    simple = {k: v for k, v in vars(option).items() if k not in PARENT_ONLY and _is_simple(v)}
    return arguments, simple


def _is_simple(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
