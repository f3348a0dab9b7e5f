"""Runs compiled for chips that are not here: what each device would hold and do.

The compiler needs no chip. `libtpu` compiles for a TPU pod and JAX's CUDA plugin for
NVIDIA GPUs on any machine; both are extras of this package (`[tpu]`, `[cuda]`).
"""

import dataclasses
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from fedjax_graph.core import client_rows, clients, mesh, reporter
from fedjax_graph.core.algorithm import Data, FederatedAlgorithm
from fedjax_graph.core.errors import InputError
from fedjax_graph.driver import hlo_costs, programs
from fedjax_graph.driver.config import RunConfig
from fedjax_graph.driver.seeds import abstract_seeds

GIB = 2**30
GPUS_OF_A_MACHINE = 8  # that NVLink joins at the rate of `CHIPS`


@dataclasses.dataclass(frozen=True)
class Chip:
    """Rates of one chip as its maker gives them, dense, without sparsity.

    Products of float32 operands count as the program asks for: on a GPU as TF32 by
    default and at high precision (`tf32`), off the tensor cores at the highest; on a
    TPU in one, three and six passes of bfloat16.
    """

    platform: str  # tpu or cuda
    bfloat16_flops: float  # FLOP/s
    float32_flops: Mapping[str, float]  # FLOP/s by precision: default, high, highest
    bytes: float  # of memory, in a second
    link_bytes: float  # to other chips, in a second and one direction
    memory_gib: float
    source: str

    def rates(self) -> hlo_costs.Rates:
        """What `hlo_costs.analyse` takes."""
        names = ("bf16", "f16", "s8", "u8")
        known = dict.fromkeys(names, self.bfloat16_flops)
        known |= {f"f32_{name}": rate for name, rate in self.float32_flops.items()}
        others = self.float32_flops["highest"]
        return hlo_costs.Rates(
            lambda dtype: known.get(dtype, others), self.bytes, self.link_bytes
        )


def _tpu(flops: float, bandwidth: float, link: float, gib: float, page: str) -> Chip:
    source = f"Google Cloud's page on TPU {page}"
    of_float32 = {"default": flops, "high": flops / 3, "highest": flops / 6}
    return Chip("tpu", flops, of_float32, bandwidth, link, gib, source)


def _gpu(flops: float, bandwidth: float, link: float, gib: float, page: str) -> Chip:
    source = f"NVIDIA's data sheet of the {page}"
    of_float32 = {"default": flops / 2, "high": flops / 2, "highest": 67e12}
    return Chip("cuda", flops, of_float32, bandwidth, link, gib, source)


CHIPS = {
    "v4": _tpu(275e12, 1.2e12, 300e9 / 2, 32, "v4"),
    "v5e": _tpu(197e12, 819e9, 200e9 / 2, 16, "v5e"),
    "v5p": _tpu(459e12, 2.765e12, 600e9 / 2, 95, "v5p"),
    "v6e": _tpu(918e12, 1.64e12, 448e9 / 2, 32, "v6e"),
    "h100": _gpu(989e12, 3.35e12, 900e9 / 2, 74.5, "H100 (SXM)"),
    "h200": _gpu(989e12, 4.8e12, 900e9 / 2, 131, "H200 (SXM)"),
}
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
# What the compiler asks of a GPU, from CUDA's table of compute capability 9.0.
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "NVIDIA {name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of chip and how many: `h200x8`, `v5e:2x2`."""

    name: str
    chip: Chip
    topology: str  # as the compiler writes it, of GPUs slices x hosts x GPUs

    @property
    def backend(self) -> str:
        """The platform as JAX names a backend."""
        return "gpu" if self.chip.platform == "cuda" else self.chip.platform

    def devices(self) -> list[Any]:
        """Describes the chips to the compiler.

        Raises:
          InputError: if the compiler's package is missing or knows no such topology.
        """
        platform, options = self.chip.platform, {}
        name = self.topology
        if platform == "cuda":
            kind = self.name.partition("x")[0].upper()
            options = {
                "target_config": _HOPPER.format(
                    bandwidth=self.chip.bytes,
                    memory=self.chip.memory_gib * GIB,
                    name=kind,
                ),
                "topology": self.topology,
            }
            name = ""
        try:
            found = topologies.get_topology_desc(name, platform, **options)
        except Exception as error:  # whatever the plugin raises
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"compile_for={self.name}: no compiler for it ({reason}); "
                f"if it is missing, run `pip install 'fedjax-graph[{platform}]'`; or "
                "name other chips"
            ) from error
        return list(found.devices)


