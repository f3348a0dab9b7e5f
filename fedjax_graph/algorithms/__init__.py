"""Every method under one name each; the conformance suite runs over this table.

Importing this package imports no method: each is imported when it is looked up.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedjax_graph.core import clients, configs
from fedjax_graph.core.algorithm import FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.federated import FederatedConfig
from fedjax_graph.core.registry import Lazy, Registry, check_name, imported
from fedjax_graph.core.task import TaskConfig
from fedjax_graph.tasks import TASKS

Factory = Callable[[Any], FederatedAlgorithm]
F = TypeVar("F", bound=Factory)


@dataclasses.dataclass(frozen=True)
class Method:
    """A registered method: `factory(config_type(...))` is its algorithm.

    Its factory raises `InputError` for a config of another type.
    """

    config_type: type
    factory: Factory
    title: str  # as tables and plots show it
    is_trained: bool = True

    @property
    def takes_task(self) -> bool:
        """Whether it works on any task, which its config then names."""
        return issubclass(self.config_type, FederatedConfig)

    def runs_on(self, task: TaskConfig) -> bool:
        """Whether it takes a task and finds in this one what it needs.

        Args:
          task: beside which its config has defaults alone.
        """
        if not self.takes_task:
            return False
        try:
            self.factory(self.config_type(task=task))
        except InputError:
            return False
        return True

    @property
    def fields(self) -> dict[str, dataclasses.Field]:
        """The fields of its config by name."""
        return {field.name: field for field in dataclasses.fields(self.config_type)}


def _lazy(
    place: str, title: str, is_trained: bool = True, config: str = ""
) -> Lazy[Method]:
    """A method of this package.

    Args:
      place: "module:factory".
      title: see `Method`.
      is_trained: see `Method`.
      config: "module:type", if not the type with which its argument is annotated.
    """

    def make() -> Method:
        own = imported(f"{__name__}.{config}") if config else None
        return _method(imported(f"{__name__}.{place}"), title, own, is_trained)

    return Lazy(make)


def _method(
    factory: Factory,
    title: str,
    config_type: type | None = None,
    is_trained: bool = True,
) -> Method:
    config_type = config_type or _annotated_config(factory)
    if not dataclasses.is_dataclass(config_type):
        raise InputError(
            f"method {title!r}: its config has to be a dataclass; annotate the "
            "factory's argument with it, or pass config_type"
        )
    own_type = typing.cast(type, config_type)
    return Method(own_type, _checked(factory, own_type, title), title, is_trained)


def _checked(factory: Factory, config_type: type, title: str) -> Factory:
    """The factory, which refuses a config of another type, or that it ignores."""

    @functools.wraps(factory)
    def build(config: Any, *args: Any, **settings: Any) -> FederatedAlgorithm:
        if not isinstance(config, config_type):
            raise InputError(
                f"method {title!r}: expected a {config_type.__name__}, found a "
                f"{type(config).__name__}"
            )
        algorithm = factory(config, *args, **settings)
        if not isinstance(algorithm, FederatedAlgorithm):
            raise InputError(
                f"method {title!r}: its factory returned a {type(algorithm).__name__}, "
                "expected a FederatedAlgorithm"
            )
        promised = getattr(config, "privacy", None)
        if promised is not None and algorithm.privacy is None:
            raise InputError(f"method {title!r}: privacy is promised and not kept")
        chunked = functools.partial(
            clients.with_eval_chunk,
            clients_per_chunk=getattr(config, "clients_per_chunk", None),
        )
        phases = (x._replace(round=chunked(x.round)) for x in algorithm.phases)
        functions = ["init", "round", "evaluate", "predict"]
        functions += ["exchange"] if algorithm.exchange else []
        return algorithm._replace(
            phases=tuple(phases),
            **{name: chunked(getattr(algorithm, name)) for name in functions},
        )

    return build


def _annotated_config(factory: Factory) -> type | None:
    """The type of a factory's first argument, where it is annotated."""
    if not inspect.isfunction(factory):
        return None
    first = next(iter(inspect.signature(factory).parameters), "")
    return typing.get_type_hints(factory).get(first)


