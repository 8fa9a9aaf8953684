"""Command `python -m compare`: a table of runs, their curves in one picture, and both as files."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

from collections.abc import Sequence
from pathlib import Path

from compare.report import print_comparison
from compare.run_record import RunRecord, find_runs
from compare.table import as_csv, as_json, names_of, rows_of
from configs.arguments import quoted
from configs.command_line import command
from configs.console import command_console, print_line
from configs.many_runs_schema import CompareConfig
from configs.options import describe
from configs.stop_signals import restore_signals


def compare(config: CompareConfig) -> None:
    """Print the table and write the files that are asked for.

    Raises ValueError: there is no run, or none has the metric. Raises OSError: a file cannot be read or written.
    """
    restore_signals()
    _check_outputs(config)
    found = [RunRecord.read(path) for path in find_runs(config.runs)]
    trained = [run for run in found if run.is_training]
    if not trained:
        raise ValueError(
            f"{', '.join(config.runs)}: only evaluations and other runs that do not train, which are left out; name the runs "
            "that trained"
        )
    console = command_console()
    groups = print_comparison(console, trained, config.metric)

    if left_out := len(found) - len(trained):
        print_line(
            console, f"{left_out} left out: evaluations (mode=eval) and others that do not train"
        )
    every = [run for runs, _ in groups for run in runs]
    if config.csv is not None:
        Path(config.csv).write_text(as_csv(rows_of(every)), encoding="utf-8")
    if config.json is not None:
        Path(config.json).write_text(as_json(every), encoding="utf-8")
    if config.picture is not None:
        # Imported here, since the table alone needs no matplotlib.
        from compare.picture import draw_runs

        runs, metric = groups[0]
        draw_runs(runs, names_of(runs), metric, Path(config.picture))
        if len(groups) > 1:
            print_line(
                console,
                f"{config.picture} shows the first table; name its runs or others to draw those",
            )


def _check_outputs(config: CompareConfig) -> None:
    """Raise `ValueError` unless all files may be written, before the runs are read."""
    named = {
        option: Path(path)
        for option in ("csv", "json", "picture")
        if (path := getattr(config, option))
    }
    for option, path in named.items():
        if not path.parent.is_dir():
            raise ValueError(
                f"{option}={path}: there is no directory {path.parent}; make it, or set another {option}"
            )
        if path.is_dir():
            raise ValueError(f"{option}={path} is a directory; name a file")
        same = [other for other in named if named[other].resolve() == path.resolve()]
        if same != [option]:
            raise ValueError(
                f"{' and '.join(same)} name the same file, {path}; set another {option}"
            )


def with_runs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with all directories as one option, `runs`.

    An argument is a directory if it names no option: no `=`, or one in the name of a path, such as `many/00-lr=0.1`.
    """
    names = {name for name, _ in describe(CompareConfig)}
    directories: list[str] = []
    others: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_path = not equals or "/" in name or Path(argument).exists()
        is_option = argument.startswith(("-", "hydra.")) or (equals and name.lstrip("+~") in names)
        (directories if is_path and not is_option and argument else others).append(argument)
    if not directories:
        return others
    return [*others, f"runs=[{','.join(map(quoted, directories))}]"]


if __name__ == "__main__":
    command(compare, CompareConfig, "compare", ("runs",), arguments=with_runs)
