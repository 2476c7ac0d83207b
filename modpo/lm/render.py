"""From a DSPy request to prompt ids, and from written outputs to the text a policy would have sampled.

The only place where a prompt becomes token ids: sampling, training and the warm start all use what is made here.
"""

import threading
from typing import Any

import dspy
from jinja2.exceptions import TemplateError

from modpo.errors import PolicyError

CHAT_END = "[[ ## completed ## ]]"
_tokenizing = threading.Lock()  # fast tokenizers may refuse a second borrower while their settings are written


def _text_of(parts: Any, role: str) -> str:
    """Join text parts; anything else cannot be put before a text model."""
    if isinstance(parts, str):
        return parts
    for part in parts:
        if part.type != "text":
            raise PolicyError(f"a {role} message holds a {part.type!r} part; a policy reads text only")
    return "".join(part.text for part in parts)


def chat(request: dspy.lm15.Request) -> list[dict[str, str]]:
    """Messages of a request as role and content, the system text first.

    Raises:
        PolicyError: a message holds something that is not text.
    """
    messages = [] if request.system is None else [{"role": "system", "content": _text_of(request.system, "system")}]
    for message in request.messages:
        # Chat templates know no developer: its text binds like the system's.
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": _text_of(message.parts, message.role)})
    return messages


def render(request: dspy.lm15.Request, tokenizer: Any) -> tuple[int, ...]:
    """Prompt ids of a request, through the tokenizer's chat template and up to where the answer begins.

    Args:
        request: what DSPy asks for.
        tokenizer: a transformers tokenizer with a chat template.

    Returns:
        Token ids, each within the vocabulary.

    Raises:
        PolicyError: there is no chat template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PolicyError("the tokenizer has no chat template: use an instruct model or set tokenizer.chat_template")
    try:
        text = tokenizer.apply_chat_template(chat(request), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise PolicyError(f"the tokenizer's chat template refuses the messages: {error}") from error
    return tokenize(text, tokenizer)


def tokenize(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a text; special tokens written in it are read as such and none is added."""
    with _tokenizing:
        return tuple(tokenizer.encode(text, add_special_tokens=False))


def plain_adapter(adapter: dspy.Adapter | None) -> dspy.Adapter:
    """A copy of an adapter (ChatAdapter by default) that does not ask a second time after a failed parse."""
    plain = dspy.ChatAdapter() if adapter is None else adapter.__class__.__new__(adapter.__class__)
    if adapter is not None:
        plain.__dict__.update(adapter.__dict__)
    if hasattr(plain, "use_json_adapter_fallback"):
        plain.use_json_adapter_fallback = False
    return plain


def end_markers(adapter: dspy.Adapter, signature: type[dspy.Signature]) -> tuple[str, ...]:
    """Texts after which an answer in this adapter's form is complete, so that sampling may stop there."""
    if isinstance(adapter, dspy.XMLAdapter):
        return (f"</{next(reversed(signature.output_fields))}>",)
    if isinstance(adapter, dspy.JSONAdapter) or not isinstance(adapter, dspy.ChatAdapter):
        return ()
    return (CHAT_END,)


def assistant_text(adapter: dspy.Adapter, signature: type[dspy.Signature], outputs: dict[str, Any]) -> str:
    """The answer a policy would have to sample for these outputs; it ends exactly where sampling would stop.

    Args:
        adapter: the adapter that will parse it.
        signature: the module's signature.
        outputs: a value for each output field.

    Returns:
        Text that ends with the adapter's end marker where there is one, else without trailing white space.
    """
    text = str(adapter.format_assistant_message_content(signature, outputs)).rstrip()
    ends = [text.index(marker) + len(marker) for marker in end_markers(adapter, signature) if marker in text]
    return text[: min(ends)] if ends else text


def completion_ids(text: str, markers: tuple[str, ...], tokenizer: Any) -> tuple[int, ...]:
    """Ids of a written answer, with the end-of-text id where no marker ends it.

    Raises:
        PolicyError: an end-of-text id is needed and the tokenizer has none.
    """
    ids = tokenize(text, tokenizer)
    if text.endswith(markers):
        return ids
    if tokenizer.eos_token_id is None:
        raise PolicyError("the tokenizer has no end-of-text token and the adapter has no end marker")
    return (*ids, int(tokenizer.eos_token_id))
