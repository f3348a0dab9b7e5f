"""Compares GraphFL with individual and federated learning of node labels.

python -m experiments.graphfl
python -m experiments.graphfl --dataset=cora --data_dir=FOLDER --num_seeds=5
python -m experiments.graphfl --dataset=citeseer --task=new_labels --labels_per_class=6
python -m experiments.graphfl --dataset=cora --task=self_training --pseudo_labels=10
python -m experiments.graphfl --dataset=coauthor_cs --sweep=overlap
python -m experiments.graphfl --workdir=FOLDER --resume

A draw of labels is a seed: `--num_seeds=5` runs five, and reports mean and deviation.
"""

from experiments import cli
from experiments.studies.graphfl import GraphFLStudy


def main() -> None:
    """Runs the study that the command line says."""
    cli.run_study(GraphFLStudy, __doc__)


if __name__ == "__main__":
    main()
