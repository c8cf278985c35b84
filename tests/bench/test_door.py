"""The door's benchmark runs and measures both ways."""

from bench.door import bench


def test_both_ways_are_measured():
    figures = bench(quick=True).figures
    for name in ("plain", "TLS"):
        assert figures[f"{name} MB/s"] > 0
        assert figures[f"{name} server CPU-s/GB"] > 0
    assert figures["hellos checked/s"] > 0
