"""Commands and flagfiles whose runs fill a paper's tables."""

from collections.abc import Iterable
from typing import Any

from experiments.tables.papers import Paper, Row, Table
from experiments.tables.runs import flag_text


def row_flags(row: Row) -> dict[str, Any]:
    """Flags of a row's run that are not the defaults."""
    given = {name: value for name, value in row.flags.items() if value is not None}
    return {"dataset": row.dataset} | given


def commands(name: str, paper: Paper, tables: Iterable[Table]) -> str:
    """A comment and a command for each row."""
    lines = []
    for table in tables:
        for row in table.rows:
            lines.append(f"# {row_title(paper, table, row)}")
            if row.method is None:
                lines.append("# quoted by the paper")
                continue
            given = row_flags(row) | paper.options | {"methods": row.method}
            texts = [f"--{flag_text(*item)}" for item in given.items()]
            lines.append(f"python -m experiments.{name} {' '.join(texts)}")
    return "\n".join(lines)


def row_title(paper: Paper, table: Table, row: Row) -> str:
    dataset = paper.datasets[row.dataset].title
    return f"Table {table.number}: {', '.join((*row.labels, dataset))}"


def flagfiles(name: str, paper: Paper) -> dict[str, str]:
    """Contents by file name; rows that differ in the method alone share a file.

    So do those that differ in the flag that their table sweeps.
    """
    methods, swept, numbers = {}, {}, {}
    for table in paper.tables:
        for row in table.rows:
            if row.method is None:
                continue
            given = row_flags(row)
            if table.sweep:
                value, given["sweep"] = given.pop(table.sweep), table.sweep
            key = tuple(given.items())
            methods.setdefault(key, {})[row.method] = None
            numbers.setdefault(key, {})[str(table.number)] = None
            if table.sweep:
                swept.setdefault(key, {})[value] = None
    files = {}
    for key, chosen in methods.items():
        given = dict(key) | paper.options | {"methods": list(chosen)}
        if key in swept:
            given["sweep_values"] = list(swept[key])
        (_, dataset), *others = key
        stem = "_".join([dataset, *(f"{flag}_{value}" for flag, value in others)])
        tables = f"Table{'s' * (len(numbers[key]) > 1)} {', '.join(numbers[key])}"
        flag = "--write_flagfiles=experiments/flagfiles"
        files[f"{stem}.flags"] = "\n".join(
            [
                f"# {paper.title}, {tables}. Written by",
                f"# `python -m experiments.tables --paper={name} {flag}`.",
                *(f"--{flag_text(*item)}" for item in given.items()),
                "",
            ]
        )
    return files
