from p2p.http.tally import RequestTally


def test_requests_are_counted_by_what_they_are_about():
    tally = RequestTally()
    tally.add("GET", "https://127.0.0.1:8470/v1/head?after=7&wait_s=20")
    tally.add("GET", "https://127.0.0.1:8470/v1/head")
    tally.add("POST", "https://127.0.0.1:8470/v1/submissions")
    tally.add("GET", "https://127.0.0.1:8470/v1/submissions/00ff/file")
    tally.add("POST", "https://hooks.example/v2/head")
    tally.add("POST", "https://hooks.example")
    tally.add("GET", "http://[::1/v1/made-up")
    tally.add("GET", "nonsense")
    assert tally.counts == {"GET head": 2, "POST submissions": 1, "GET submissions": 1, "POST other": 2, "GET other": 2}