def use_host() -> None:
    """Lets the CPU compute what is there before a round is compiled for a TPU.

    Only before JAX has been used, and for good: this process then computes on the CPU
    alone. `libtpu` on a machine without a TPU would otherwise be taken for one. It ends
    a process whose XLA_FLAGS it does not know, so those of the CPU are dropped.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith("--xla_cpu_")]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")


def parse(text: str) -> Target:
    """Reads a target: `h200x1`, `h100x8`, `v5e:2x2`, `v5p:2x2x2`.

    Raises:
      InputError: if it is none, or of more GPUs than a machine links with each other.
    """
    gpus = re.fullmatch(r"([a-z]+\d+)x([1-9]\d*)", text)
    tpus = re.fullmatch(r"(v\d+[a-z]*):([1-9]\d*(?:x[1-9]\d*)+)", text)
    found = gpus or tpus
    chip = CHIPS.get(found[1]) if found else None
    if not found or not chip or (chip.platform == "tpu") != bool(tpus):
        raise InputError(
            f"compile_for={text}: expected a chip and how many, such as h200x8 or "
            f"v5e:2x2; known: {', '.join(CHIPS)}"
        )
    if gpus and int(found[2]) > GPUS_OF_A_MACHINE:
        raise InputError(
            f"compile_for={text}: expected at most {GPUS_OF_A_MACHINE} GPUs, those of "
            "a machine; between machines the rates of the chips' table do not hold"
        )
    return Target(text, chip, text if tpus else f"1x1x{found[2]}")


class Compiled(Exception):  # noqa: N818
    """Ends a run that was only to be compiled; has the records of its `Report`s."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        super().__init__(records)
        self.records = records


@dataclasses.dataclass(frozen=True)
class Report:
    """What a round of all seeds and an evaluation need on each device of a target."""

    chip: str
    devices: int
    compile_s: float
    argument_gib: float
    temporary_gib: float
    flops: float
    bytes: float
    kernels: float
    collectives: dict[str, dict[str, float]]  # kind -> count and bytes
    host_transfers: float
    unknown_loops: float  # counted as if they ran once
    roofline_s: float  # each kernel at the chip's rates, one after another
    memory_gib: float  # that the chip has
    has_triton: bool = True  # or else cuBLAS does all products, as XLA could not choose

    def lines(self) -> list[str]:
        """The report in words."""
        sent = "; ".join(
            f"{kind} {found['count']:,.0f} times, {found['bytes'] / GIB:.3g} GiB"
            for kind, found in self.collectives.items()
        )
        memory = self.argument_gib + self.temporary_gib
        products = "" if self.has_triton else ", all products by cuBLAS"
        loops = f"{self.unknown_loops:,.0f} loops of unknown length, counted once"
        return [
            f"compiled for {self.chip}, {self.devices} devices, in "
            f"{self.compile_s:.0f} s; a round of all seeds and an evaluation need on "
            "each device:",
            f"  memory: {self.argument_gib:.3f} GiB of arguments, "
            f"{self.temporary_gib:.3f} GiB of temporaries, {memory:.3f} of "
            f"{self.memory_gib:g} GiB",
            f"  work: {self.flops:.3g} FLOP of products, {self.bytes / GIB:,.1f} GiB "
            f"read and written, {self.kernels:,.0f} kernels{products}",
            f"  collectives: {sent or 'none'}",
            f"  roofline: {self.roofline_s:.3g} s",
            *([f"  without the rest of {loops}"] if self.unknown_loops else []),
        ]


