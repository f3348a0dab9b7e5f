"""What is read off a compiled program, against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fedjax_graph.driver import compile_for, hlo_costs

RATES = hlo_costs.Rates(
    lambda dtype: 4e6 if dtype == "bf16" else 2e6, bytes=1e6, link_bytes=1e3
)
NUM_ROWS, SIZE, NUM_STEPS = 32, 64, 7
STEP_FLOPS = 2 * NUM_ROWS * SIZE * SIZE
PAIR = "f32[8,32]{1,0:T(8,128)S(1)}", "f32[32,16]{1,0}"  # the first on the chip


def analyse(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo_costs.analyse(jax.jit(fn).lower(*args).compile().as_text(), RATES)


def program(operands, *lines, before=()):
    """An accelerator's program, as its compiler writes it: on `%a`, `%b`, ..."""
    named = dict(zip("abc", operands, strict=False))
    arguments = ", ".join(f"{name}: {shape}" for name, shape in named.items())
    *others, root = lines
    result = root.split(" = ")[1].split(" ")[0]
    return "\n".join(
        [
            "HloModule m",
            "",
            *before,
            f"ENTRY %main ({arguments}) -> {result} {{",
            *(
                f"  %{name} = {shape} parameter({number})"
                for number, (name, shape) in enumerate(named.items())
            ),
            *(f"  {line}" for line in others),
            f"  ROOT {root}",
            "}",
        ]
    )


def analyse_lines(operands, *lines, before=()):
    return hlo_costs.analyse(program(operands, *lines, before=before), RATES)


def test_products_in_loops_count_as_often_as_they_run():
    def repeated(x, w):
        def step(x, _):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(step, x, None, length=NUM_STEPS)[0]

    once = analyse(lambda x, w: jnp.tanh(x @ w), (NUM_ROWS, SIZE), (SIZE, SIZE))
    assert once.flops == STEP_FLOPS
    costs = analyse(repeated, (NUM_ROWS, SIZE), (SIZE, SIZE))
    assert costs.flops == NUM_STEPS * STEP_FLOPS
    assert costs.kernels >= NUM_STEPS

    def nested(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, x: repeated(x, w), x)

    assert analyse(nested, (NUM_ROWS, SIZE), (SIZE, SIZE)).flops == 3 * costs.flops


def test_a_product_reads_and_writes_its_arrays():
    costs = analyse(jnp.matmul, (NUM_ROWS, SIZE), (SIZE, SIZE))
    moved = 4 * (2 * NUM_ROWS * SIZE + SIZE * SIZE)
    assert moved <= costs.bytes <= 2 * moved  # a copy of one operand, at most
    assert costs.seconds == pytest.approx(costs.bytes / 1e6 + STEP_FLOPS / 2e6, rel=0.5)
    assert not costs.collectives


def test_of_a_long_array_a_loop_reads_its_slices():
    """Not the whole array in each pass, which would be 1000 times as much."""
    num_rows, size = 1000, 256

    def rows_in_turn(x):
        def step(total, row):
            return jnp.sin(total + row), None

        return jax.lax.scan(step, jnp.zeros(size), x)[0]

    whole = 4 * num_rows * size
    assert whole <= analyse(rows_in_turn, (num_rows, size)).bytes < 12 * whole


def test_of_a_long_array_that_is_filled_updates_count():
    num_rows, size = 1000, 256

    def fill(x):
        def step(x, _):
            x = jnp.sin(x)
            return x, x

        return jax.lax.scan(step, x, None, length=num_rows)[1]

    whole = 4 * num_rows * size
    assert whole <= analyse(fill, (size,)).bytes < 12 * whole


def test_loops_of_unknown_length_are_said():
    def countdown(x, number):
        return jax.lax.fori_loop(0, number, lambda _, x: jnp.sin(x @ x), x)

    x, number = jnp.ones((SIZE, SIZE)), jnp.int32(9)
    compiled = jax.jit(countdown).lower(x, number).compile()
    costs = hlo_costs.analyse(compiled.as_text(), RATES)
    assert costs.unknown_loops == 1
    assert costs.flops == 2 * SIZE**3
    known = jax.jit(lambda x: countdown(x, 9)).lower(x).compile()
    costs = hlo_costs.analyse(known.as_text(), RATES)
    assert costs.unknown_loops == 0
    assert costs.flops == 9 * 2 * SIZE**3