REGISTRY: Registry[Method] = Registry(
    "method",
    {
        "ada_fgl": _lazy("ada_fgl:ada_fgl", "AdaFGL"),
        "at_without_fedavg": _lazy(
            "cnfgnn.cnfgnn:at_without_fedavg", "CNFGNN (AT, w/o FedAvg)"
        ),
        "client_eo": _lazy("fl_agcns.fl_agcns:client_eo", "ClientEO"),
        "cnfgnn": _lazy("cnfgnn.cnfgnn:cnfgnn", "CNFGNN"),
        "controller_eo": _lazy("fl_agcns.fl_agcns:controller_eo", "ControllerEO"),
        "ditto": _lazy("ditto:ditto", "Ditto"),
        "fed_adam": _lazy("fed_avg:fed_avg", "FedAdam", config="fed_opt:FedAdamConfig"),
        "fed_att": _lazy("fed_att:fed_att", "FedAtt"),
        "fed_avg": _lazy("fed_avg:fed_avg", "FedAvg"),
        "fed_avg_m": _lazy(
            "fed_avg:fed_avg", "FedAvgM", config="fed_opt:FedAvgMConfig"
        ),
        "fed_dc": _lazy("fed_dc:fed_dc", "FedDC"),
        "fed_gcn": _lazy("fed_gcn:fed_gcn", "FedGCN"),
        "fed_gta": _lazy("fed_gta:fed_gta", "FedGTA"),
        "fed_per": _lazy("fed_per:fed_per", "FedPer"),
        "fed_prox": _lazy("fed_prox:fed_prox", "FedProx"),
        "fed_proto": _lazy("fed_proto:fed_proto", "FedProto"),
        "fed_pub": _lazy("fed_pub:fed_pub", "FED-PUB"),
        "fed_sage_plus": _lazy("fed_sage_plus:fed_sage_plus", "FedSage+"),
        "fed_sgd": _lazy("fed_sgd:fed_sgd", "FedSGD"),
        "fed_star": _lazy("fed_star:fed_star", "FedStar"),
        "fed_yogi": _lazy("fed_avg:fed_avg", "FedYogi", config="fed_opt:FedYogiConfig"),
        "fgssl": _lazy("fgssl:fgssl", "FGSSL"),
        "fl_agcns": _lazy("fl_agcns.fl_agcns:fl_agcns", "FL-AGCNS"),
        "fl_gradient": _lazy("fl_agcns.fl_gradient:fl_gradient", "FL-Gradient"),
        "fl_random": _lazy("fl_agcns.fl_random:fl_random", "FL-Random"),
        "fl_rl": _lazy("fl_agcns.fl_rl:fl_rl", "FL-RL"),
        "gcfl_plus": _lazy("gcfl_plus:gcfl_plus", "GCFL+"),
        "graph_fed_avg": _lazy("graph_fed_avg:graph_fed_avg", "GraphFedAvg"),
        "graphfl": _lazy("graphfl:graphfl", "GraphFL"),
        "gru_centralized": _lazy(
            "cnfgnn.gru_centralized:gru_centralized", "GRU (centralized)"
        ),
        "gru_fmtl": _lazy("cnfgnn.gru_fmtl:gru_fmtl", "GRU + FMTL"),
        "gru_gn": _lazy("cnfgnn.split_learning:gru_gn", "GRU + GN (centralized)"),
        "historical_average": _lazy(
            "cnfgnn.naive:historical_average", "historical average", is_trained=False
        ),
        "lg_fed_avg": _lazy("lg_fed_avg:lg_fed_avg", "LG-FedAvg"),
        "local": _lazy("local:local_training", "local"),
        "moon": _lazy("moon:moon", "MOON"),
        "mp_fed_avg": _lazy("graph_fed_avg:mp_fed_avg", "MPFedAvg"),
        "persistence": _lazy(
            "cnfgnn.naive:persistence", "persistence", is_trained=False
        ),
        "scaffold": _lazy("scaffold:scaffold", "SCAFFOLD"),
        "sfl": _lazy("sfl.sfl:sfl", "SFL"),
        "sfl_lg": _lazy("sfl.sfl:sfl_lg", "SFL + LG-FedAvg"),
        "sfl_per": _lazy("sfl.sfl:sfl_per", "SFL + FedPer"),
        "sfl_star": _lazy("sfl.sfl:sfl_star", "SFL*"),
        "split_learning": _lazy("cnfgnn.split_learning:split_learning", "CNFGNN (SL)"),
        "split_learning_fedavg": _lazy(
            "cnfgnn.split_learning:split_learning_fedavg", "CNFGNN (SL + FedAvg)"
        ),
    },
)


def get_method(name: str) -> Method:
    """Looks a method up, and imports it.

    Raises:
      InputError: if there is none of that name.
    """
    return REGISTRY.look_up(name)


def method_names() -> tuple[str, ...]:
    """The names of all methods, those of plugins last."""
    return tuple(REGISTRY)


def is_users(name: str) -> bool:
    """Tells whether a method was registered by a user, and is not the library's."""
    return REGISTRY.is_users(name)


@typing.overload
def register_method(
    name: str,
    factory: F,
    config_type: type | None = None,
    *,
    title: str | None = None,
    is_trained: bool = True,
) -> F: ...


@typing.overload
def register_method(
    name: str,
    factory: None = None,
    config_type: type | None = None,
    *,
    title: str | None = None,
    is_trained: bool = True,
) -> Callable[[F], F]: ...


def register_method(
    name: str,
    factory: Any = None,
    config_type: type | None = None,
    *,
    title: str | None = None,
    is_trained: bool = True,
) -> Any:
    """Registers a method of one's own; without a factory, returns a decorator of it.

        @register_method("my_method", title="My method")
        def my_method(config: MyConfig) -> FederatedAlgorithm: ...

    Args:
      name: under which `get_method` and the binaries find it.
      factory: config -> algorithm.
      config_type: frozen dataclass of its hyper-parameters; by default the one with
        which the factory's argument is annotated.
      title: as tables and plots show it; by default the name.
      is_trained: whether it has rounds to run.

    Raises:
      InputError: if the name is taken or no plain word, the factory cannot be called,
        or the config is no dataclass.
    """
    check_name(REGISTRY.kind, name)

    def register(factory: F) -> F:
        if not callable(factory):
            raise InputError(f"method {name!r}: {factory!r} cannot be called")
        method = _method(factory, title or name, config_type, is_trained)
        REGISTRY.register(name, method)
        return factory

    return register if factory is None else register(factory)


def make_config(name: str, values: Mapping[str, Any]) -> Any:
    """Builds a method's config from the values of its fields.

    Nested configs may be given as dicts, as they stand in a file; a task's dict has the
    entry `kind`. See `core.configs.known_fields` for values of several methods.

    Raises:
      InputError: if there is no such method, a key is no field of its config, or a
        field without a default is left out.
    """
    return configs.from_dict(
        get_method(name).config_type, values, {TaskConfig: TASKS}, name
    )
