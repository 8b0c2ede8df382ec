"""Make everything the tiny experiment starts from: tasks, a tokenizer, a random model and two pretraining files.

    python configs/tiny/make.py                                  # this script: seconds
    python continual.py --config configs/tiny/base.yaml          # trains the base from them: minutes
    cp -r runs/tiny-base/stage-3-noisy/. configs/tiny/base/

The tasks stand in for the four domains of the real study, small enough for a model of 0.4 M parameters:

    math      sums and differences of small numbers      <think>\\n...\\n</think>\\n\\boxed{85}
    science   four-option questions on invented minerals <think>\\n...\\n</think>\\n<answer>\\nB\\n</answer>
    tool      pick one of three tools and fill it in     Action: ...\\nAction Input: {...}
    code      one-line Python functions, with tests      a fenced python block

Six sets out of distribution are only ever measured: the base knows them as it knows the tasks, and no stage trains them.

    math-reworded, code-reworded   the same questions in other words
    math-large                     larger numbers
    science-boxed                  another answer format
    tool-elsewhere                 other names, cities and things
    backwards                      another skill: words in reverse order

Pretraining on `pretrain/clean.jsonl` teaches every skill, and how to use a demonstration or feedback placed in the
prompt. `pretrain/noisy.jsonl` then makes the model unsure: a good third of its plain answers are plausible mistakes, so
that about half of the samples of any prompt are right. That leaves the tasks something to teach. What a demonstration
says is followed throughout, which makes the model a good teacher of itself.
"""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

SEED = 0
TEST_ROWS, TRAIN_ROWS = 96, 512  # per task
SHIFTED_ROWS = 48  # per set out of distribution
CLEAN_ROWS, NOISY_ROWS = 64_000, 24_000
CLEAN_SHARES = (0.35, 0.35, 0.15, 0.15)  # of the tasks: math and science are slower to learn
NOISY_SHARES = (0.25, 0.25, 0.25, 0.25)
SHIFTED_SHARE = 0.25  # of the rows of a task that are of a set out of distribution which is derived from it
OTHER_SHARE = 0.08  # of all rows: the skill that is derived from no task
DEMONSTRATION_SHARE, FEEDBACK_SHARE = 0.35, 0.10
STRIPPED_SHARE = 0.50  # of the demonstrations, those without their thinking
FALSE_SHARE = 0.50  # of the demonstrations; see pretraining_rows
WRONG_SHARE, WRONG_AFTER_FEEDBACK = 0.38, 0.25  # of the noisy rows; feedback helps, but does not settle the matter
BROKEN_SHARE = 0.05  # of the wrong answers, those that break the format instead
VOCABULARY = 640  # 256 bytes and about 380 words

AGAIN = "\n\nCorrectly solve the original question."
WITH_DEMONSTRATION = "{}\nCorrect solution:\n\n{}" + AGAIN
WITH_FEEDBACK = "{}\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}" + AGAIN
THINKING = ("<think>", "</think>")  # a token each, as in Qwen3
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Problem:
    """One question. A claim is what a response says, right or wrong, before it is put into words."""

    question: str  # the whole user message
    fields: dict[str, Any]  # what a verifier needs: an answer, or tests
    truth: Any
    mistake: Callable[[], Any]  # draws a plausible wrong claim
    write: Callable[[Any], str]  # words a claim as a response, in one of two styles
    broken: Callable[[str], str]  # spoils the format of a response
    feedback: Callable[[Any], str]  # says what is wrong with a claim


# ---- math ------------------------------------------------------------------------------------------------------------

NAMES = "Anna Ben Carl Dora Emil Fay Gus Hana".split()
ITEMS = "apples books coins eggs pens shells".split()


def think(working: str) -> str:
    return f"<think>\n{working}\n</think>\n"


