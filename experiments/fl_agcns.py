"""Searches graph networks over federated subgraphs, and trains what was found anew.

python -m experiments.fl_agcns
python -m experiments.fl_agcns --dataset=cora --data_dir=FOLDER
python -m experiments.fl_agcns --dataset=citeseer --methods=fl_agcns,fl_random,gcn,appnp
python -m experiments.fl_agcns --dataset=cora --space=2022 --code=3,6,0,0,6,54,55,5
python -m experiments.fl_agcns --dataset=cora --partition=random --encryption=ckks
python -m experiments.fl_agcns --workdir=FOLDER --resume

A search ends with one architecture code. It, like each fixed network, is trained
`--num_retrain` times from other initial weights and tested at its best validation
round: the table has means and deviations.
"""

from experiments import cli
from experiments.studies.fl_agcns import FLAGCNSStudy


def main() -> None:
    """Runs the study that the command line says."""
    cli.run_study(FLAGCNSStudy, __doc__)


if __name__ == "__main__":
    main()
