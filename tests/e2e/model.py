"""A task that a tiny model learns in seconds: two modules, half of whose answers are wrong until they are trained.

An ask like ``c5`` has a class (its first letter) that decides the hint; the hint decides the reply. The base model is
trained from scratch to answer most classes well and some badly: held-out asks are answered right half of the time,
training only the first module can reach three quarters, and training both everything.
"""

import contextlib
import random
from pathlib import Path

import dspy
import torch
from dspy.utils.exceptions import AdapterParseError
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import modpo
from modpo.lm.policy_lm import replay
from modpo.lm.recorder import Recorder, stamp_paths
from tests.tiny import EOS, VOCABULARY, tiny_tokenizer

HINTS = {"a": "k", "b": "k", "c": "l", "d": "l", "e": "m", "f": "m", "g": "n", "h": "n"}
REPLIES = {"k": "1", "l": "2", "m": "3", "n": "4"}
WEAK = {"b": "l", "d": "k", "m": "1"}  # where the base prefers this wrong answer
CONTEXT = 512
MALFORMED = 0.03  # part of the base's answers that break off
NEWLINE = tiny_tokenizer().encode("\n")[0]


class Terse(dspy.XMLAdapter):
    """XML without the explanations: what a byte-level model can learn in seconds."""

    def format_system_message(self, signature):
        return signature.instructions

    def user_message_output_requirements(self, signature):
        return ""


class TersePredict(dspy.Predict):
    def forward(self, **inputs):
        with dspy.context(adapter=Terse(use_json_adapter_fallback=False)):
            return super().forward(**inputs)


class Guess(dspy.Module):
    """plan: q (ask) -> h (hint), solve: h -> r (reply); short names, since each letter is a token."""

    def __init__(self):
        super().__init__()
        self.plan = TersePredict(dspy.Signature("q -> h", "hint"))
        self.solve = TersePredict(dspy.Signature("h -> r", "reply"))

    def forward(self, q):
        h = self.plan(q=q).h
        return dspy.Prediction(h=h, r=self.solve(h=h).r)


def right(example, prediction, trace=None):
    return prediction.r == example.r


def asked(ask):
    return dspy.Example(q=ask, r=REPLIES[HINTS[ask[0]]]).with_inputs("q")


def trainset():
    return [asked(letter + digit) for digit in "012345" for letter in HINTS]


def heldout():
    return [asked(letter + digit) for digit in "6789" for letter in HINTS]


def program(policy, **options):
    made = Guess()
    made.set_lm(policy.lm(max_tokens=12, **options))
    return made


def policy(folder, **options):
    return modpo.Policy(str(folder), **{"lora": modpo.LoRA(rank=8, alpha=16), "dtype": "float32", **options})


def traces(asks="acegbdfh", digits="01"):
    """Verified traces of both modules."""
    plan = [dspy.Example(q=a + d, h=HINTS[a]).with_inputs("q") for a in asks for d in digits]
    return {"plan": plan, "solve": [dspy.Example(h=h, r=r).with_inputs("h") for h, r in REPLIES.items()]}


def make_base(folder, *, heads=(4, 2), steps=200, batch=32, seed=0):
    """Train the base model from scratch, in about ten seconds, and save it with its tokenizer.

    `heads` are of queries and of keys; all of them together are 64 wide.
    """
    query_heads, key_heads = heads
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    draw = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    known = _known(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, [_drawn(draw, known) for _ in range(batch)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def _known(folder):
    """Prompt and completion ids of every question with every answer, by module."""
    made = program(policy(folder))
    digits = [letter + digit for digit in "0123456789" for letter in HINTS]
    shown = {
        "plan": {ask: {h: dspy.Example(q=ask, h=h).with_inputs("q") for h in REPLIES} for ask in digits},
        "solve": {h: {r: dspy.Example(h=h, r=r).with_inputs("h") for r in REPLIES.values()} for h in REPLIES},
    }
    return {
        module: {
            question: {
                answer: replay(made, module, example, made.plan.lm.policy) for answer, example in answers.items()
            }
            for question, answers in questions.items()
        }
        for module, questions in shown.items()
    }


def _drawn(draw, known):
    """A row of training ids and where its completion begins, answered as the base shall answer."""
    module = draw.choice(("plan", "solve"))
    question = draw.choice(list(known[module]))
    best = HINTS[question[0]] if module == "plan" else REPLIES[question]
    wrong = WEAK.get(question[0])
    chance = draw.random()
    if wrong is not None:
        best, wrong = wrong, best
    answer = best if chance < 0.7 else wrong if wrong is not None else draw.choice(list(known[module][question]))
    call = known[module][question][answer]
    completion = call.completion_ids
    if draw.random() < MALFORMED:
        completion = (*completion[: len(completion) // 2], EOS)
    return call.prompt_ids, completion


def _loss(model, rows):
    """Cross-entropy of the completions; the one letter that answers counts as much as five of the others."""
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.full((len(rows), width), EOS)
    weights = torch.zeros(len(rows), width)
    for at, (prompt, completion) in enumerate(rows):
        row = torch.tensor([*prompt, *completion])
        ids[at, : len(row)] = row
        weights[at, len(prompt) : len(row)] = 1.0
        if NEWLINE in completion:
            weights[at, len(prompt) + completion.index(NEWLINE) + 1] = 5.0
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    shown = weights[:, 1:] > 0
    losses = functional.cross_entropy(model.lm_head(hidden[shown]), ids[:, 1:][shown], reduction="none")
    return (losses * weights[:, 1:][shown]).sum() / weights.sum()


def adapter_files(run):
    """Content of every kept adapter version of a run."""
    return {str(file.relative_to(run)): file.read_bytes() for file in sorted(Path(run).glob("adapters/*/v*/*"))}


def calls_of(program, examples):
    """Module, adapter version, prompt and completion ids of the program's calls on examples, one example at a time."""
    stamp_paths(program)
    found = []
    for example in examples:
        recorder = Recorder()
        with recorder.active():
            with contextlib.suppress(AdapterParseError):  # its calls are recorded all the same
                program(**example.inputs())
        found += [[c.module, c.version, list(c.prompt_ids), list(c.completion_ids)] for c in recorder.calls()]
    return found