def test_collectives_count_what_a_device_sends():
    devices = jax.devices()[:4]
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, ("x",)), jax.sharding.PartitionSpec("x")
    )
    x = jax.ShapeDtypeStruct((4 * SIZE,), jnp.float32, sharding=sharding)

    def steps(x):
        def step(total, _):
            return jnp.sin(total + jnp.sum(x + total)), None

        return jax.lax.scan(step, jnp.float32(0), None, length=NUM_STEPS)[0]

    costs = hlo_costs.analyse(jax.jit(steps).lower(x).compile().as_text(), RATES)
    found = costs.collectives["all-reduce"]
    assert found == {"count": NUM_STEPS, "bytes": NUM_STEPS * 4}
    assert costs.host_transfers == 0


def test_a_tpus_kernel_that_sums_and_scatters_is_a_collective():
    kernel = (
        "%all-reduce-scatter.1 (input: f32[4,12,8]) -> f32[12,8] {",
        "  %input = f32[4,12,8]{2,1,0} parameter(0)",
        "  %sum = f32[4,12,8]{2,1,0} all-reduce(%input), to_apply=%add",
        "  ROOT %own = f32[12,8]{1,0} dynamic-slice(%sum)",
        "}",
        "",
    )
    call = "%f = f32[12,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1"
    costs = analyse_lines(["f32[4,12,8]{2,1,0}"], call, before=kernel)
    found = costs.collectives
    assert found == {"reduce-scatter": {"count": 1, "bytes": 4 * 4 * 12 * 8}}


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("kind", ["all-gather", "all-gather-start"])
def test_of_an_all_gather_counts_what_a_device_takes_in(num_devices, kind):
    """Two arrays at once; an asynchronous one returns its operands as well."""
    operands = "f32[8,4]{1,0}", "f32[16]{0}"
    results = f"f32[{8 * num_devices},4]{{1,0}}, f32[{16 * num_devices}]{{0}}"
    shape = f"({results})"
    if kind.endswith("-start"):
        shape = f"(({', '.join(operands)}), ({results}))"
    line = f"%g = {shape} {kind}(%a, %b), dimensions={{0}}"
    found = analyse_lines(operands, line).collectives["all-gather"]
    assert found == {"count": 1, "bytes": (num_devices - 1) * 4 * (8 * 4 + 16)}


def met_by_hand(size, stride, padding, window=3):
    """Pairs of an output and an entry under its window, along one dimension."""
    outputs = (size + 2 * padding - window) // stride + 1
    return sum(
        0 <= output * stride + place - padding < size
        for output in range(outputs)
        for place in range(window)
    )


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0), (3, 2)])
def test_convolutions_and_their_gradients_are_as_much_work(stride, padding):
    """The gradients' windows are dilated, and padded or reversed."""

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def gradient(number):
        return jax.grad(lambda *args: jnp.sum(convolve(*args) ** 2), number)

    shapes = (4, 9, 9, 5), (3, 3, 5, 6)
    flops = 2 * 4 * 5 * 6 * met_by_hand(9, stride, padding) ** 2
    assert analyse(convolve, *shapes).flops == pytest.approx(flops)
    for number in (0, 1):  # the convolution again, for the square, and its gradient
        found = analyse(gradient(number), *shapes).flops
        assert found == pytest.approx(2 * flops)


@pytest.mark.parametrize(
    ("call", "operands"),
    [
        ("convForward", ("4,9,9,5", "3,3,5,6", "4,5,5,6")),
        ("convBackwardInput", ("4,5,5,6", "3,3,5,6", "4,9,9,5")),
        ("convBackwardFilter", ("4,9,9,5", "4,5,5,6", "3,3,5,6")),
    ],
)
def test_a_gpus_convolutions_are_as_much_work(call, operands):
    first, second, result = (f"f32[{dims}]{{3,2,1,0}}" for dims in operands)
    lines = (
        f"%c = ({result}, u8[64]{{0}}) custom-call(%a, %b), "
        "window={size=3x3 stride=2x2 pad=1_1x1_1}, "
        f'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn${call}"',
        f"%d = {result} get-tuple-element(%c), index=0",
    )
    flops = 2 * 4 * 5 * 6 * met_by_hand(9, 2, 1) ** 2
    assert analyse_lines([first, second], *lines).flops == pytest.approx(flops)


