"""Reads many damaged files under limits of memory and time: nightly.

python -m tests.fuzz --count=100000 [--seed=0]
python -m tests.fuzz --case=hdf --number=123 [--seed=0]    # one of them, alone
"""

import argparse
import collections
import faulthandler
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

GIB = 2**30
MEMORY_GIB = 4  # of addresses, of a process that reads
SECONDS = 30  # for one input
PER_PROCESS = 2000


def work(seed: int, first: int, last: int) -> None:
    """Reads inputs, and prints which one before and what came out after."""
    from tests.fuzz.inputs import Inputs

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB * GIB, MEMORY_GIB * GIB))
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(pathlib.Path(folder), seed)
        names = list(inputs.cases)
        for number in range(first, last):
            name = names[number % len(names)]
            print(f"{number} {name}", flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            outcome = inputs.outcome(name, number)
            faulthandler.cancel_dump_traceback_later()
            print(repr(outcome), flush=True)


def run(seed: int, count: int, first: int) -> int:
    """Reads them in other processes; returns how many came out wrong."""
    start, outcomes, wrong = time.monotonic(), collections.Counter(), 0
    while first < count:
        last = min(first + PER_PROCESS, count)
        command = [sys.executable, "-m", "tests.fuzz", f"--seed={seed}", "--work"]
        process = subprocess.run(
            [*command, str(first), str(last)], capture_output=True, text=True
        )
        lines = process.stdout.splitlines()
        for asked, answer in zip(lines[::2], lines[1::2], strict=False):
            outcomes[answer if answer in ("'read'", "'refused'") else "wrong"] += 1
            if answer not in ("'read'", "'refused'"):
                print(asked, answer, flush=True)
                wrong += 1
        if process.returncode:
            print(lines[-1:], process.returncode, process.stderr[-2000:], flush=True)
            wrong += 1
            if not lines:  # it did not even start
                break
            first += len(lines) // 2 + 1
            continue
        first = last
        seconds = time.monotonic() - start
        print(f"{first} inputs, {seconds:.0f} s: {dict(outcomes)}", flush=True)
    return wrong


def main() -> None:
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=int, nargs=2)
    parser.add_argument("--case")
    parser.add_argument("--number", type=int)
    args = parser.parse_args()
    if args.case:
        from tests.fuzz.inputs import Inputs

        with tempfile.TemporaryDirectory() as folder:
            inputs = Inputs(pathlib.Path(folder), args.seed)
            print(inputs.outcome(args.case, args.number))
    elif args.work:
        work(args.seed, *args.work)
    else:
        sys.exit(run(args.seed, args.count, args.first) > 0)


if __name__ == "__main__":
    main()
