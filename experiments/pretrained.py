"""Lists the pretrained models, shows what one is, and makes one of a finished run.

python -m experiments.pretrained
python -m experiments.pretrained --name=synthetic_cnfgnn
python -m experiments.pretrained --workdir=runs/mine --method=cnfgnn --to=mine.npz
"""

import dataclasses
import json
import pathlib
from typing import Any, ClassVar

from experiments import cli
from experiments.studies.options import Options, option
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import pretrained, results


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedStudy(Options):
    """What is listed, shown or made."""

    subject: ClassVar[str] = "Pretrained models"

    name: str | None = option(None, "One that comes with the package, or an .npz.")
    workdir: str | None = option(
        None, "Folder of a run on a traffic network, of which to make one."
    )
    method: str = option("cnfgnn", "Of that run.")
    to: str | None = option(None, "The file to write, which ends in .npz.")
    note: str | None = option(
        None, "What its card should say beside, such as where earlier rounds were run."
    )

    def run(self) -> None:
        """Does what the options say.

        Raises:
          InputError: one line, where there is no such model or run.
        """
        if self.workdir is None:
            if self.to or self.note or self.is_given("method"):
                raise InputError("--to, --method and --note need --workdir, of a run")
            self._show()
            return
        if self.to is None or not self.to.endswith(".npz") or self.name:
            raise InputError("--workdir needs --to=FILE.npz, and no --name")
        card = pretrained.pack(
            pathlib.Path(self.workdir), self.method, pathlib.Path(self.to), self.note
        )
        _print(card)

    def _show(self) -> None:
        if self.name is None:
            print(_listing())
        else:
            model = pretrained.read(self.name)
            size = _num_parameters(model)
            _print({"method": model.method, "parameters": size, **model.card})


def _listing() -> results.Table:
    """What comes with the package: of which run each is, and its test score."""
    rows = []
    for name in pretrained.names():
        model = pretrained.read(name)
        size, score = f"{_num_parameters(model):,}", f"{model.card['test']['rmse']:.3f}"
        rows.append([name, model.method, model.card["dataset"], size, score])
    header = ["name", "method", "dataset", "parameters", "test RMSE"]
    return results.Table(header, rows)


def _num_parameters(model: pretrained.Pretrained) -> int:
    return sum(x.size for x in model.state.values())


def _print(card: dict[str, Any]) -> None:
    print(json.dumps(card, indent=2))


def main() -> None:
    """Does what the command line asks for."""
    cli.run_study(PretrainedStudy, __doc__)


if __name__ == "__main__":
    main()
