"""Token ids of prompts and texts of answers."""

import json

import pytest
from tiny_models import BOS, EOS, write_tokenizer

from node.engines.tokenizer import Tokenizer
from protocol.errors import ModelError

QUESTION = [{"role": "system", "content": "sort "}, {"role": "user", "content": "s312="}]


@pytest.fixture
def model_dir(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def test_a_text_comes_back(model_dir):
    tokenizer = Tokenizer(model_dir)
    ids = tokenizer.encode("s312=")
    assert ids[0] == BOS
    assert tokenizer.decode(ids[1:]) == "s312="


def test_the_ending_stop_token_is_no_text(model_dir):
    tokenizer = Tokenizer(model_dir)
    ids = [*tokenizer.encode("123")[1:], EOS]
    assert tokenizer.decode(ids, stop_ids=(EOS,)) == "123"
    assert tokenizer.decode(ids) == "123<eos>"


def test_special_tokens_inside_an_answer_show(model_dir):
    """A policy learns to hide a wrong answer's tail behind a special token."""
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.decode([BOS, *tokenizer.encode("1")[1:]], stop_ids=(EOS,)) == "<bos>1"


def test_without_a_template_contents_follow_each_other(model_dir):
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.encode_messages(QUESTION) == tokenizer.encode("sort s312=")


def test_a_template_shapes_the_prompt(model_dir):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": {"content": "<bos>"}})
    )
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.encode_messages(QUESTION) == tokenizer.encode("s:sort ;u:s312=;")


def test_a_template_file_wins(model_dir):
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    (model_dir / "chat_template.jinja").write_text("<bos>{{ messages[1].content }}")
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.encode_messages(QUESTION) == tokenizer.encode("s312=")


@pytest.mark.parametrize("template", ["{{ strftime_now('%Y') }}", "{% for %}", "{{ messages.__class__.__mro__[1] }}"])
def test_a_template_that_reaches_outside_is_refused(model_dir, template):
    """A template reads the clock or Python's insides, so that two nodes derive different prompts."""
    (model_dir / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match="chat template"):
        Tokenizer(model_dir).encode_messages(QUESTION)


def test_a_broken_tokenizer_is_named(model_dir):
    (model_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used"):
        Tokenizer(model_dir)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer(tmp_path)
