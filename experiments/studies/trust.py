"""Options of clients that are not to be trusted, and of a server that is not."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

from experiments.studies.base import Study
from experiments.studies.methods import check_concerns, having
from experiments.studies.options import option
from fedjax_graph import algorithms
from fedjax_graph.core import encryption, privacy
from fedjax_graph.core.aggregators import AGGREGATORS, takes_tolerance, tolerant_names
from fedjax_graph.core.channel import ChannelConfig, SecureAggregation
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import SCALES, Attack, Misbehaviour
from fedjax_graph.core.privacy import Privacy
from fedjax_graph.core.robust import TOLERANCE

MISBEHAVIOUR = tuple(field.name for field in dataclasses.fields(Misbehaviour))
PRIVACY = tuple(f"dp_{field.name}" for field in dataclasses.fields(Privacy))
NAMED = ("aggregator", "tolerance", "secure_aggregation")  # as the configs' fields
TRUST_FIELDS = (*NAMED, "misbehaviour", "privacy")  # what `trust_values` may give
OF_HIDDEN_STATES = ("dp_hidden_clip_norm", "dp_gradient_clip_norm")
NEEDS = {  # option: what it changes nothing without
    **dict.fromkeys(PRIVACY, "dp_noise_multiplier"),
    "straggler_work": "straggler_rate",
    "attack": "byzantine_fraction",
    "attack_scale": "byzantine_fraction",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustStudy(Study):
    """A study of methods that federate, whose clients may misbehave."""

    subject: ClassVar[str] = "Privacy and misbehaving clients"

    aggregator: str = option(
        "weighted_mean",
        f"Of FedAvg, what extends it, and CNFGNN: {', '.join(AGGREGATORS)}, or a "
        "plugin's by name.",
    )
    tolerance: float = option(
        TOLERANCE,
        "Share of a cohort that the trimmed mean, Krum and multi-Krum withstand.",
        lower=0.0,
        upper=0.49,
    )
    dropout_rate: float = option(
        0.0, "Share of a round's clients that send nothing.", lower=0.0, upper=0.99
    )
    straggler_rate: float = option(
        0.0, "Share of a round's clients that are slow.", lower=0.0, upper=1.0
    )
    straggler_work: float = option(
        0.5,
        "Share of its local steps that a slow client does; 0: it comes too late.",
        lower=0.0,
        upper=0.99,
    )
    byzantine_fraction: float = option(
        0.0, "Share of the clients that attack, in all rounds.", lower=0.0, upper=1.0
    )
    attack: str = option(
        "sign_flip", "What attackers do.", choices=list(get_args(Attack))
    )
    attack_scale: float | None = option(
        None,
        "s of sign_flip, scaling and noise; by default 4, 10 and 1.",
        lower=1e-9,
    )

    secure_aggregation: str = option(
        "none",
        "What a server that takes the mean of models sees: each of them (none), masked "
        "numbers that sum to it (masks), or ciphertexts (ckks).",
        choices=list(get_args(SecureAggregation)),
    )

    dp_noise_multiplier: float | None = option(
        None,
        "Client-level differential privacy: noise on what clients send, over the most "
        "that one of them can add; by default none.",
        lower=1e-9,
        upper=1e6,
    )
    dp_clip_norm: float = option(
        1.0, "The norm that a client's update is cut to.", lower=1e-9
    )
    dp_delta: float = option(1e-5, "delta of epsilon.", lower=1e-300, upper=0.99)
    dp_hidden_clip_norm: float = option(
        1.0, "Of CNFGNN: of a window's hidden states.", lower=1e-9
    )
    dp_gradient_clip_norm: float = option(
        1e-3, "Of CNFGNN: of the gradient in a window's embedding.", lower=1e-9
    )

    def trust_values(self) -> dict[str, Any]:
        """What the options that are given say, under the names of configs' fields."""
        conduct = {name: getattr(self, name) for name in MISBEHAVIOUR}
        values = {name: getattr(self, name) for name in NAMED if self.is_given(name)}
        if any(map(self.is_given, MISBEHAVIOUR)):
            values["misbehaviour"] = Misbehaviour(**conduct)
        if promised := self.privacy():
            values["privacy"] = promised
        return values

    def privacy(self) -> Privacy | None:
        """What is promised to clients; None without noise."""
        if self.dp_noise_multiplier is None:
            return None
        return Privacy(**{name[len("dp_") :]: getattr(self, name) for name in PRIVACY})

    def check_trust(
        self, methods: Sequence[str], registered: Callable[[str], str] = str
    ) -> None:
        """Checks that the options concern the methods, and that they know them.

        Args:
          methods: names.
          registered: name -> that under which `algorithms` has the method.

        Raises:
          InputError: if an option needs another one, the aggregator is not known or
            concerns none of the methods, or clients and server of one that is trained
            exchange no models, or a package is missing.
        """
        for name, needed in NEEDS.items():
            if self.is_given(name) and not getattr(self, needed):
                raise InputError(f"--{name} needs --{needed}")
        if self.aggregator not in AGGREGATORS:
            known = ", ".join(AGGREGATORS)
            raise InputError(f"--aggregator={self.aggregator}: unknown; known: {known}")
        if self.is_given("attack_scale") and self.attack not in SCALES:
            raise InputError(f"--attack_scale: --attack={self.attack} has none")
        for name in ("aggregator", "tolerance"):
            check_concerns(self, (name,), methods, having(name, methods, registered))
        sending = having("exchange_bits", methods, registered)  # hidden states
        check_concerns(self, OF_HIDDEN_STATES, methods, sending)
        if self.is_given("tolerance") and not takes_tolerance(self.aggregator):
            raise InputError(
                f"--tolerance: --aggregator={self.aggregator} takes none; "
                f"{tolerant_names()} do"
            )
        found = {name: algorithms.get_method(registered(name)) for name in methods}
        of_channel = (*MISBEHAVIOUR, "secure_aggregation", *PRIVACY)
        trained = [name for name, method in found.items() if method.is_trained]
        check_concerns(self, of_channel, methods, trained)
        for option_name in of_channel:
            for name, method in found.items():
                is_without = not issubclass(method.config_type, ChannelConfig)
                if self.is_given(option_name) and method.is_trained and is_without:
                    raise InputError(f"--{option_name} is not for {name}")
        split = having("edges_per_chunk", methods, registered)
        check_concerns(self, ("edge_parts",), methods, split)
        if self.secure_aggregation == "ckks":
            encryption.check("ckks", "secure_aggregation")
        if self.privacy() is not None:
            privacy.check(self.on_nan)
