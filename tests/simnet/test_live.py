import io

from rich.console import Console

from simnet.gather import now_ms
from simnet.live import Dashboard, PlainLines, dashboard, make_view, plain_line, sparkline


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def shown(console: Console) -> str:
    return console.file.getvalue()


def test_the_dashboard_shows_the_run_and_a_row_for_each_node(recording):
    console = terminal()
    for node in recording.nodes:
        node.lives[-1].ended_ms = None
    console.print(dashboard(recording))
    text = shown(console)
    for part in (recording.run[-20:], "20/20", "█", "relay-0 out 300 B", "cheat: wrong-model", "step 12: relay-0 join"):
        assert part in text


def test_a_narrow_terminal_still_shows_what_nodes_do(recording):
    recording.nodes = [node for node in recording.nodes if node.name.startswith(node.role)]
    trainer = recording.nodes[0]
    trainer.lives[-1].ended_ms = None
    trainer.status.state, trainer.status.activity = "working", "training step 7"
    trainer.status.since_ms = now_ms()
    trainer.status.details.contributors.clear()
    console = terminal(80)
    console.print(dashboard(recording))
    assert "training step 7" in shown(console)


def test_a_plain_line_says_who_waits_for_what(recording):
    trainer = recording.nodes[0]
    trainer.lives[-1].ended_ms = None
    trainer.status.state, trainer.status.activity = "waiting", "rollouts of step 20"
    line = plain_line(recording)
    for part in ("step 20/20", "reward 1.000", "accepted 40", "rejected 2", "waiting trainer-0: rollouts of step 20"):
        assert part in line
    assert "\n" not in line


def test_hostile_words_do_not_steer_the_terminal(recording):
    """Attack: a node's activity holds escape sequences and rich markup."""
    words = "\x1b[2J\x1b]0;owned\x07[red]x[/red]"
    trainer = recording.nodes[0]
    trainer.lives[-1].ended_ms = None
    trainer.status.state, trainer.status.activity = "waiting", words
    trainer.status.details.contributors[1].rejected = {words: 1}
    console = terminal()
    console.print(dashboard(recording))
    assert "\x1b[2J" not in shown(console)
    assert "\x1b]0" not in shown(console)
    assert "[red]x" in shown(console)
    assert "\x1b" not in plain_line(recording)


def test_the_dashboard_is_for_terminals_only():
    assert isinstance(make_view(terminal(), live=True), Dashboard)
    assert isinstance(make_view(terminal(), live=False), PlainLines)
    assert isinstance(make_view(Console(file=io.StringIO()), live=True), PlainLines)


def test_plain_lines_come_every_few_seconds_not_every_round(recording):
    console = Console(file=io.StringIO(), width=80)
    with PlainLines(console, every_s=3600) as view:
        for _ in range(5):
            view.show(recording)
    assert shown(console).count("\n") == 1


def test_the_dashboard_draws_itself(recording):
    console = terminal()
    with Dashboard(console) as view:
        view.say("run [x]")
        view.show(recording)
    assert "run [x]" in shown(console)


def test_a_sparkline_runs_from_the_least_to_the_greatest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert len(sparkline([1.0] * 99, width=40)) == 40
