"""What a compiled program does, read off its optimized HLO.

XLA's own cost analysis counts the body of a loop once, and a GPU's products not at all,
which hide behind library calls. Here loops count as often as they run, products by
their dimensions, and memory by what a kernel reads and writes: of an array that it
slices, the slice alone, and of one that it updates in place, the update alone. Arrays
that a TPU keeps on the chip are no traffic.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_BITS = {
    **{f"{kind}{bits}": bits for kind in "fsu" for bits in (4, 8, 16, 32, 64)},
    **{"bf16": 16, "pred": 8, "c64": 64, "c128": 128, "s2": 2, "u2": 2},
}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,<=]*)\](\{[^{}]*\})?")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = "
    r"(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\S+) ([a-z][\w\-]*)\((.*)$"
)
_NAMED = re.compile(r"(\w+)=%?([\w.\-]+)")
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"),
    *("after-all", "partition-id", "replica-id", "opt-barrier", "domain"),
    *("add-dependency", "get-dimension-size", "broadcast"),
}
_SLICES = {"dynamic-slice", "gather", "slice"}
_PREFETCHES = {"slice-start", "copy-start"}  # a TPU's, to and from its chip
_TO_HOST = {"infeed", "outfeed", "send", "recv"}
_HOST_CALL = re.compile(r"is_host_transfer=true|xla_(ffi_)?python|MoveToHost")
_FREE_CALL = re.compile(r"AllocateBuffer|Sharding|AssumeGather|annotate")
# as an attribute, or in what XLA tells cuBLAS
_PRECISION = re.compile(r'operand_precision(?:=\{|":\[")(\w+)')
_CONVOLUTION_CALL = "__cudnn$conv"
_PRODUCT_CALL = re.compile(r"gemm|matmul|cublas", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str  # the line from the operands on

    def named(self, key: str) -> str | None:
        """The computation or value that an attribute names."""
        return dict(_NAMED.findall(self.rest)).get(key)


@dataclasses.dataclass
class Costs:
    """Sums over a program, on each device."""

    flops: float = 0.0  # of products; a multiplication and an addition are two
    bytes: float = 0.0  # read and written in the device's memory
    kernels: float = 0.0
    host_transfers: float = 0.0
    unknown_loops: float = 0.0  # whose lengths the program does not tell
    seconds: float = 0.0  # kernels one after another, each at the roofline
    # kind -> count, and bytes that a device hands in, of all-gathers those it takes in
    collectives: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Costs", times: float = 1) -> None:
        """Adds what happens `times` times."""
        for field in dataclasses.fields(self):
            if field.name != "collectives":
                mine, theirs = (getattr(x, field.name) for x in (self, other))
                setattr(self, field.name, mine + times * theirs)
        for kind, found in other.collectives.items():
            mine = self.collectives.setdefault(kind, {"count": 0, "bytes": 0})
            for key, value in found.items():
                mine[key] += times * value


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a chip does in a second; products by the type of their operands."""

    # (an operand's type, such as bf16) -> FLOP/s; of float32 by the precision that is
    # asked for: f32_default, f32_high or f32_highest
    flops: Callable[[str], float]
    bytes: float  # of memory
    link_bytes: float  # to the other chips


def analyse(text: str, rates: Rates) -> Costs:
    """Sums up a compiled program.

    Args:
      text: optimized HLO, as `compiled.as_text()` gives it.
      rates: of the chip, for `Costs.seconds`.
    """
    return _Program(text, rates).total()


def num_bytes(shape: str, everywhere: bool = False) -> float:
    """Bytes of an array or a tuple of arrays.

    Args:
      shape: as HLO writes it.
      everywhere: whether those count that are kept on a TPU's chip, which their layout
        says.
    """
    return sum(
        _size(dims) * _BITS.get(dtype, 0) / 8
        for dtype, dims, layout in _ARRAY.findall(shape)
        if everywhere or "S(1)" not in layout
    )


