"""The hot loops of each system, measured by `python -m experiments.benchmark`."""
