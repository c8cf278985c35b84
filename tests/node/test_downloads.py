"""What a node downloaded today is shown, kept and counted on."""

from node.downloads import DownloadMeter
from node.status import StatusBoard


def new_meter(path):
    board = StatusBoard(role="inference", peer_id="alice", run="run")
    return board, DownloadMeter(path, board, bytes_per_day=1000)


def test_a_restart_on_the_same_day_counts_on(tmp_path):
    path = tmp_path / "downloads.json"
    _, meter = new_meter(path)
    meter.budget.take(700)
    meter.save()
    board, again = new_meter(path)
    again.show()
    assert board.snapshot()["details"] == {"downloaded_today": 700, "download_per_day": 1000}
    again.budget.take(300)
    assert again.budget.wait_s() > 0


def test_a_damaged_count_begins_anew(tmp_path):
    path = tmp_path / "downloads.json"
    for content in (b"", b"{", b"[1]", b'["a", 2]', b"9" * 10_000):
        path.write_bytes(content)
        assert new_meter(path)[1].budget.spent[1] == 0


def test_a_disk_that_refuses_costs_the_count_alone(tmp_path, caplog):
    _, meter = new_meter(tmp_path / "gone" / "downloads.json")
    meter.budget.take(1)
    meter.save()
    assert "downloads not counted" in caplog.text
