"""Digests of arrays, which processes find together, each from its own parts."""

import hashlib
import json
from typing import Any

import jax
import numpy as np

from fedjax_graph.core import mesh, processes

NUM_AT_ONCE = 2**20  # elements
_ODD = tuple(
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def digest(tree: Any) -> str:
    """Computes a digest of the paths, types, shapes and bits of a pytree.

    Each element is hashed with its place, to 64 bits, by the finalizer of SplitMix64
    (Steele, Lea, Flood, OOPSLA 2014), and the hashes of an array are added modulo 2^64:
    the sum does not depend on how the array is cut. It finds damage, and is no defence
    against who would forge it.

    Args:
      tree: pytree of NumPy arrays, or of arrays on the devices of all processes, which
        have to call it together.

    Returns:
      64 hexadecimal digits, the same in every process.
    """
    heads, sums = [], []
    for path, leaf in jax.tree.leaves_with_path(tree):
        shape = np.shape(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        heads.append([name, np.dtype(leaf.dtype).name, shape])
        parts = mesh.own_parts(leaf)
        sums.append(sum(_sum_of_hashes(x, start, shape) for start, x in parts))
    everyones = [json.loads(text) for text in processes.gather(json.dumps(sums))]
    totals = [sum(column) % 2**64 for column in zip(*everyones, strict=True)]
    return hashlib.sha256(json.dumps([heads, totals]).encode()).hexdigest()


def _sum_of_hashes(
    part: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]
) -> int:
    """Adds up the hashes of a part's elements, by their places in the whole array."""
    flat = np.ascontiguousarray(part).reshape(-1)
    is_wide = flat.dtype.itemsize > 8  # complex128: two numbers an element
    bits = flat.view("u8" if is_wide else f"u{flat.dtype.itemsize}")
    if is_wide:
        part = bits.reshape(*part.shape, -1)
        start, shape = (*start, 0), (*shape, part.shape[-1])
    total = 0
    for first in range(0, len(bits), NUM_AT_ONCE):
        some = bits[first : first + NUM_AT_ONCE].astype(np.uint64)
        places = np.arange(first, first + len(some), dtype=np.uint64)
        if part.shape != shape:
            indices = np.unravel_index(places.astype(np.int64), part.shape)
            moved = [own + begin for own, begin in zip(indices, start, strict=True)]
            places = np.ravel_multi_index(moved, shape).astype(np.uint64)
        total += int(np.sum(_hash(some, places), dtype=np.uint64))
    return total % 2**64


def _hash(bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Mixes [N] uint64 and their places into [N] uint64."""
    step, first, second = _ODD
    places += np.uint64(1)
    places *= step
    bits += places
    bits ^= bits >> np.uint64(30)
    bits *= first
    bits ^= bits >> np.uint64(27)
    bits *= second
    bits ^= bits >> np.uint64(31)
    return bits
