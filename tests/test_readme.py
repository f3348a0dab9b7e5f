"""The README's example runs as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_that_composes_the_pieces(capsys):
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    exec(compile(code, str(README), "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    slopes = {name: float(slope) for name, slope, _ in lines}
    assert abs(slopes["median"] - 2) < 0.05  # the line is y = 2 x + 1
    assert abs(slopes["weighted_mean"] - 2) > 0.5  # and one client is broken
