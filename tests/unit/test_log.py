"""Messages under the logger `colo`, and the spinner of what takes its time."""

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console

from colo import log

SAY = "import logging, colo.log\n"


def spoken(code, **environment):
    """What code writes to standard error in a process without pytest's handlers."""
    done = subprocess.run(
        [sys.executable, "-c", SAY + code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


@pytest.fixture
def environment(monkeypatch):
    import os

    monkeypatch.delenv("COLO_LOG", raising=False)
    return dict(os.environ)


EACH = "for level in (10, 20, 30): colo.log.logger.log(level, 'level %d', level)"


@pytest.mark.parametrize(
    ("name", "levels"),
    [(None, [20, 30]), ("debug", [10, 20, 30]), ("INFO", [20, 30]), ("warning", [30]), ("error", []), ("?", [20, 30])],
)
def test_colo_log_is_the_level_of_the_messages(environment, name, levels):
    chosen = environment if name is None else environment | {"COLO_LOG": name}
    assert spoken(EACH, **chosen) == "".join(f"colo: level {level}\n" for level in levels)


def test_a_program_with_handlers_gets_the_messages_there_and_once(environment):
    text = spoken("logging.basicConfig(format='%(name)s|%(message)s')\n" + EACH, **environment)
    assert text == "colo|level 20\ncolo|level 30\n"


def test_setting_up_twice_writes_once(environment):
    assert spoken("colo.log.set_up('info')\ncolo.log.logger.info('hello')", **environment) == "colo: hello\n"


@pytest.fixture
def level():
    before = log.logger.level
    yield log.logger.setLevel
    log.logger.setLevel(before)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def test_a_terminal_shows_a_spinner_whose_text_may_change(level):
    level(logging.INFO)
    console = terminal()
    with log.waiting("starting", console) as update:
        assert not log.shows_engines()
        update("measuring")
        assert log._Spinners.shown.status == "measuring"
        with log.waiting("within", terminal()) as inner:
            assert log._Spinners.shown.status == "within"
            inner("further in")
            assert log._Spinners.shown.status == "further in"
        assert log._Spinners.shown.status == "measuring"
    assert log._Spinners.shown is None
    assert "measuring" in console.file.getvalue()


def test_a_spinner_ends_with_an_error(level):
    level(logging.INFO)
    with pytest.raises(KeyError), log.waiting("starting", terminal()):
        raise KeyError
    assert log._Spinners.shown is None


@pytest.mark.parametrize("name", ["DEBUG", "WARNING"])
def test_no_spinner_tangles_with_the_engines_log_or_shows_where_nothing_is_wanted(level, name):
    level(name)
    console = terminal()
    with log.waiting("starting", console) as update:
        update("more")
    assert console.file.getvalue() == ""
    assert log.shows_engines() is (name == "DEBUG")


def test_what_is_no_terminal_shows_no_spinner(level):
    level(logging.INFO)
    console = Console(file=io.StringIO(), force_terminal=False)
    with log.waiting("starting", console) as update:
        update("more")
    assert console.file.getvalue() == ""
