"""The config of every task under its kind; each is imported when it is looked up."""

from fedjax_graph.core.registry import Lazy, Registry, imported


def _lazy(place: str) -> Lazy[type]:
    return Lazy(lambda: imported(f"{__name__}.{place}"))


TASKS: Registry[type] = Registry(
    "task",
    {
        "images": _lazy("images:ImageTask"),
        "nodes": _lazy("nodes:NodeTask"),
        "subgraphs": _lazy("subgraphs:SubgraphTask"),
        "traffic_rnn": _lazy("traffic_rnn:TrafficRNNTask"),
        "traffic_seq2seq": _lazy("traffic_seq2seq:TrafficSeq2SeqTask"),
    },
)


def register_task(config_type: type) -> type:
    """Registers the config of a task of one's own under its `kind`; a decorator.

    Args:
      config_type: a `core.task.TaskConfig`.

    Raises:
      InputError: if the kind is taken.
    """
    return TASKS.register(config_type.kind, config_type)
