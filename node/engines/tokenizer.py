"""Text to token ids and back, from a model directory's tokenizer.json and its chat template if it has one.

Contributors and validators must derive the same ids from the same prompt, so a template sees nothing but the messages:
no clock, no environment. Leaves out everything that depends on transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import tokenizers

from environments.base import Message
from node.engines.model_config import MAX_CONFIG_BYTES
from protocol.errors import ModelError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TOKENIZER_BYTES: Final = 64 << 20
MAX_TEMPLATE_BYTES: Final = 1 << 20
_TURN_MARK: Final = "zq7turn"
"""Stands for an assistant's turn where what follows one is asked of the template."""


class _TokenizerSettings(msgspec.Struct, frozen=True):
    chat_template: str | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None


class Tokenizer:
    """The tokenizer of one model directory. Raises ModelError where there is none that works."""

    def __init__(self, model_dir: Path) -> None:
        self.directory = model_dir
        path = model_dir / "tokenizer.json"
        data = _read(path, max_bytes=MAX_TOKENIZER_BYTES)
        self.sha256 = hashlib.sha256(data).digest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise ModelError(f"{path} cannot be used: {str(error)[:200]}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.architecture = _config_digest(model_dir)
        """SHA-256 of the config.json beside it; empty where there is none."""
        self._settings = _read_settings(model_dir)
        self._template = _read_template(model_dir) or self._settings.chat_template

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt: through the chat template, or the contents one after another without one."""
        if self._template is None:
            return self.encode("".join(message["content"] for message in messages))
        text = _render(self._template, messages, self._settings)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_reply(self, text: str, *, plain: bool, ended_by: int) -> list[int]:
        """What follows a turn that the token `ended_by` ended: a reply to it, and the beginning of the next turn.

        Through the chat template, as another user's message; a plain text, or one for a model without a template, is
        only the text. Raises ModelError for a template that changes what came before.
        """
        if not plain and self._template is not None:
            text = self._behind_a_turn(text).removeprefix(self._tokenizer.decode([ended_by], skip_special_tokens=False))
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _behind_a_turn(self, text: str) -> str:
        turns: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _TURN_MARK},
            {"role": "user", "content": text},
        ]
        _, mark, behind = _render(self._template or "", turns, self._settings).partition(_TURN_MARK)
        if not mark:
            raise ModelError("the model's chat template does not show what an assistant said before; it has no turns")
        return behind

    def single_id(self, text: str) -> int | None:
        """The token that is exactly this text; None where there is none."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        is_it = len(ids) == 1 and self._tokenizer.decode(list(ids), skip_special_tokens=False) == text
        return int(ids[0]) if is_it else None

    def decode(self, ids: Sequence[int], *, stop_ids: Sequence[int] = ()) -> str:
        """Text of an answer, without the stop id that ends it; other special tokens show, so they earn nothing."""
        body = ids[:-1] if ids and ids[-1] in stop_ids else ids
        return str(self._tokenizer.decode(list(body), skip_special_tokens=False))


def _read(path: Path, *, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint="download the checkpoint again") from error
    if len(data) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes")
    return data


def _read_settings(model_dir: Path) -> _TokenizerSettings:
    path = model_dir / "tokenizer_config.json"
    if not path.exists():
        return _TokenizerSettings()
    try:
        return msgspec.json.decode(_read(path, max_bytes=MAX_TOKENIZER_BYTES), type=_TokenizerSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be used: {str(error)[:200]}") from error


def _config_digest(model_dir: Path) -> bytes:
    path = model_dir / "config.json"
    return hashlib.sha256(_read(path, max_bytes=MAX_CONFIG_BYTES)).digest() if path.exists() else b""


def _read_template(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    return _read(path, max_bytes=MAX_TEMPLATE_BYTES).decode() if path.exists() else None


@lru_cache(4)
def _compiled(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def _render(template: str, messages: Sequence[Message], settings: _TokenizerSettings) -> str:
    from jinja2 import TemplateError

    variables = {"bos_token": _token_text(settings.bos_token), "eos_token": _token_text(settings.eos_token)}
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **variables
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ModelError(f"the model's chat template cannot be rendered: {str(error)[:200]}") from error


def _token_text(token: str | dict[str, Any] | None) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""
