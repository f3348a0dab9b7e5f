"""What lies between the clients of a round and its aggregator: nothing by default.

`ChannelConfig` is part of the config of every method that federates, and a round sends
what its clients share through `through`: attackers change what they send, updates are
clipped and noise hides what one sent, and a server that takes means may see no model.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax

from fedjax_graph.core import (
    aggregation,
    clients,
    encryption,
    misbehaviour,
    privacy,
    secure_aggregation,
)
from fedjax_graph.core.aggregation import Aggregator
from fedjax_graph.core.checks import Checked
from fedjax_graph.core.errors import InputError
from fedjax_graph.core.misbehaviour import HONEST, Misbehaviour
from fedjax_graph.core.privacy import Privacy

SecureAggregation = Literal["none", "masks", "ckks"]
_KEY = 2**31 - 3  # folded into a round's key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelConfig(Checked):
    """Configures what happens to models on their way."""

    misbehaviour: Misbehaviour = HONEST
    # what the server sees: each model, masked numbers and their sum, or ciphertexts
    secure_aggregation: SecureAggregation = "none"
    privacy: Privacy | None = None  # None: none is promised


DIRECT = ChannelConfig()


class Sent(NamedTuple):
    """What a channel knows of a round besides the models and the cohort."""

    start: Any  # pytree of [1 or C, ...], what clients started from
    client_ids: jax.Array  # [K]
    weights: jax.Array  # [K], before anybody dropped out
    key: jax.Array  # of the round


def through(config: ChannelConfig, aggregate: Aggregator, sent: Sent) -> Aggregator:
    """The aggregator as it sees models that went through a channel.

    Raises:
      InputError: if the server is not to see models of which it takes no mean; or as
        `encryption.mean` does.
    """
    if aggregate is aggregation.none:
        return aggregate  # nothing is sent
    key = jax.random.fold_in(sent.key, _KEY)
    mask_key, noise_key, attack_key = jax.random.split(key, 3)
    is_mean = aggregate is aggregation.weighted_mean
    if config.secure_aggregation != "none":
        aggregate = _secure(config, aggregate, mask_key)
    if config.privacy is not None:
        sees = config.privacy, aggregate, sent.start
        if is_mean:
            aggregate = privacy.private_mean(*sees, noise_key)
        else:
            aggregate = privacy.private_rows(*sees, sent.client_ids, noise_key)
    if config.misbehaviour.changes_models:
        aggregate = _attacked(config.misbehaviour, aggregate, sent, attack_key)
    return aggregate


def refuse(
    config: ChannelConfig,
    reason: str,
    *names: str,
    instead: str = "use fed_avg or fed_prox",
) -> None:
    """Refuses options of the channel that a method would not honour.

    Args:
      config: of the method.
      reason: why it would not, for the message.
      names: of the options; by default all.
      instead: what to do.

    Raises:
      InputError: if one of them is not at its default, which it names.
    """
    for field in dataclasses.fields(ChannelConfig):
        value = getattr(config, field.name)
        if (not names or field.name in names) and value != field.default:
            shown = f"={value}" if isinstance(value, str) else ""
            raise InputError(f"{field.name}{shown}: {reason}; {instead}")


def check_aggregator(
    config: ChannelConfig, aggregate: Aggregator | None = None
) -> None:
    """Refuses to hide models from an aggregator that reads each of them.

    Factories call it, so that nothing is trained before.

    Args:
      config: of the method.
      aggregate: what it merges models by; None: by something of its own.

    Raises:
      InputError: if the server is to see no model, and takes no mean of them.
    """
    if config.secure_aggregation == "none" or aggregate is aggregation.weighted_mean:
        return
    raise InputError(
        f"secure_aggregation={config.secure_aggregation} shows the server nothing "
        "but the plain mean of models, and this method's aggregator reads each"
    )


def _secure(config: ChannelConfig, aggregate: Aggregator, key: jax.Array) -> Aggregator:
    check_aggregator(config, aggregate)
    if config.secure_aggregation == "masks":
        return secure_aggregation.secure_mean(key, config.misbehaviour.may_drop)
    encryption.check("ckks", "secure_aggregation")
    return encryption.encrypted_mean


def _attacked(
    config: Misbehaviour, aggregate: Aggregator, sent: Sent, key: jax.Array
) -> Aggregator:
    def aggregate_attacked(stacked, cohort):
        is_attacker = misbehaviour.attackers(config, sent.client_ids, sent.weights)
        keys = clients.client_keys(key, sent.client_ids[cohort.indices])
        is_attacker = is_attacker[cohort.indices]
        models = misbehaviour.attacked(config, stacked, sent.start, is_attacker, keys)
        return aggregate(models, cohort)

    return aggregate_attacked
