"""`report.html`: whole, well-formed, without anything from elsewhere."""

import base64
import html.parser
import json
import os
import pathlib
import shutil
import subprocess

import pytest

from experiments import report
from experiments.report import captions, keys
from experiments.studies import options
from experiments.studies.cnfgnn import CNFGNNStudy
from experiments.studies.graphfl import GraphFLStudy
from fedjax_graph.core import processes
from fedjax_graph.core.optimizers import OptimizerConfig
from fedjax_graph.driver import plots, provenance
from fedjax_graph.driver.results import Table

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
VOID = {"meta", "img", "br", "link", "input", "hr"}
ENTRY = {
    "test": {"rmse": 11.5, "mae": 6.0},
    "test_std": {"rmse": 0.25, "mae": 0.1},
    "best_round": 3,
    "best_round_by_seed": [3, 4],
    "communication_bytes": {"up": 2**30, "down": 2**30},
    "config": {"hidden_size": 64},
}
HARDWARE = dict.fromkeys(report.OF_HARDWARE, "cpu")


class Page(html.parser.HTMLParser):
    """Elements in their order, each closed in turn, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text, self.attributes = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += f" {data}"


@pytest.fixture
def run(tmp_path):
    """A finished run of METR-LA, as far as a report reads it."""
    study = CNFGNNStudy(dataset="metr_la", methods=("cnfgnn",), num_rounds=5, seed=1)
    settings = {
        "command": study.command(),
        "flags": study.record(),
        "notes": ["a note with <tags> & more"],
        "num_sensors": 207,
        "num_steps": 8640,
        "hardware": HARDWARE,
        "versions": {"jax": "0"},
        "source": {"version": "9.9.9", "git_commit": "abc123-dirty"},
    }
    found = {"dataset": "metr_la", "settings": settings, "methods": {"cnfgnn": ENTRY}}
    (tmp_path / "results.json").write_text(json.dumps(found))
    plots.curves(tmp_path / "forecasts.png", {"a": ([1], [2])}, "x", "y")
    plots.curves(tmp_path / "of_my_own.png", {"a": ([1], [2])}, "x", "y")
    table = Table(["mph", "RMSE"], [["CNFGNN", "11.500 ± 0.250"]])
    report.write(tmp_path, "cnfgnn", table)
    return tmp_path


@pytest.fixture
def page(run):
    return Page((run / "report.html").read_text())


def test_it_is_well_formed_and_needs_nothing_else(run, page):
    text = (run / "report.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert {"script", "link", "iframe", "object"}.isdisjoint(page.tags)
    assert "http:" not in text and "https:" not in text and "url(" not in text
    pictures = [value for name, value in page.attributes if name == "src"]
    head = "data:image/png;base64,"
    assert [x.startswith(head) for x in pictures] == [True, True]
    drawn = base64.b64decode(pictures[0].removeprefix(head))
    assert drawn == (run / "forecasts.png").read_bytes()
    assert all(value for name, value in page.attributes if name == "alt")


def test_the_first_process_alone_reads_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "is_first", lambda: False)
    report.write(tmp_path, "cnfgnn", Table([], []))
    report.write_sweep(tmp_path, "cnfgnn", "metr_la", "python", [{"rmse": 1.0}])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scored", ["last round", None])
def test_it_says_which_state_was_tested(run, scored):
    path = run / "results.json"
    found = json.loads(path.read_text())
    if scored:
        found["settings"]["scored"] = scored
        path.write_text(json.dumps(found))
        report.write(run, "graphfl", Table(["mph"], [["CNFGNN"]]))
    words = " ".join(Page((run / "report.html").read_text()).text.split())
    said = scored or "best round by the validation part"
    assert f"Of the state of the {said}, on the test part." in words


def test_it_says_what_was_run(page):
    words = " ".join(page.text.split())
    for said in (
        "cnfgnn: metr_la",
        "python -m experiments.cnfgnn --dataset=metr_la ",
        " --methods=cnfgnn --num_rounds=5 --seed=1",
        "by fedjax_graph 9.9.9, commit abc123-dirty",
        "a note with <tags> & more",
        "11.500 ± 0.250",
        "--num_rounds",
        '"hidden_size": 64',
    ):
        assert said in words, said


def test_the_papers_tables_have_this_run_in_them(page):
    words = " ".join(page.text.split())
    assert "CNFGNN, Table 7: traffic forecasts" in words
    assert "RMSE (mph): paper ours difference" in words
    assert "CNFGNN METR-LA 11.487 11.500 ± 0.250 +0.013 cut" in words
    assert "not the paper's in full: num_steps is 8640, not 34272" in words
    assert "Flags that are not the paper's: num_rounds=5" in words
    assert "GRU (centralized" not in words  # was not run


def test_pictures_have_captions_and_keys_a_legend(page):
    words = " ".join(page.text.split())
    assert "the band one standard deviation to either side" in words
    assert "of my own of_my_own.png" in words
    assert f"rmse {keys.KEYS['rmse']}" in words
    assert keys.KEYS["accuracy"] not in words  # not of this run


def test_every_picture_that_a_study_draws_has_a_caption():
    folder = pathlib.Path(__file__).parents[2] / "experiments" / "studies"
    drawn = set()
    for path in folder.glob("*.py"):
        drawn |= {x for x in path.read_text().split('"') if x.endswith(".png")}
    assert len(drawn) > 8
    for name in drawn:
        place, caption = captions.find(name.replace("{method}", "fl_agcns"))
        assert place < len(captions.CAPTIONS) and caption.text, name


def test_a_sweep_links_to_its_runs(tmp_path):
    (tmp_path / "1-2").mkdir()
    (tmp_path / "1-2" / "results.json").touch()
    rows = [{"method": "cnfgnn", "rmse": 11.25, "communication_bytes": {"up": 1}}]
    report.write_sweep(tmp_path, "cnfgnn", "tiny", "a command", rows)
    page = Page((tmp_path / "report.html").read_text())
    assert ("href", "1-2/report.html") in page.attributes
    assert "cnfgnn 11.25" in " ".join(page.text.split())
    assert "Beside the paper" not in page.text


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        (CNFGNNStudy(data_dir="a b"), "cnfgnn '--data_dir=a b'"),
        (GraphFLStudy(sweep="overlap", data_dir="d"), "--data_dir=d --sweep=overlap"),
        (CNFGNNStudy(data_dir="d", gn_mlp_sizes=(8, 8)), "--gn_mlp_sizes=8,8"),
        (CNFGNNStudy(data_dir="d", masked_loss=True), "--masked_loss"),
        (
            CNFGNNStudy(data_dir="d", client_optimizer=OptimizerConfig("adam", 0.5)),
            "--client_optimizer=adam,learning_rate=0.5,momentum=none,weight_decay=0.0,"
            "schedule=constant,clip_norm=none,second_momentum=none,epsilon=none,"
            "last_learning_rate=0.0,num_steps=none,stateful=false",
        ),
    ],
)
def test_the_command_runs_the_same(study, expected):
    assert study.command().startswith("python -m experiments.")
    assert study.command().endswith(expected)


def test_switches_that_are_on_by_default_can_be_told():
    assert options.flag("a", False) == "--noa"


def test_the_commit_is_that_of_a_clone(tmp_path):
    assert provenance.git_commit(tmp_path) is None
    (tmp_path / ".git").mkdir()  # which git cannot read
    assert provenance.git_commit(tmp_path) is None


def browser():
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium: name one by $CHROMIUM")
def test_a_browser_shows_it(run, tmp_path):
    """Its pictures are decoded, nothing is asked of the network or complained of."""
    shown = tmp_path / "shown.png"
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu"),
        *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,3000"),
        *(f"--screenshot={shown}", (run / "report.html").as_uri()),
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    assert ":CONSOLE" not in process.stderr
    assert shown.stat().st_size > 20_000
