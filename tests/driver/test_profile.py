"""Which calls a trace is of."""

import jax
import pytest

from fedjax_graph.driver.profile import Profile


@pytest.fixture
def calls(monkeypatch):
    """What the profiler is told, between numbers of calls."""
    found = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder: found.append(folder)
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append("stop"))
    return found


@pytest.mark.parametrize(
    ("num_calls", "expected"),
    [
        (1, [1]),
        (2, [1, "here", 2, "stop"]),
        (3, [1, "here", 2, 3, "stop"]),
        (4, [1, "here", 2, 3, "stop", 4]),
    ],
)
def test_the_second_and_third_call_are_traced(calls, capsys, num_calls, expected):
    profile = Profile("here")
    for number in range(1, num_calls + 1):
        with profile.call():
            calls.append(number)
    profile.close()
    assert calls == expected
    assert ("no trace" in capsys.readouterr().out) == (num_calls == 1)


def test_without_a_folder_nothing_is_traced(calls, capsys):
    profile = Profile(None)
    for _ in range(3):
        with profile.call():
            pass
    profile.close()
    assert (calls, capsys.readouterr().out) == ([], "")


def test_a_call_that_fails_ends_the_trace(calls):
    profile = Profile("here")
    with profile.call():
        pass
    with pytest.raises(ZeroDivisionError), profile.call():
        _ = 1 / 0
    profile.close()
    assert calls == ["here", "stop"]


def test_a_trace_is_written(tmp_path):
    profile = Profile(tmp_path)
    for _ in range(3):
        with profile.call():
            jax.block_until_ready(jax.numpy.ones(3) + 1)
    profile.close()
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
