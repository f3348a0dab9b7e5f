"""Compares SFL with personalised federated methods, on traffic or on images.

python -m experiments.sfl
python -m experiments.sfl --dataset=metr_la --data_dir=FOLDER --methods=all
python -m experiments.sfl --dataset=cifar10 --shards=5 --methods=fed_avg,sfl
python -m experiments.sfl --dataset=metr_la --methods=sfl_star --client_graph=none
python -m experiments.sfl --workdir=FOLDER --resume
"""

from experiments import cli
from experiments.studies.sfl import SFLStudy


def main() -> None:
    """Runs the study that the command line says."""
    cli.run_study(SFLStudy, __doc__)


if __name__ == "__main__":
    main()