def math_problem(rng: random.Random, large: bool = False, reworded: bool = False) -> Problem:
    a, b = rng.randint(*(40, 59) if large else (10, 29)), rng.randint(2, 9)
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    kind = rng.choice(["sum", "difference", "gain", "loss", "two steps"])
    steps = [("+" if kind in ("sum", "gain", "two steps") else "-", b)]
    if kind == "two steps":
        steps.append(("-", rng.randint(2, 9)))
    if kind in ("gain", "loss"):
        story = {
            ("gain", False): "{} has {} {} and gets {} more. How many {} are there?",
            ("loss", False): "{} has {} {} and loses {}. How many {} are there?",
            ("gain", True): "To the {1} {2} of {0} come {3} others. Count the {4}.",
            ("loss", True): "Of the {1} {2} of {0} somebody takes {3}. Count the {4}.",
        }[kind, reworded]
        text = story.format(name, a, item, b, item)
    else:
        expression = f"{a}" + "".join(f" {sign} {number}" for sign, number in steps)
        text = rng.choice(["Find the value of {}.", "{} makes what?"] if reworded else ["What is {}?", "Compute {}."]).format(expression)

    def work(slips: list[int]) -> list[tuple]:
        """Every step with its result; a slip in one step is carried into the next."""
        lines, value = [], a
        for (sign, number), slip in zip(steps, slips):
            result = value + (number if sign == "+" else -number)
            result += slip if result + slip >= 0 else -slip
            lines.append((value, sign, number, result))
            value = result
        return lines

    def mistake() -> list[tuple]:
        slips = [0] * len(steps)
        slips[rng.randrange(len(steps))] = rng.choice([1, -1]) * rng.choice([1, 1, 2, 3, 4, 5, 10, 10])
        return work(slips)

    def write(claim: list[tuple]) -> str:
        working = "\n".join(f"{value} {sign} {number} = {result}" for value, sign, number, result in claim)
        return think(working) + rng.choice(["", "The answer is "]) + f"\\boxed{{{claim[-1][-1]}}}"

    truth = work([0] * len(steps))
    return Problem(
        question=text + "\nPut the answer in \\boxed{}.",
        fields={"answer": str(truth[-1][-1])},
        truth=truth,
        mistake=mistake,
        write=write,
        broken=lambda response: response.replace("\\boxed{", "").replace("}", ""),
        feedback=lambda claim: f"The answer {claim[-1][-1]} is wrong.",
    )


# ---- science ---------------------------------------------------------------------------------------------------------

MINERALS = "arlite belium corvite dunite elmium fenite galium hexite".split()
PROPERTIES = {  # the question, and the values it can have
    "colour": ("What colour is {}?", "red blue green yellow black white brown pink".split()),
    "home": ("Where is {} found?", "rivers caves deserts mountains forests lakes islands swamps".split()),
    "use": ("What is {} used for?", "lamps ships wires glass paint tools soap bricks".split()),
}
FACTS_RNG = random.Random(SEED)  # the world is invented, but fixed: training and testing ask about the same facts
FACTS = {(m, p): FACTS_RNG.choice(values) for m in MINERALS for p, (_, values) in PROPERTIES.items()}


def science_problem(rng: random.Random, boxed: bool = False) -> Problem:
    mineral, property = rng.choice(list(FACTS))
    fact, (stem, values) = FACTS[mineral, property], PROPERTIES[property]
    options = [fact] + rng.sample([value for value in values if value != fact], 3)
    rng.shuffle(options)
    listed = dict(zip("ABCD", options))
    letter = {value: key for key, value in listed.items()}
    lines = "\n".join(f"{key}: {value}" for key, value in listed.items())

    def write(claim: str) -> str:
        # Saying the letter next to the value spares a model of three layers a look-up that it learns only slowly.
        reason = rng.choice(["The {} of {} is {}", "For {} of {} I know {}"]).format(property, mineral, claim)
        answer = f"\\boxed{{{letter[claim]}}}" if boxed else f"<answer>\n{letter[claim]}\n</answer>"
        return think(f"{reason} ({letter[claim]}).") + answer

    return Problem(
        question=f"{stem.format(mineral)}\n{lines}\nPut the letter in " + ("\\boxed{}." if boxed else "<answer> tags."),
        fields={"answer": letter[fact]},
        truth=fact,
        mistake=lambda: rng.choice([value for value in options if value != fact]),
        write=write,
        broken=lambda response: response.replace("<answer>\n", "").replace("\n</answer>", "").replace("\\boxed", ""),
        feedback=lambda claim: f"The answer {letter[claim]} is wrong.",
    )


# ---- tool use --------------------------------------------------------------------------------------------------------

