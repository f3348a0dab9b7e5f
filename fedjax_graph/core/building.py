"""Tasks built for methods that need more of them than local steps and scores."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_graph.core.algorithm import Data
from fedjax_graph.core.client_state import build_task
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.local import Model
from fedjax_graph.core.task import Embedded, Task, TaskConfig


def embedding_task(
    config: TaskConfig, method: str
) -> tuple[Task, Callable[..., Embedded]]:
    """Builds a task, and takes its `embed`, for a method that needs it.

    Args:
      config: of the task.
      method: its name, for messages.

    Raises:
      InputError: if the task has none.
    """
    lacks = "has no embeddings of classes; use images, nodes or subgraphs"
    return _task_with("embed", config, f"{method}: the task {config.kind!r} {lacks}")


def logits_task(
    config: TaskConfig, method: str
) -> tuple[Task, Callable[[Model, Data], jax.Array]]:
    """Builds a task, and takes its `logits`, for a method that needs them.

    Args:
      config: of the task.
      method: its name, for messages.

    Raises:
      InputError: if the task has none.
    """
    lacks = "has no logits of a graph's nodes; use subgraphs"
    return _task_with("logits", config, f"{method}: the task {config.kind!r} {lacks}")


def _task_with(field: str, config: TaskConfig, lack: str) -> tuple[Task, Any]:
    """A task and one of its functions, or `InputError` where it has none."""
    task = build_task(config)
    function = getattr(task, field)
    if function is None:
        raise InputError(lack)
    return task, function
