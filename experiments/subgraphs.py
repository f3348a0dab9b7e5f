"""Compares federated methods on the subgraphs of one graph.

python -m experiments.subgraphs
python -m experiments.subgraphs --dataset=cora --methods=all --num_seeds=3
python -m experiments.subgraphs --dataset=cora --partition=metis --methods=fed_avg,sfl
python -m experiments.subgraphs --dataset=cora --partition=label_dirichlet
python -m experiments.subgraphs --workdir=FOLDER --resume
"""

from experiments import cli
from experiments.studies.subgraphs import SubgraphStudy


def main() -> None:
    """Runs the study that the command line says."""
    cli.run_study(SubgraphStudy, __doc__)


if __name__ == "__main__":
    main()