# Of the base's pretraining, and of no task's rows:
FAR_NAMES, FAR_ITEMS = "Ivan Jana Kofi Lena".split(), "lemons maps nails ropes".split()
FAR_CITIES = "Quito Seoul Accra Minsk Turin Sofia Miami Dakar".split()
CITIES = "Oslo Rome Paris Cairo Lima Tokyo Delhi Bern".split()
DAYS = "Monday Tuesday Friday Sunday".split()
NUMBERS = list(range(2, 10))
TOOLS = {  # the parameters with the values they can take, and a request
    "get_weather": ({"city": CITIES, "days": NUMBERS}, "How will the weather in {} be for {} days?"),
    "get_time": ({"city": CITIES}, "What time is it in {}?"),
    "find_route": ({"start": CITIES[:4], "end": CITIES[4:]}, "How do I get from {} to {}?"),
    "set_alarm": ({"day": DAYS, "hour": NUMBERS}, "Set an alarm on {} at {}."),
    "call_friend": ({"name": NAMES}, "Call {}."),
    "send_mail": ({"name": NAMES, "topic": ITEMS}, "Write to {} about {}."),
    "buy_items": ({"item": ITEMS, "count": NUMBERS}, "Buy {} for me, {} in all."),
    "book_table": ({"city": CITIES, "people": NUMBERS}, "I want a table in {} for {} people."),
}


def tool_problem(rng: random.Random, elsewhere: bool = False) -> Problem:
    far = [(NAMES, FAR_NAMES), (ITEMS, FAR_ITEMS), (CITIES, FAR_CITIES), (CITIES[:4], FAR_CITIES[:4]), (CITIES[4:], FAR_CITIES[4:])]

    def parameters(tool: str) -> dict[str, list]:
        found = TOOLS[tool][0]
        return {name: next((f for near, f in far if elsewhere and near == values), values) for name, values in found.items()}

    def arguments(tool: str) -> dict[str, Any]:
        return {name: rng.choice(values) for name, values in parameters(tool).items()}

    offered = rng.sample(list(TOOLS), 3)
    tool = rng.choice(offered)
    truth = (tool, arguments(tool))
    listing = ", ".join(f"{name}({', '.join(TOOLS[name][0])})" for name in offered)

    def mistake() -> tuple:
        if rng.random() < 0.4:  # the wrong tool
            other = rng.choice([name for name in offered if name != tool])
            return (other, {name: truth[1].get(name, value) for name, value in arguments(other).items()})
        name, values = rng.choice(list(parameters(tool).items()))  # the right one with a wrong value
        return (tool, truth[1] | {name: rng.choice([value for value in values if value != truth[1][name]])})

    def write(claim: tuple) -> str:
        thought = rng.choice(["", f"Thought: I use {claim[0]}.\n"])
        return f"{thought}Action: {claim[0]}\nAction Input: {json.dumps(claim[1])}"

    return Problem(
        question=f"Tools: {listing}\n{TOOLS[tool][1].format(*truth[1].values())}\nUse one tool.",
        fields={"answer": json.dumps([{"Action": tool, "Action_Input": json.dumps(truth[1])}])},
        truth=truth,
        mistake=mistake,
        write=write,
        broken=lambda response: response.removesuffix("}"),
        feedback=lambda claim: f"The call {claim[0]} {json.dumps(claim[1])} is wrong.",
    )


# ---- code ------------------------------------------------------------------------------------------------------------

FUNCTIONS = "run work solve apply change build turn compute handle process treat convert".split()
TESTS = {  # by parameters, the arguments of the three tests
    "x": [(4,), (7,), (13,)],
    "a, b": [(3, 8), (9, 2), (5, 4)],
    "s": [("planets",), ("dolphin",), ("journey",)],
    "v": [([5, 2, 9, 4, 1, 8, 3],), ([3, 7, 2, 5, 4, 9, 1],), ([1, 6, 2, 3, 5, 7, 9],)],
}
SHAPES = {  # by parameters: the words of the task and the Python; k stands for a constant
    "x": {
        "x plus k": "x + k",
        "x minus k": "x - k",
        "x times k": "x * k",
        "x to the power k": "x ** k",
        "the rest of x divided by k": "x % k",
    },
    "a, b": {
        "a plus b plus k": "a + b + k",
        "a times b plus k": "a * b + k",
        "the larger of a and b": "max(a, b)",
        "the smaller of a and b": "min(a, b)",
        "a minus b minus k": "a - b - k",
    },
    "s": {
        "the text s repeated k times": "s * k",
        "the first k letters of s": "s[:k]",
        "the last k letters of s": "s[-k:]",
        "the text s in upper case": "s.upper()",
        "the text s backwards": "s[::-1]",
        "the length of s plus k": "len(s) + k",
    },
    "v": {
        "the list v without the first k items": "v[k:]",
        "item k of the list v": "v[k]",
        "the sum of the list v": "sum(v)",
        "the list v sorted": "sorted(v)",
        "the largest item of v plus k": "max(v) + k",
        "each item of v times k": "[i * k for i in v]",
    },
}