def _first_array(shape: str) -> str:
    """The first array of a tuple, or the array that it is."""
    found = _ARRAY.search(shape)
    return found[0] if found else ""


def _is_library_product(line: Instruction) -> bool:
    """Whether a library computes a product or a convolution."""
    is_call = line.kind == "custom-call"
    is_product = _CONVOLUTION_CALL in line.rest or _PRODUCT_CALL.search(line.rest)
    return is_call and bool(is_product)


def _prefetched(shape: str) -> float:
    """Bytes of memory that move between two arrays, which begin the tuple `shape`.

    They are as many as the smaller one has, once for each of the two in memory.
    """
    ends = [match[0] for match in _ARRAY.finditer(shape)][:2]
    size = min(num_bytes(end, everywhere=True) for end in ends)
    return size * sum(num_bytes(end) > 0 for end in ends)


def _size(dims: str) -> int:
    return math.prod(int(x.lstrip("<=")) for x in dims.split(",") if x)


def _dims(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(x.lstrip("<=")) for x in found[2].split(",") if x] if found else []


def _dtype(shape: str) -> str:
    found = _ARRAY.search(shape)
    return found[1] if found else ""


def _operands(rest: str) -> tuple[str, ...]:
    depth, end = 1, 0
    for end, letter in enumerate(rest):  # noqa: B007
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            break
    return tuple(re.findall(r"%([\w.\-]+)", rest[:end]))


