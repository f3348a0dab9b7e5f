"""Clients that keep, beside the model the server made for them, the one they trained.

A task of theirs has models `{"params", "batch_stats", "local"}`: u_i that the server
mixed, and under `LOCAL` v_i after the client's local steps, which never leaves it.
"""

import dataclasses
from typing import Any, Literal

from fedjax_graph.core.local import LocalResult, Model
from fedjax_graph.core.task import Task, TaskConfig

Score = Literal["aggregated", "local"]  # u_i, or v_i
LOCAL = "local"


@dataclasses.dataclass(frozen=True)
class KeepsLocal:
    """A task whose clients keep, beside u_i, the v_i that they trained last."""

    task: TaskConfig
    score: Score

    @property
    def kind(self) -> str:
        """That of the task."""
        return self.task.kind

    def build(self) -> Task:
        """The task's functions, of models that hold v_i under `LOCAL`."""
        task = self.task.build()

        def init(key):
            model = task.init(key)
            return model | {LOCAL: model}

        def keeping(update):
            def run(start, *args, **named) -> LocalResult:
                result = update(aggregated(start), *args, **named)
                model = result.model | {LOCAL: result.model}
                return result._replace(model=model)

            return run

        def scored(models):
            return models[LOCAL] if self.score == "local" else aggregated(models)

        update_by = task.update_by
        return task._replace(
            init=init,
            update=keeping(task.update),
            update_by=update_by and (lambda loss: keeping(update_by(loss))),
            evaluate=lambda models, data: task.evaluate(scored(models), data),
            predict=lambda models, data: task.predict(scored(models), data),
        )


def aggregated(models: Model) -> Model:
    """u alone, of models that may hold v beside it."""
    return {part: tree for part, tree in models.items() if part != LOCAL}


def is_local(path: tuple[Any, ...]) -> bool:
    """Path of a leaf in a model -> whether it is of v, and so stays with its client."""
    return path[0].key == LOCAL