def compile_round(
    algorithm: FederatedAlgorithm,
    splits: Mapping[str, Data],
    config: RunConfig,
    target: Target,
    edge_parts: int = 1,
) -> Report:
    """Compiles what a run executes for chips that are absent.

    This is one round of all seeds, the evaluation after it, and the best states beside
    the last ones, at the shapes of the data; under `on_nan="skip_client"` without what
    looks for clients to leave out.

    Args:
      algorithm: built with what suits the target; see `clients.auto_clients_per_chunk`.
      splits: `train` and `validation` data, or their shapes.
      config: of the run.
      target: the chips.
      edge_parts: see `mesh.make_mesh`.

    Raises:
      InputError: see `Target.devices`, `mesh.make_mesh` and `programs.check_exchange`.
    """
    programs.check_exchange(algorithm, config.is_drawn)
    described = mesh.make_mesh(edge_parts, target.devices())
    if algorithm.exchange:
        splits = programs.exchange(algorithm, splits, programs.abstract_exchange)
        algorithm = algorithm._replace(exchange=None)
    data = splits["train"], splits["validation"]
    states = abstract_seeds(algorithm, config.seeds, data[0], config.is_drawn)
    with mesh.restored():
        jax.set_mesh(described)
        placed = mesh.abstract_spread(states, clients.count(data[0]), axis=1)
        placed = placed, *client_rows.abstract(data)
        shared = _bytes_of_both(data, placed[1:])
        scored = algorithm.scored_from  # of phases, the last one's round
        traced = programs.trace(algorithm.during(scored, scored), config, 1, *placed)
        lowered = traced.lower(lowering_platforms=(target.chip.platform,))
        start = time.perf_counter()
        with reporter.without_alarms():
            compiled, has_triton = _compile(lowered, target)
        seconds = time.perf_counter() - start
    return _report(target, described, compiled, seconds, has_triton, shared)


def _bytes_of_both(data: tuple[Data, Data], placed: tuple[Data, Data]) -> int:
    """Bytes a device of what two splits share: a run has one array for both."""
    first, second = map(jax.tree.leaves, data)
    known = set(map(id, first))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for own, x in zip(second, jax.tree.leaves(placed[1]), strict=True)
        if id(own) in known
    )


def _compile(lowered: Any, target: Target) -> tuple[Any, bool]:
    """Returns a compiled program, and whether Triton may do its products.

    How a GPU does a product, and in tiles of what size, XLA tries out on the GPU. Where
    there is none it takes tiles that may not fit, and ends; then all products are left
    to cuBLAS.
    """
    try:
        return lowered.compile(), True
    except jax.errors.JaxRuntimeError as error:
        if target.chip.platform != "cuda" or "tile sizes" not in str(error):
            raise
    return lowered.compile(compiler_options=WITHOUT_TRITON), False


def _report(
    target: Target,
    described: Mesh,
    compiled: Any,
    seconds: float,
    has_triton: bool,
    shared: int,
) -> Report:
    memory = compiled.memory_analysis()
    costs = hlo_costs.analyse(compiled.as_text(), target.chip.rates())
    return Report(
        chip=target.name,
        devices=described.size,
        compile_s=seconds,
        argument_gib=(memory.argument_size_in_bytes - shared) / GIB,
        temporary_gib=memory.temp_size_in_bytes / GIB,
        flops=costs.flops,
        bytes=costs.bytes,
        kernels=costs.kernels,
        collectives=costs.collectives,
        host_transfers=costs.host_transfers,
        unknown_loops=costs.unknown_loops,
        roofline_s=costs.seconds,
        memory_gib=target.chip.memory_gib,
        has_triton=has_triton,
    )
