"""Scorers of a made-up release of reasoning-gym, and what the survey says of each; run as a script, it prints JSON."""

import ast
import builtins
import dataclasses
import json
import sys


@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 1

    def validate(self):
        pass


def helper(text):
    return parse_expr(text)  # noqa: F821 - found by its name


class Plain:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, place):
        return {"question": "?", "answer": "7"}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


class Open(Plain):
    def score_answer(self, answer, entry):
        return float(str(eval(answer)) == entry["answer"])


class Helped(Plain):
    def score_answer(self, answer, entry):
        return float(helper(answer) == entry["answer"])


class Hidden(Plain):
    def score_answer(self, answer, entry):
        return float(str(getattr(builtins, "ev" + "al")(answer)) == entry["answer"])


class Literal(Plain):
    def score_answer(self, answer, entry):
        return float(str(ast.literal_eval(answer)) == entry["answer"])


def main():
    from reasoning_gym.factory import DATASETS

    from environments.reasoning_gym_survey import look_at

    found = {}
    for kind in (Plain, Open, Helped, Hidden, Literal):
        DATASETS[kind.__name__] = (kind, Config)
        found[kind.__name__] = look_at(kind.__name__).get("fault", "")
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    sys.modules["reasoning_gym_made_up"] = sys.modules["__main__"]
    for each in (Plain, Open, Helped, Hidden, Literal):
        each.__module__ = each.score_answer.__module__ = "reasoning_gym_made_up"
    helper.__module__ = "reasoning_gym_made_up"
    main()