def _parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations: dict[str, dict[str, Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[1]
            computations[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif found := _LINE.match(re.sub(r"/\*.*?\*/", "", line)):
            own, shape, kind, rest = found.groups()
            if "ROOT " in line[: line.index("=")]:
                rest += ", is_root"
            computations[name][own] = Instruction(
                own, shape, kind, _operands(rest), rest
            )
    return computations, entry


class _Program:
    def __init__(self, text: str, rates: Rates) -> None:
        self._computations, self._entry = _parse(text)
        self._rates = rates
        self._known: dict[str, Costs] = {}

    def total(self) -> Costs:
        return self._computation(self._entry)

    def _computation(self, name: str) -> Costs:
        if name not in self._known:
            costs = Costs()
            lines = self._computations[name]
            for instruction in lines.values():
                self._add(costs, instruction, lines)
            self._known[name] = costs
        return self._known[name]

    def _add(self, costs: Costs, line: Instruction, lines) -> None:
        kind = line.kind.removesuffix("-start").removesuffix("-update")
        if kind in _FREE or line.kind.endswith(("-done", "-update")):
            return
        if kind == "while":
            body, condition = line.named("body"), line.named("condition")
            if body and condition:
                trips = self._trips(line, condition)
                costs.unknown_loops += trips is None
                costs.add(self._computation(body), 1 if trips is None else trips)
            return
        if kind == "conditional":
            branches = [self._computation(name) for name in self._branches(line)]
            costs.add(max(branches, key=lambda branch: branch.seconds))
            return
        called = line.named("to_apply") or line.named("calls")
        if kind in ("call", "async") and called:
            costs.add(self._computation(called))
            return
        costs.add(self._kernel(kind, line, lines))

    def _trips(self, line: Instruction, condition: str) -> int | None:
        """How often a loop runs; None where the program does not tell."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest)
        if known:
            return int(known[1])
        found = self._computations[condition]
        limits = [
            int(x.rest.split(")")[0])
            for x in found.values()
            if x.kind == "constant" and x.shape.startswith(("s32[]", "u32[]"))
        ]
        return max(limits, default=0) or None

    @staticmethod
    def _branches(line: Instruction) -> list[str]:
        many = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
        if many:
            return re.findall(r"%?([\w.\-]+)", many[1])
        both = (line.named("true_computation"), line.named("false_computation"))
        return [name for name in both if name]

    def _kernel(self, kind: str, line: Instruction, lines) -> Costs:
        costs = Costs(kernels=1)
        called = line.named("calls") if kind == "fusion" else None
        inside = self._computations.get(called or "", {})
        if kind in _TO_HOST or _HOST_CALL.search(line.rest):
            costs.host_transfers = 1
        if (called or "").startswith("all-reduce-scatter"):  # a TPU's, in one kernel
            kind = "reduce-scatter"
        if kind in COLLECTIVES:
            sent = [lines[x].shape for x in line.operands if x in lines]
            size = sum(num_bytes(shape, everywhere=True) for shape in sent)
            if kind == "all-gather":  # a device takes in what the others have
                whole = num_bytes(line.shape, everywhere=True)
                # an asynchronous one returns its operands as well
                size = whole - size * (2 if line.kind.endswith("-start") else 1)
            costs.collectives[kind] = {"count": 1, "bytes": size}
            costs.seconds = size / self._rates.link_bytes
            return costs
        seconds = 0.0
        for flops, dtype in self._products(line, lines, inside):
            costs.flops += flops
            seconds += flops / self._rates.flops(dtype)
        costs.bytes = self._traffic(kind, line, lines, inside)
        costs.seconds = max(seconds, costs.bytes / self._rates.bytes)
        return costs

    def _products(
        self, line: Instruction, lines, inside
    ) -> Iterator[tuple[float, str]]:
        if line.kind in ("dot", "convolution"):
            yield _product(line, lines)
        elif _is_library_product(line):
            is_convolution = _CONVOLUTION_CALL in line.rest
            yield (_cudnn if is_convolution else _cublas)(line, lines)
        for own in inside.values():
            if own.kind in ("dot", "convolution"):
                yield _product(own, inside)
            elif own.kind == "fusion":
                called = self._computations.get(own.named("calls") or "", {})
                yield from self._products(own, inside, called)

    def _traffic(self, kind: str, line: Instruction, lines, inside) -> float:
        shapes = [lines[x].shape if x in lines else "" for x in line.operands]
        if kind == "custom-call" and _FREE_CALL.search(line.rest):
            return 0.0
        if line.kind in _PREFETCHES:
            return _prefetched(line.shape)
        if kind in _SLICES:
            is_read = num_bytes(shapes[0]) > 0
            read = num_bytes(line.shape, everywhere=True) if is_read else 0.0
            return read + num_bytes(line.shape)
        if kind in ("dynamic-update-slice", "scatter"):
            return 2 * num_bytes(shapes[-1] if kind == "scatter" else shapes[1])
        if not inside:
            written = line.shape
            if _is_library_product(line):  # and the library's scratch behind it
                written = _first_array(written)
            return num_bytes(written) + sum(map(num_bytes, shapes))
        return self._written(line, inside) + sum(
            self._read(number, shape, inside) for number, shape in enumerate(shapes)
        )

    @staticmethod
    def _written(line: Instruction, inside: Mapping[str, Instruction]) -> float:
        """A fusion's results; of one that is updated in place, the update."""
        roots = [x for x in inside.values() if x.rest.endswith(", is_root")]
        results = roots[:1]
        if roots and roots[0].kind == "tuple":
            results = [inside[x] for x in roots[0].operands if x in inside]
        total, whole = 0.0, num_bytes(line.shape)
        for result in results:
            while result.kind in ("bitcast", "copy") and result.operands:
                result = inside[result.operands[0]]
            if result.kind == "dynamic-update-slice":
                saved = num_bytes(result.shape)
                total -= min(saved, whole) - num_bytes(inside[result.operands[1]].shape)
        return max(0.0, whole + total)

    @staticmethod
    def _read(number: int, shape: str, inside: Mapping[str, Instruction]) -> float:
        """What a fusion reads of an operand: slices of it, if it only slices."""
        whole = num_bytes(shape)
        own = [
            x.name
            for x in inside.values()
            if x.kind == "parameter" and x.rest.startswith(f"{number})")
        ]
        names, sliced = set(own), 0.0
        for user in inside.values():
            if not names & set(user.operands):
                continue
            if user.kind == "bitcast":
                names.add(user.name)
            elif user.kind in _SLICES and user.operands[0] in names:
                sliced += num_bytes(user.shape, everywhere=True)
            elif user.kind == "dynamic-update-slice" and user.operands[0] in names:
                continue
            else:
                return whole
        return min(whole, sliced)


def _product(line: Instruction, lines) -> tuple[float, str]:
    """FLOPs of a `dot` or `convolution`, and the type of its operands."""
    left, right = (lines[x].shape for x in line.operands[:2])
    size = math.prod(_dims(line.shape))
    if line.kind == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        places = [int(x) for x in found[1].split(",") if x] if found else []
        flops = 2.0 * size * math.prod(_dims(left)[i] for i in places)
    else:
        flops = _convolution(left, right, line.shape, line.rest)
    return flops, _with_precision(left, line.rest)


def _with_precision(operand: str, rest: str) -> str:
    """The type of an operand, of float32 with the precision of the product."""
    dtype = _dtype(operand)
    if dtype != "f32":
        return dtype
    found = _PRECISION.search(rest)
    return f"{dtype}_{found[1].lower() if found else 'default'}"


def _cublas(line: Instruction, lines) -> tuple[float, str]:
    """FLOPs of a product by cuBLAS, and the type of its operands."""
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.rest)
    left = lines[line.operands[0]].shape
    places = [int(x) for x in re.findall(r"\d+", found[1])] if found else []
    contracted = math.prod(_dims(left)[i] for i in places)
    size = math.prod(_dims(_first_array(line.shape)))
    return 2.0 * size * contracted, _with_precision(left, line.rest)


def _cudnn(line: Instruction, lines) -> tuple[float, str]:
    """The same of a GPU's convolution, or of a gradient of one, of as many FLOPs.

    Its window and dimensions are those of the convolution itself.
    """
    first, second = (lines[x].shape for x in line.operands[:2])
    found = _ARRAY.search(line.shape)
    result = found[0] if found else ""
    shapes = first, second, result
    if "BackwardInput" in line.rest:  # of gradient and kernel
        shapes = result, second, first
    elif "BackwardFilter" in line.rest:  # of inputs and gradient
        shapes = first, result, second
    return _convolution(*shapes, line.rest), _with_precision(first, line.rest)


def _convolution(inputs: str, kernel: str, outputs: str, rest: str) -> float:
    """FLOPs of a convolution by the shapes of its three arrays.

    Places of the window that lie on padding, or between entries that a dilation has
    moved apart, are no work. So a product of many matrices, which a TPU writes as a
    convolution whose window meets each of them once, counts as what it is.
    """
    total = 2.0 * math.prod(_dims(outputs))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if not labels:
        return total
    of_inputs, of_kernel, of_outputs = (
        dict(zip(letters, _dims(shape), strict=False))
        for letters, shape in zip(
            labels.groups(), (inputs, kernel, outputs), strict=True
        )
    )
    total *= of_kernel["i"]
    window = re.search(r"window=\{([^}]*)\}", rest)
    own = dict(x.split("=") for x in window[1].split()) if window else {}
    for place in sorted(filter(str.isdigit, of_outputs)):
        values = {
            key: [int(x) for x in text.split("x")[int(place)].split("_")]
            for key, text in own.items()
        }
        sizes = of_inputs[place], of_kernel[place], of_outputs[place]
        total *= _share_of_places(*sizes, values)
    return total


def _share_of_places(
    num_inputs: int, size: int, num_outputs: int, window: Mapping[str, list[int]]
) -> float:
    """Places of a window that meet an entry, for each output, along one dimension."""
    stride, spread, apart = (
        window.get(key, [1])[0] for key in ("stride", "rhs_dilate", "lhs_dilate")
    )
    first = window.get("pad", [0])[0]
    last = (num_inputs - 1) * apart
    starts, met = np.arange(num_outputs) * stride - first, 0
    for place in range(size):
        at = starts + place * spread
        met += np.count_nonzero((at >= 0) & (at <= last) & (at % apart == 0))
    return met / num_outputs
