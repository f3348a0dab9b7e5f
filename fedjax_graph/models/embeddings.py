"""What the last layer of a network reads, of any Flax module that names it `head`."""

from typing import Any

import flax.linen as nn
import jax

from fedjax_graph.core.errors import InputError

HEADS = ("head", "output")  # names of last layers


def apply_with_embeddings(
    module: nn.Module | Any, *args: Any, **settings: Any
) -> tuple[Any, jax.Array]:
    """Applies a module and keeps the input of its last layer.

    Args:
      module: its last layer is called `head`, or `output` in the network of a code; a
        layer of that name inside of another one does not count.
      *args: of `module.apply`.
      **settings: likewise.

    Returns:
      What `module.apply` returns, and the embeddings [..., D].

    Raises:
      InputError: if none of its own layers has such a name.
    """
    read: list[jax.Array] = []

    def keep(layer, args, settings, context):
        is_own = context.module.name in HEADS and len(context.module.path) == 1
        if is_own and args and not read:
            read.append(getattr(args[0], "nodes", args[0]))
        return layer(*args, **settings)

    with nn.intercept_methods(keep):
        outputs = module.apply(*args, **settings)
    if not read:
        raise InputError(
            f"{type(module).__name__}: none of its layers is called "
            f"{' or '.join(HEADS)}, whose input its embeddings would be"
        )
    return outputs, read[0]
