"""A small graph on which the binary of FL-AGCNS runs, for tests."""

import numpy as np

from experiments.studies.fl_agcns_methods import EVOLUTIONARY, SEARCHES
from tests.experiments import binary

NUM_NODES, NUM_CLASSES, NUM_FEATURES, NUM_CLIENTS = 60, 3, 6, 2
NUM_LAYERS, NUM_GENERATIONS, NUM_WARM_UP, NUM_EPOCHS, NUM_RETRAIN = 3, 3, 1, 2, 2
NUM_TRAINED, NUM_VALIDATED, NUM_TESTED = 15, 21, 24
OPS = ("GINConv", "APPNP")  # with batch statistics, and without weights
EVOLUTION = (
    "--fitness_from=shared",
    "--population_size=4",
    "--codes_per_step=2",
    f"--num_generations={NUM_GENERATIONS}",
    f"--num_warm_up={NUM_WARM_UP}",
)
SMALL = (  # flags, and the methods that they concern; None: all
    (EVOLUTION, EVOLUTIONARY),
    (("--supernet_steps=1",), (*EVOLUTIONARY, "fl_gradient")),
    (("--num_relaxed_rounds=1",), ("fl_gradient",)),
    (("--num_trials=2",), ("fl_random", "fl_rl")),
    ((f"--num_layers={NUM_LAYERS}", f"--ops={','.join(OPS)}"), SEARCHES),
    (("--space=2022",), (*SEARCHES, "code")),
    ((f"--num_clients={NUM_CLIENTS}",), None),
    ((f"--num_epochs={NUM_EPOCHS}", f"--num_retrain={NUM_RETRAIN}"), None),
)


def small(methods):
    """The flags that make a run of these methods short."""
    chosen = [flags for flags, known in SMALL if known is None or {*methods} & {*known}]
    return sum(chosen, ())


class Machine(binary.Machine):
    def __init__(self, folder):
        super().__init__(folder, "experiments.fl_agcns")

    def command_line(self, workdir, *flags, methods=("gcn",)):
        return [
            f"--workdir={self.folder / workdir}",
            f"--dataset={self.folder / 'mine.npz'}",
            *([f"--methods={','.join(methods)}"] if methods else []),
            *small(methods or ("code",)),
            *flags,
        ]

    def entry(self, workdir, method):
        return self.results(workdir)["methods"][method]

    def subgraphs(self, workdir):
        return self.results(workdir)["settings"]["subgraphs"]


def write_graph(folder):
    """The dataset of all command lines."""
    binary.write_graph(
        folder / "mine.npz",
        NUM_NODES,
        NUM_CLASSES,
        NUM_FEATURES,
        train_idx=np.arange(NUM_TRAINED),
        val_idx=np.arange(NUM_TRAINED, NUM_TRAINED + NUM_VALIDATED),
        test_idx=np.arange(NUM_NODES - NUM_TESTED, NUM_NODES),
    )


def losses(machine, workdir, method):
    """Validation losses by round."""
    records = [r for r in machine.metrics(workdir) if r["method"] == method]
    assert [r["round"] for r in records] == list(range(1, len(records) + 1))
    return [record["validation_loss"] for record in records]


def output(answers, name):
    """What a command line that is in order printed."""
    status, out, err = answers[name]
    assert (name, status, err) == (name, 0, "")
    return out
