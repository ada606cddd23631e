"""What is waited for: drawn over on a terminal; in a file a line for good when it takes longer than usual."""

import io

import pytest

from shmrl.monitor.progress import Progress, bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    now = [0.0]
    return now, lambda: now[0]


def test_a_file_gets_a_line_only_when_it_takes_longer_than_usual_and_then_less_and_less_often(clock):
    (now, read), said, out = clock, [], io.StringIO()
    progress = Progress(said.append, out, read)
    progress.begin("collect")
    for second in range(200):
        now[0] = second
        progress.show("step 1/5: 3 of 8 episodes", "5 episodes run")
    assert said == [f"step 1/5: 3 of 8 episodes; {waited} s so far: 5 episodes run" for waited in (30, 60, 120)]
    assert out.getvalue() == ""


def test_what_is_usual_is_learnt(clock):
    (now, read), said = clock, []
    progress = Progress(said.append, io.StringIO(), read)
    progress.begin("collect")
    now[0] = 100.0
    progress.begin("collect")
    for second in range(100, 320):
        now[0] = second
        progress.show("step 2/5", "why")
    assert said == ["step 2/5; 200 s, longer than usual: why"]


def test_a_terminal_has_one_line_that_is_drawn_over(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    progress = Progress(lambda line: None, out := Terminal(), clock[1])
    progress.begin("collect")
    progress.show("step 1/5: [####....] 4 of 8 episodes", "the oldest for 3 s")
    progress.clear()
    assert out.getvalue() == "\x1b[2Kstep 1/5: [####....] 4 of 8 episodes | \r\x1b[2K"
    monkeypatch.setenv("TERM", "dumb")
    assert not Progress(lambda line: None, Terminal()).redraws


def test_a_bar_is_full_at_the_end_and_not_before():
    assert [bar(done, 8, 4) for done in (0, 1, 4, 7.9, 8, 9)] == ["....", "....", "##..", "###.", "####", "####"]
