"""Saved conversations: one JSON object with the model's name, the options and the messages."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .conversation import Conversation, Message
from .errors import SpecStreamError

FORMAT = "mlx-specstream chat"


def save(conversation: Conversation, model: str, name: str) -> Path:
    """Write a conversation to a file: the whole of it or nothing.

    Args:
        conversation: What to save.
        model: The model's name.
        name: The file's path; ``~`` is the home folder. A file that is there is written over
            only if it is a saved conversation.

    Returns:
        The path written.

    Raises:
        SpecStreamError: If it cannot be written, or something else is there.
    """
    try:
        path = Path(os.path.expanduser(name)).resolve()
        taken = path.exists()
    except (OSError, ValueError) as error:  # a name too long, or with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise SpecStreamError(f"cannot save to {name[:40]}: {reason}") from error
    if taken:
        try:
            read(str(path))
        except SpecStreamError as error:
            raise SpecStreamError(
                f"{path} is there and is not a saved conversation: choose another name"
            ) from error
    content = {
        "format": FORMAT,
        "model": model,
        "options": {
            "max_tokens": conversation.max_tokens,
            "sampling": asdict(conversation.sampling),
            "speculation": asdict(conversation.speculation),
        },
        "messages": conversation.messages,
    }
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise SpecStreamError(f"cannot save to {path}: {error.strerror or error}") from error
    return path


def read(name: str) -> tuple[str, list[Message]]:
    """A saved conversation: the model's name, and the messages.

    Raises:
        SpecStreamError: If there is no such file, or it is not a conversation.
    """
    path = Path(os.path.expanduser(name))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecStreamError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecStreamError(f"{path} is not a saved conversation: it is not JSON") from error
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise SpecStreamError(f"{path} is not a saved conversation: it has no messages")
    messages = content["messages"]
    fault = _fault(messages)
    if fault:
        raise SpecStreamError(f"{path} is not a saved conversation: {fault}")
    return str(content.get("model") or "?"), [
        {"role": m["role"], "content": m["content"].encode("utf-8", "replace").decode()}
        for m in messages
    ]


def _fault(messages: list[Any]) -> str | None:
    """What is wrong with messages: a system message or none, then questions with answers."""
    for number, message in enumerate(messages, 1):
        known = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not known or message.get("role") not in ("system", "user", "assistant"):
            return f"message {number} needs a role and a text as content"
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    roles = [message["role"] for message in turns]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        return "its roles are not user, assistant, user, assistant …"
    return None