def code_problem(rng: random.Random, reworded: bool = False) -> Problem:
    name, parameters = rng.choice(FUNCTIONS), rng.choice(list(SHAPES))
    words, shape = rng.choice(list(SHAPES[parameters].items()))
    constants = range(2, 7) if parameters in "sv" else NUMBERS  # the texts and lists of the tests are seven long
    constant = rng.choice(constants)

    def fill(text: str, number: int) -> str:
        return re.sub(r"\bk\b", str(number), text)

    truth = fill(shape, constant)

    def values(expression: str) -> list[Any]:
        function = eval(f"lambda {parameters}: {expression}")
        return [function(*arguments) for arguments in TESTS[parameters]]

    def mistake() -> str:
        """Another constant or another function of the same parameters, as long as the tests can tell."""
        while True:
            other = shape if rng.random() < 0.6 else rng.choice(list(SHAPES[parameters].values()))
            wrong = fill(other, rng.choice(constants) if rng.random() < 0.7 else constant)
            if values(wrong) != values(truth):
                return wrong

    def write(expression: str) -> str:
        body = rng.choice(["    return {}", "    result = {}\n    return result"]).format(expression)
        return f"```python\ndef {name}({parameters}):\n{body}\n```"

    def call(arguments: tuple) -> str:
        return f"{name}({', '.join(map(repr, arguments))})"

    tests = [f"assert {call(a)} == {value!r}" for a, value in zip(TESTS[parameters], values(truth))]

    def feedback(expression: str) -> str:
        return "Failed: " + next(t for t, w, g in zip(tests, values(truth), values(expression)) if w != g)

    return Problem(
        question=(f"Python: define {name}({parameters}) so that it gives back {fill(words, constant)}." if reworded
                  else f"Write a Python function {name}({parameters}) that returns {fill(words, constant)}."),
        fields={"tests": tests},
        truth=truth,
        mistake=mistake,
        write=write,
        broken=lambda response: response.replace("):\n", ")\n"),
        feedback=feedback,
    )


# ---- another skill ---------------------------------------------------------------------------------------------------

WORDS = "lamps ships wires glass paint tools soap bricks".split()


def backwards_problem(rng: random.Random) -> Problem:
    words = rng.sample(WORDS, 3)

    def mistake() -> list[str]:
        while (wrong := rng.sample(words, 3)) == words[::-1]:
            pass
        return wrong

    return Problem(
        question=f"Say backwards: {' '.join(words)}",
        fields={"answer": " ".join(words[::-1])},
        truth=words[::-1],
        mistake=mistake,
        write=lambda claim: " ".join(claim),
        broken=lambda response: response + ".",
        feedback=lambda claim: f"The answer {' '.join(claim)} is wrong.",
    )


# ---- the files -------------------------------------------------------------------------------------------------------

TASKS = {"math": math_problem, "science": science_problem, "tool": tool_problem, "code": code_problem}
SHIFTED = {  # out of distribution: the task that each is derived from, and what makes its problems
    "math-reworded": ("math", partial(math_problem, reworded=True)),
    "math-large": ("math", partial(math_problem, large=True)),
    "science-boxed": ("science", partial(science_problem, boxed=True)),
    "tool-elsewhere": ("tool", partial(tool_problem, elsewhere=True)),
    "code-reworded": ("code", partial(code_problem, reworded=True)),
    "backwards": (None, backwards_problem),
}


def task_rows(name: str, make: Callable[[random.Random], Problem], count: int) -> list[dict]:
    """Draw `count` rows, no question twice: test rows come first."""
    rng = random.Random(f"{SEED} {name}")
    rows: dict[str, dict] = {}
    while len(rows) < count:
        problem = make(rng)
        row = {"id": f"{name}-{len(rows):04d}", "prompt": problem.question}
        rows.setdefault(problem.question, row | problem.fields | {"reference": problem.write(problem.truth)})
    return list(rows.values())


