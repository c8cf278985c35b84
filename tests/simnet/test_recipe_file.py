"""A simulated run's recipe is written as it was read, tables in lists and all."""

import tomllib

from simnet.recipe_file import to_toml


def test_tables_in_lists_survive():
    table = {"name": "x", "environment": {"pools": [{"file": 'a "b"', "from_step": 0}, {"file": "c", "from_step": 9}]}}
    assert tomllib.loads("\n".join(to_toml(table))) == table
