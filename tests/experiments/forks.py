"""Python processes that share the imports of one: each is a fork of a process that has
loaded JAX and what the binaries import, and has not started JAX's backend yet.

It takes seconds to import what a binary needs, and some tests start many.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile

# Forks for each line on stdin, and prints how the child ended; the child goes on below.
SERVER = """
import json, os, sys, warnings
import matplotlib.pyplot, orbax.checkpoint, tensorboardX
from experiments import cli, pictures, report
from experiments.studies import cnfgnn, fl_agcns, graphfl, sfl

for line in sys.stdin:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads of NumPy's products
        child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
given = json.loads(line)
for number, path in enumerate(given["files"]):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
sys.stdin = open(0, closefd=False)
os.environ.clear()
os.environ.update(given["environment"])
sys.argv = ["-c", *given["arguments"]]
exec(given["program"], {"__name__": "__main__"})
"""


@functools.cache
def _server() -> subprocess.Popen:
    """The process that forks; it ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def run(
    program: str, *arguments: str, environment: dict[str, str], input: str = ""
) -> subprocess.CompletedProcess:
    """What `python -W error -c program arguments` does, with its output as text."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("in", "out", "err")]
        for path in paths:
            with open(path, "w") as file:
                file.write(input if path == paths[0] else "")
        given = {
            "program": program,
            "arguments": arguments,
            "environment": environment,
            "files": paths,
        }
        print(json.dumps(given), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        texts = []
        for path in paths[1:]:
            with open(path) as file:
                texts.append(file.read())
    return subprocess.CompletedProcess(arguments, status, *texts)
