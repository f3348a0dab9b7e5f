"""Tables of names, as they were before a test."""

import contextlib

from fedjax_graph.algorithms import REGISTRY
from fedjax_graph.core.aggregators import AGGREGATORS
from fedjax_graph.core.optimizers import OPTIMIZERS, SCHEDULES
from fedjax_graph.data.catalog import DATASETS
from fedjax_graph.tasks import TASKS, images, nodes, subgraphs, traffic_rnn

MODELS = (images.MODELS, nodes.MODELS, subgraphs.MODELS, traffic_rnn.MODELS)
TABLES = (AGGREGATORS, DATASETS, OPTIMIZERS, REGISTRY, SCHEDULES, TASKS, *MODELS)


@contextlib.contextmanager
def kept():
    """Forgets what is registered inside, so that no other test sees it."""
    before = [dict(table._entries) for table in TABLES]
    try:
        yield
    finally:
        for table, entries in zip(TABLES, before, strict=True):
            table._entries = entries