def pretraining_rows(count: int, noisy: bool, held_out: set[str]) -> list[dict]:
    """Prompts of all tasks, plain, with a demonstration or with feedback, none of them from a test split."""
    rng = random.Random(f"{SEED} {'noisy' if noisy else 'clean'}")
    shares = NOISY_SHARES if noisy else CLEAN_SHARES
    rows: list[dict] = []
    while len(rows) < count:
        task = rng.choices(list(TASKS), weights=shares)[0] if rng.random() > OTHER_SHARE else None
        shifted = [make for derived, make in SHIFTED.values() if derived == task]
        problem = (rng.choice(shifted) if task is None or rng.random() < SHIFTED_SHARE else TASKS[task])(rng)
        if problem.question in held_out:
            continue
        kind, prompt, claim, wrong = rng.random(), problem.question, problem.truth, False
        if kind < DEMONSTRATION_SHARE:
            # Demonstration and response are worded independently: what is to be taken over is what it says. Some say
            # something false, and are followed all the same: only so does the model learn to read the demonstration
            # where it could as well work out the answer, which will be of no use to it once its answers are noisy.
            if rng.random() < FALSE_SHARE:
                claim = problem.mistake()
            shown = problem.write(claim)
            if rng.random() < STRIPPED_SHARE:
                shown = re.sub("<think>.*</think>\n", "", shown, flags=re.DOTALL)
            prompt = WITH_DEMONSTRATION.format(prompt, shown)
        elif kind < DEMONSTRATION_SHARE + FEEDBACK_SHARE:
            earlier = problem.mistake()
            prompt = WITH_FEEDBACK.format(prompt, problem.feedback(earlier))
            wrong = noisy and rng.random() < WRONG_AFTER_FEEDBACK
            while wrong and (claim == problem.truth or claim == earlier):  # not the same mistake again
                claim = problem.mistake()
        elif noisy and rng.random() < WRONG_SHARE:
            wrong, claim = True, problem.mistake()
        response = problem.write(claim)
        if wrong and rng.random() < BROKEN_SHARE:
            response = problem.broken(response)
        rows.append({"prompt": prompt, "reference": response, "task": task})
    return rows


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A vocabulary of all bytes and the most frequent words.

    It is a byte-level BPE without merges: a piece of text is one token if it is in the vocabulary, else its bytes. So
    any text can be encoded and comes back exactly, and no token is spent on the halves of words.
    """
    # A word with the space before it, a digit, line breaks with the indentation after them, punctuation, other space.
    pieces = Regex(r" ?[A-Za-z_]+|[0-9]|\n+ *| ?[^A-Za-z_0-9\s]+|\s+")
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + list(THINKING) + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["system", "user", "assistant"]
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    tokens += [piece for piece in ranked if piece not in set(tokens)][: VOCABULARY - len(tokens)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in THINKING])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, small enough to sample and train on a CPU."""
    set_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        initializer_range=0.06,  # the usual 0.02 suits wider models; this one would learn much more slowly
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def main() -> None:
    folder = Path(__file__).parent
    held_out: set[str] = set()
    for name in TASKS:
        rows = task_rows(name, TASKS[name], TEST_ROWS + TRAIN_ROWS)
        held_out |= {row["prompt"] for row in rows[:TEST_ROWS]}
        write_rows(folder / f"{name}-test.jsonl", rows[:TEST_ROWS])
        write_rows(folder / f"{name}-train.jsonl", rows[TEST_ROWS:])
    for name, (_, make) in SHIFTED.items():
        rows = task_rows(name, make, SHIFTED_ROWS)
        held_out |= {row["prompt"] for row in rows}
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "pretrain").mkdir(exist_ok=True)  # large, made anew at will, so not in the repository
    clean = pretraining_rows(CLEAN_ROWS, False, held_out)
    write_rows(folder / "pretrain" / "clean.jsonl", clean)
    write_rows(folder / "pretrain" / "noisy.jsonl", pretraining_rows(NOISY_ROWS, True, held_out))
    tokenizer = make_tokenizer([text for row in clean for text in (row["prompt"], row["reference"])])
    make_model(tokenizer).save_pretrained(folder / "pretrain" / "init")
    tokenizer.save_pretrained(folder / "pretrain" / "init")


if __name__ == "__main__":
    main()
