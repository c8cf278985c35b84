"""The example of docs/environments.md: written into a file as it stands, found by its entry point, used."""

import re
import tomllib
from pathlib import Path

from environments.registry import get_environment, open_environment, specify

DOC = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def block(language, containing):
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", DOC, re.DOTALL) if containing in text)


def test_the_example_is_an_environment(tmp_path, monkeypatch):
    entries = tomllib.loads(block("toml", "entry-points"))["project"]["entry-points"]["intellect_node.environments"]
    module = entries["backwards"].partition(":")[0]
    (tmp_path / f"{module}.py").write_text(block("python", "class Backwards"))
    info = tmp_path / "backwards_env-0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backwards-env\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text(f"[intellect_node.environments]\nbackwards = {entries['backwards']}\n")
    monkeypatch.syspath_prepend(tmp_path)
    environment = get_environment("backwards", parameters={"letters": 3})
    task = environment.task(bytes(32))
    word = task.text.split()[1]
    assert environment.reward(task, f" {word[::-1]}\n").value == 1.0
    assert environment.reward(task, "").value == 0.0
    assert open_environment(specify(environment), tmp_path).digest == environment.digest


def test_every_built_in_environment_is_described():
    from environments.registry import BUILT_IN

    assert [name for name in BUILT_IN if f"`{name}`" not in DOC] == []
