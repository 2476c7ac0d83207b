import dspy
import pytest
from dspy import lm15

from modpo.errors import PolicyError
from modpo.lm.render import assistant_text, completion_ids, end_markers, plain_adapter, render, tokenize
from tests.tiny import tiny_tokenizer

SIGNATURE = dspy.Signature("question -> plan, answer")


def _request(*messages, **more):
    return lm15.Request(model="m", messages=messages, **more)


def test_render_is_the_chat_template_up_to_where_the_answer_begins():
    request = _request(lm15.Message.user("Hi"), lm15.Message.assistant("Yo"), lm15.Message.user("é"), system="Be kind.")
    ids = render(request, tiny_tokenizer())
    text = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tiny_tokenizer().decode(list(ids)) == text
    # One id per byte, and one for each of the nine marks.
    marks = text.count("<|im_start|>") + text.count("<|im_end|>")
    assert marks == 9
    assert len(ids) == len(text.replace("<|im_start|>", "").replace("<|im_end|>", "").encode()) + marks


def test_a_developer_message_binds_like_the_system_message():
    ids = render(_request(lm15.Message.developer("Be brief."), lm15.Message.user("Hi")), tiny_tokenizer())
    assert tiny_tokenizer().decode(list(ids)).startswith("<|im_start|>system\nBe brief.")


def test_render_refuses_what_a_text_policy_cannot_read():
    picture = lm15.ImagePart(url="https://example.org/a.png")
    with pytest.raises(PolicyError, match="'image' part"):
        render(_request(lm15.Message.user([lm15.TextPart("see"), picture])), tiny_tokenizer())


def test_render_needs_a_chat_template_that_takes_the_messages():
    class Bare:
        chat_template = None

    with pytest.raises(PolicyError, match="no chat template"):
        render(_request(lm15.Message.user("Hi")), Bare())
    strict = type(tiny_tokenizer())(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(PolicyError, match="no system role"):
        render(_request(lm15.Message.user("Hi")), strict)


def test_end_markers_by_adapter():
    assert end_markers(dspy.ChatAdapter(), SIGNATURE) == ("[[ ## completed ## ]]",)
    assert end_markers(dspy.XMLAdapter(), SIGNATURE) == ("</answer>",)
    assert end_markers(dspy.JSONAdapter(), SIGNATURE) == ()


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.XMLAdapter(), dspy.JSONAdapter()])
def test_written_answers_parse_and_end_where_sampling_would(adapter):
    outputs = {"plan": "add <two>", "answer": "4"}
    text = assistant_text(adapter, SIGNATURE, outputs)
    assert adapter.parse(SIGNATURE, text) == outputs
    markers = end_markers(adapter, SIGNATURE)
    assert text.endswith(markers or "}")
    ids = completion_ids(text, markers, tiny_tokenizer())
    assert ids[: len(text.encode())] == tokenize(text, tiny_tokenizer())
    # Without an end marker only the end-of-text id (1) ends an answer.
    assert ids[len(text.encode()) :] == (() if markers else (1,))


def test_chat_answer_is_exact():
    text = assistant_text(dspy.ChatAdapter(), dspy.Signature("q -> a: int"), {"a": 5})
    assert text == "[[ ## a ## ]]\n5\n\n[[ ## completed ## ]]"


def test_plain_adapter_is_a_copy_without_a_second_try():
    given = dspy.ChatAdapter(use_native_function_calling=True)
    plain = plain_adapter(given)
    assert (plain.use_json_adapter_fallback, given.use_json_adapter_fallback) == (False, True)
    assert plain.use_native_function_calling
    assert type(plain_adapter(None)) is dspy.ChatAdapter
