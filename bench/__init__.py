"""Every figure that the documentation quotes, as a command: `python -m bench NAME [--quick]`.

A benchmark is a module here with a function `bench(*, quick: bool) -> bench.harness.Result`; there is nothing else to
register. Run from a clone; not part of the installed package.
"""
