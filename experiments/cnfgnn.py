"""Trains CNFGNN and its baselines on a traffic network and reports what the paper does.

python -m experiments.cnfgnn
python -m experiments.cnfgnn --dataset=metr_la --data_dir=FOLDER --workdir=FOLDER
python -m experiments.cnfgnn --strategy=centralized,sl,sl_fedavg,at_fedavg
python -m experiments.cnfgnn --methods=gru_centralized,gru_local,gru_fedavg,gru_fmtl
python -m experiments.cnfgnn --methods=gru_fedavg,fed_prox,ditto --gru_hidden_size=50
python -m experiments.cnfgnn --methods=gru_fedavg,cnfgnn --train_fraction=0.25
python -m experiments.cnfgnn --sweep=rounds --sweep_values=1,10,20
python -m experiments.cnfgnn --workdir=FOLDER --resume
python -m experiments.cnfgnn --workdir=FOLDER --eval_only --split=validation
"""

from experiments import cli
from experiments.studies.cnfgnn import CNFGNNStudy


def main() -> None:
    """Runs the study that the command line says; ends the process."""
    cli.run_study(CNFGNNStudy, __doc__)


if __name__ == "__main__":
    main()
