"""Random damage to files of every form that a loader reads."""
