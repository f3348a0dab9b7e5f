"""A frozen dataclass for each binary: `run()` from Python does all that it does."""