def test_a_batched_product_of_a_tpu_is_one_product_each():
    """207 matrices: the window meets one of them for each output."""
    line = (
        "%p = f32[207,48,192]{2,1,0} convolution(%a, %b), "
        "window={size=207 stride=206 lhs_dilate=207}, dim_labels=0bf_0io->0bf"
    )
    operands = "f32[207,48,64]{2,1,0}", "f32[207,64,192]{2,1,0}"
    flops = analyse_lines(operands, line).flops
    assert flops == pytest.approx(2 * 207 * 48 * 64 * 192)


def test_a_librarys_scratch_is_no_traffic():
    """Nothing says how much of it is written."""
    line = (
        "%p = (f32[8,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$gemm", '
        'backend_config={"lhs_contracting_dimensions":["1"]}'
    )
    costs = analyse_lines(PAIR, line)
    assert costs.flops == 2 * 8 * 16 * 32
    assert costs.bytes == 4 * (32 * 16 + 8 * 16)  # `a` is on the chip


@pytest.mark.parametrize(
    ("line", "expected"),
    [  # as GPU and TPU compilers write products
        (
            "%p = f32[8,16]{1,0} custom-call(%a, %b), "
            'custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
            2 * 8 * 16 * 32,
        ),
        (
            "%p = f32[8,16]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf",
            2 * 8 * 16 * 32,
        ),
    ],
)
def test_products_of_accelerators(line, expected):
    costs = analyse_lines(PAIR, line)
    assert costs.flops == expected
    assert costs.bytes == 4 * (32 * 16 + 8 * 16)  # `a` is on the chip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (  # a quarter of an array, to the chip
            "%p = ((f32[32,16]{1,0}), f32[8,16]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) "
            "slice-start(%b), slice={[0:8], [0:16]}",
            4 * 8 * 16,
        ),
        (
            "%p = (f32[32,16]{1,0:T(8,128)S(1)}, f32[32,16]{1,0}, u32[]{:S(2)}) "
            "copy-start(%b)",
            4 * 32 * 16,
        ),
        (  # from the chip
            "%p = (f32[8,32]{1,0}, f32[8,32]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) "
            "copy-start(%a)",
            4 * 8 * 32,
        ),
        ("%p = f32[8,16]{1,0} slice(%b), slice={[0:8], [0:16]}", 2 * 4 * 8 * 16),
        (
            "%p = f32[8,16]{1,0:S(1)} slice(%b), slice={[0:8], [0:16]}",
            4 * 8 * 16,
        ),
        ("%p = f32[8,16]{1,0} slice(%a), slice={[0:8], [0:16]}", 4 * 8 * 16),
    ],
)
def test_what_moves_to_and_from_a_tpus_chip_counts_once(line, expected):
    assert analyse_lines(PAIR, line).bytes == expected


PRECISIONS = ("default", "high", "highest")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_of_float32_cost_what_their_precision_asks_for(precision):
    """In a program of this machine, and as a GPU's compiler writes library calls."""
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    product = functools.partial(jnp.matmul, precision=precision)
    attribute = f"operand_precision={{{precision},{precision}}}"
    asked = f'["{precision.upper()}","{precision.upper()}"]'
    calls = (
        '"__cublas$lt$matmul", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        f'"precision_config":{{"operand_precision":{asked},"algorithm":"ALG_UNSET"}}}}}}',
        f'"__cudnn$convForward", dim_labels=bf_io->bf, {attribute}',
    )
    for text in (
        jax.jit(product).lower(shape, shape).compile().as_text(),
        *(
            program(PAIR, f"%p = f32[8,16]{{1,0}} custom-call(%a, %b), target={call}")
            for call in calls
        ),
    ):
        seen = []
        rates = hlo_costs.Rates(lambda x: seen.append(x) or 1.0, 1.0, 1.0)  # noqa: B023
        hlo_costs.analyse(text, rates)
        assert seen == [f"f32_{precision}"]


@pytest.mark.parametrize(
    ("chip", "times"),
    [("v5e", [1, 1, 3, 6]), ("h200", [1, 2, 2, 989 / 67])],  # by their data sheets
)
def test_rates_of_float32_are_those_of_a_chips_precisions(chip, times):
    rate = compile_for.CHIPS[chip].rates().flops
    found = [rate("bf16") / rate(f"f32_{precision}") for precision in PRECISIONS]
    assert [1, *found] == pytest.approx(times)
