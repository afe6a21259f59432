"""Writes further prompts of the seven tasks of train.jsonl, for longer training than ``make demo-smollm2`` needs:

    python recipes/smollm2/prompts.py --count 4000 > out/prompts.jsonl
    make demo-smollm2 PROMPTS=out/prompts.jsonl DEMO=out/long SETTINGS="regenerate.samples=1"

Prompts are sentences with slots; numbers, topics and tasks fill them. Texts to summarise and to ask about, and code to explain, are of
Python's standard library (PSF-2.0), as it is installed. The same count, seed and Python give the same prompts; none is in measure.jsonl.
There are some 4,300. With ``--answers ROWS``, texts and sentences are of the answers in these conversations, and code of installed packages
too, so that there are tens of thousands:

    python recipes/smollm2/prompts.py --count 5000 --answers out/own.jsonl > out/more.jsonl
"""

import argparse
import importlib
import inspect
import json
import random
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

Random = random.Random
HERE = Path(__file__).parent
MODULES = (
    "argparse ast asyncio bisect calendar cmd collections configparser contextlib copy csv dataclasses datetime decimal difflib email"
    " enum filecmp fnmatch fractions ftplib functools getpass gettext glob gzip heapq html http.client http.cookies imaplib inspect"
    " ipaddress json linecache locale logging mailbox mimetypes netrc ntpath numbers os pathlib pickle plistlib poplib pprint queue random"
    " reprlib sched selectors shelve shlex shutil smtplib socket sqlite3 stat statistics string subprocess tarfile tempfile textwrap"
    " threading timeit tokenize traceback types typing unittest urllib.parse urllib.request uuid wave weakref zipfile"
).split()
PACKAGES = (
    "accelerate.utils.other datasets.arrow_dataset datasets.utils.file_utils filelock fsspec.utils huggingface_hub.hf_api"
    " jinja2.filters numpy.lib._function_base_impl packaging.version pydantic.main safetensors.torch tokenizers tqdm.std"
    " transformers.tokenization_utils_base transformers.trainer_utils transformers.generation.logits_process torch.functional"
    " torch.nn.functional torch.optim.lr_scheduler torch.utils.data.dataset torch.nn.init yaml.loader"
).split()
TOPICS = (
    "a lighthouse keeper, moving to another city, a lost suitcase, the first snow of the year, growing tomatoes, learning the guitar,"
    " a broken bicycle, a night train, an old library, adopting a dog, a rainy wedding, baking bread, a forgotten password, a long hike,"
    " working from home, a school reunion, saving water, a small bookshop, the smell of coffee, a chess tournament, running a marathon,"
    " a power cut, a family recipe, learning to swim, a street market, an empty beach, a new neighbour, recycling, a grandfather's watch,"
    " public transport, a mountain village, a stubborn cat, the moon landing, a job interview, painting a kitchen, time travel, a robot"
    " that wants to dance, bees, volcanoes, the ocean at night, a birthday party, a missed flight, keeping a diary, a jazz band, autumn"
).split(", ")
KINDS = (
    "short story, four line poem, limerick, polite email, product description, blog post, dialogue between two friends, song chorus,"
    " speech of one minute, diary entry, news report, riddle, advertisement, postcard, list of five tips, horoscope, bedtime story"
).split(", ")
TONES = "cheerful, serious, dramatic, dry and funny, formal, warm, plain, nostalgic, enthusiastic, mysterious".split(", ")
GOALS = (
    "sleep better, spend less on food, learn Spanish, get fit, read more books, make new friends, find a better job, stop biting my"
    " nails, cook for myself, drink less coffee, keep my flat tidy, save for a car, speak in public, write a novel, wake up earlier,"
    " be less nervous, eat more vegetables, use my phone less, start a garden, get on with my brother, pass my driving test, run 5 km"
).split(", ")
OBSTACLES = (
    "I have two small children, I work night shifts, I have very little money, I always give up after a week, my knees hurt, I live in a"
    " tiny flat, I have no car, I am easily distracted, my friends laugh about it, I have no idea where to begin, I travel a lot"
).split(", ")
AUDIENCES = "an eight year old, my grandmother, a beginner, a busy manager, a student before an exam, somebody who hates science".split(
    ", "
)
CONCEPTS = (
    "inflation, photosynthesis, gravity, the stock market, machine learning, a black hole, electricity, vaccines, democracy, evolution,"
    " the water cycle, encryption, compound interest, plate tectonics, the immune system, a hash table, recursion, supply and demand,"
    " the greenhouse effect, DNA, radio waves, probability, a transistor, the seasons, insurance, tides, earthquakes, fermentation,"
    " the internet, magnetism, sound, a rainbow, hibernation, taxes, the metric system, jet engines, batteries, antibiotics, blockchain"
).split(", ")
PLACES = (
    "France, Japan, Brazil, Canada, Egypt, Norway, Kenya, Vietnam, Peru, Poland, Turkey, Morocco, Chile, Greece, Ireland, Nepal, Cuba,"
    " Austria, Finland, Ghana, Mexico, Portugal, Thailand, Hungary, Iceland, Mongolia, Jordan, Croatia, Ecuador, Senegal"
).split(", ")
SUMMARIES = (
    "Summarise this text in one sentence:|What is this text about?|Say this in simpler words:|Write a summary of the following article:"
    "|Summarize the text below in two or three sentences:|TL;DR of this, please:|What are the key points of this passage?"
    "|Give this text a title and a short summary:|Shorten this to at most 30 words:|List the main points as bullets:"
).split("|")
ABOUT = (
    "What is the main idea?|Who or what is it about?|What reasons does the author give?|What would be an example of this?"
    "|What happens first?|Which facts does the text mention?|What should the reader do?|Is the author for or against it?"
    "|What is the most important word here?|What problem does the text describe?|What can be concluded from it?"
    "|When or where does this take place, if the text says so?"
).split("|")
LANGUAGES = "Spanish, French, German, Italian, Portuguese".split(", ")
SUBJECTS = "My sister, The teacher, Our neighbour, The old man, A tourist, The doctor, My best friend, The bus driver, Her son".split(", ")
ACTIONS = (
    "bought a used car, forgot the keys, is looking for a quiet hotel, wants to learn the piano, found a wallet on the street, missed the"
    " last train, has painted the door blue, will visit us, opened a small bakery, cannot find the station, is waiting for an answer,"
    " told me a strange story, lost a bet, cooked soup for everyone, has never seen the sea, is afraid of dogs, reads the newspaper"
).split(", ")
NAMES = "Ana Ben Chen Dora Emil Fatima George Hana Ivan Julia Kofi Lena Marco Nadia Omar Priya Ruth Sam Tara Victor".split()
THINGS = "apples pencils tickets books stamps marbles cookies eggs chairs coins cards bottles flowers shirts photos shells".split()
WHERE = "shop farm school library bakery factory museum hotel garden theatre market warehouse".split()
WHENS = "yesterday, on Monday, before breakfast, last summer, in the evening, because of the rain, with great patience, again".split(", ")
TASKS = (
    "reverses a string, counts the vowels in a string, checks whether a number is prime, merges two sorted lists, finds the second"
    " largest number in a list, removes duplicates from a list and keeps the order, converts Celsius to Fahrenheit, counts words in a file,"
    " flattens a nested list, checks whether a word is a palindrome, computes the n-th Fibonacci number, sorts a list of tuples by the"
    " second element, groups words by their first letter, finds common elements of two lists, validates an email address, rotates a list"
    " by k places, computes the average of a column of a CSV file, generates a random password, finds the longest word in a sentence,"
    " converts a number to binary, checks whether parentheses are balanced, transposes a matrix, counts how often each character occurs,"
    " splits a list into chunks of size n, computes a factorial, finds missing numbers in a range, formats seconds as hours and minutes,"
    " reads a JSON file and returns a key, finds all files with an extension in a folder, capitalises every word, implements a stack,"
    " implements binary search, computes the greatest common divisor, simulates rolling two dice, draws a triangle of stars"
).split(", ")


def chat(rng: Random) -> str:
    one = rng.choice
    return one([
        lambda: f"Write a {one(TONES)} {one(KINDS)} about {one(TOPICS)}.",
        lambda: f"I want to {one(GOALS)}, but {one(OBSTACLES)}. {one(['What should I do?', 'Any advice?', 'How do I begin?'])}",
        lambda: f"Give me {rng.randint(3, 8)} ideas for a weekend in {one(PLACES)} with {one(['children', 'friends', 'my parents'])}.",
        lambda: f"Suggest {rng.randint(3, 7)} titles for a book about {one(TOPICS)}.",
        lambda: f"Explain {one(CONCEPTS)} to {one(AUDIENCES)}.",
        lambda: f"Help me write a message to my {one(['landlord', 'boss', 'teacher', 'aunt', 'friend'])} about {one(TOPICS)}.",
    ])()  # fmt: skip


def maths(rng: Random) -> str:
    a, b, c = rng.randint(2, 12), rng.randint(13, 60), rng.randint(3, 9)
    name, thing = rng.choice(["Ana", "Ben", "Chen", "Dora", "Emil"]), rng.choice(["apples", "pencils", "tickets", "books", "stamps"])
    return rng.choice([
        f"{name} has {b} {thing}, gives {a} away and then buys {c} times as many as are left. How many {thing} does {name} have now?",
        f"A shop sells {a} {thing} for ${c}. How much do {a * c} {thing} cost? Show your steps.",
        f"Solve for x: {c}(x - {a}) + {b} = {c - 1}x + {a + b}.",
        f"A train covers {b * c} km in {c} hours. How far does it go in {a} hours at the same speed?",
        f"What is {5 * a} % of {10 * b}?",
        f"{name} is {a} years older than Max. Together they are {2 * c + a + 10}. How old is each?",
        f"A rectangle is {b} cm long and {a} cm wide. What are its area and its perimeter?",
        f"A recipe for {c} people needs {b * 10} g of flour. How much is needed for {a + c} people?",
        f"{name} saves ${a} a week and already has ${b}. After how many weeks are there ${b + a * c}?",
        f"What is the average of {a}, {b}, {c} and {a + b}?",
        f"Two dice are thrown. What is the probability that the sum is {a}? Explain.",
        f"Simplify the fraction {a * c}/{b * c}.",
    ])  # fmt: skip


def worded(rng: Random) -> str:
    one, number, (name, other) = rng.choice, rng.randint, rng.sample(NAMES, 2)
    thing, place = one(THINGS), one(WHERE)
    a, b, c, d = number(2, 12), number(13, 90), number(3, 9), number(2, 6)
    first = one([
        f"{name} has {b} {thing}", f"A {place} has {b} boxes with {c} {thing} each", f"There are {b * c} {thing} in a {place}",
        f"{name} buys {a} packs of {c} {thing} for ${d} each", f"{name} collects {c} {thing} every day for {a} days",
        f"A {place} sells {b} {thing} on Monday and twice as many on Tuesday", f"{name} and {other} share {a * b} {thing} equally",
    ])  # fmt: skip
    then = one([
        f"{other} takes {a} of them", f"{c} of them are broken", f"half of them are sold for ${d} each", f"{a} are lost each week",
        f"{other} brings {b} more", f"they are packed into bags of {c}", f"every third one is given to {other}",
    ])  # fmt: skip
    ask = one([
        f"How many {thing} are left?", f"How many {thing} are there now?", f"How much money is that if each costs ${d}.{number(10, 95)}?",
        f"How many {thing} does {name} have after {c} weeks?", "What fraction is that of all?", f"How many would {a} people get each?",
    ])  # fmt: skip
    return f"{first}. {then[0].upper()}{then[1:]}. {ask}" + one(["", "", " Show your work.", " Think step by step."])


def translation(rng: Random) -> str:
    sentence, language = f"{rng.choice(SUBJECTS)} {rng.choice(ACTIONS)} {rng.choice(WHENS)}.", rng.choice(LANGUAGES)
    return rng.choice([
        f"Translate to {language}: {sentence}", f'How do you say "{sentence}" in {language}?',
        f"Translate this sentence into {language} and explain the grammar: {sentence}",
    ])  # fmt: skip


def questions(rng: Random) -> str:
    one, other = rng.sample(CONCEPTS, 2)
    place = rng.choice(PLACES)
    return rng.choice([
        f"What is {one}?", f"How does {one} work?", f"What is the capital of {place}?", f"Why is {one} important?",
        f"What do {one} and {other} have to do with each other?", f"Name three facts about {place}.", f"Who discovered or invented {one}?",
        f"What language is spoken in {place}?", f"Is {one} dangerous? Why or why not?", f"What do people eat in {place}?",
    ])  # fmt: skip


class Answers:
    """Paragraphs and sentences of the answers in these conversations."""

    def __init__(self, rows: Path) -> None:
        conversations = (json.loads(line)["messages"] for line in rows.read_text().split("\n") if line)
        turns = (turn for messages in conversations for turn in messages if turn["role"] == "assistant")
        paragraphs = [text.strip() for turn in turns if "```" not in turn["content"] for text in turn["content"].split("\n\n")]
        self.texts = [text for text in paragraphs if 35 <= len(text.split()) <= 170]
        sentences = (sentence for text in paragraphs if "\n" not in text for sentence in re.split(r"(?<=[.!?]) ", text))
        self.sentences = [sentence for sentence in sentences if 4 <= len(sentence.split()) <= 22 and sentence[-1] in ".!?"]
        if not self.texts or not self.sentences:
            raise ValueError("no answer has a paragraph of 35 to 170 words and a sentence; give rows with `messages` and longer answers")

    def summary(self, rng: Random) -> str:
        return f"{rng.choice(SUMMARIES)}\n\n{rng.choice(self.texts)}"

    def on_a_text(self, rng: Random) -> str:
        text, question = rng.choice(self.texts), rng.choice(ABOUT)
        return rng.choice(["{1}\n\n{0}", "Read this and answer: {0}\n\n{1}", "Context: {1}\n\nQuestion: {0}"]).format(question, text)

    def translation(self, rng: Random) -> str:
        sentence, language = rng.choice(self.sentences), rng.choice(LANGUAGES)
        return rng.choice([
            f"Translate to {language}: {sentence}", f'How do you say "{sentence}" in {language}?',
            f"Translate into {language}:\n\n{sentence}", f"What is the {language} translation of this sentence?\n{sentence}",
            f"{sentence}\n\nPlease translate this to {language}.",
        ])  # fmt: skip


class Library:
    """Texts and code of Python's standard library, and of all packages that are installed if they are ``many``."""

    def __init__(self, many: bool = False) -> None:
        self.texts: list[tuple[str, str]] = []
        """Names and the paragraphs that describe them."""
        self.code: list[str] = []
        self.many, self.wishes = many, list[tuple[str, str]]()  # names and first sentences
        for name in (*MODULES, *(PACKAGES if many else ())):
            module = importlib.import_module(name)
            for what, value in sorted(vars(module).items()):
                if not what.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name:
                    self._add(f"{name}.{what}", value)
                    for method, of in sorted(vars(value).items()) if inspect.isclass(value) else ():
                        if inspect.isfunction(of) and of.__module__ == name:
                            self._add(f"{name}.{what}.{method}", of)

    def _add(self, name: str, value: object) -> None:
        text = re.sub(r"\s*\n\s*", " ", (inspect.getdoc(value) or "").strip())
        if 30 <= len(text.split()) <= 160 and ">>>" not in text:
            self.texts.append((name, text))
        if self.many and 4 <= len((first := text.partition(". ")[0]).split()) <= 24:
            self.wishes.append((name.rpartition(".")[2], first.rstrip(".")))
        try:
            source = textwrap.dedent(inspect.getsource(value)) if inspect.isfunction(value) else ""  # type: ignore[arg-type]
        except OSError:  # made while Python runs
            return
        if 4 <= source.count("\n") <= 16:
            self.code.append(source.strip())

    def summary(self, rng: Random) -> str:
        _, text = rng.choice(self.texts)
        return f"{rng.choice(['Summarise this text in one sentence:', 'What is this text about?', 'Say this in simpler words:'])}\n\n{text}"

    def on_a_text(self, rng: Random) -> str:
        name, text = rng.choice(self.texts)
        question = rng.choice(["What does {} do?", "When would somebody use {}?", "What should one know before using {}?"]).format(name)
        return f"Use this text to answer the question.\n\n{text}\n\nQuestion: {question}"

    def about_code(self, rng: Random) -> str:
        if self.many and rng.random() < 0.4:
            name, first = rng.choice(self.wishes)
            return rng.choice([
                f"Write a Python function `{name}` for this: {first}.", f"Complete this function:\n\ndef {name}(",
                f'Complete this:\n\n```python\ndef {name}(value):\n    """{first}."""\n```', f"{first}. How would I write this in Python?",
            ])  # fmt: skip
        if rng.random() < 0.6:
            how = rng.choice(["", " Add a docstring.", " Explain how it works.", " Include two examples.", " Do not use imports."])
            language = rng.choice(["Python", "Python", "Python", "JavaScript"])
            return f"Write a {language} function that {rng.choice(TASKS)}.{how}"
        ask = rng.choice(["Explain what this code does:", "Write a test for this function:", "Add type hints and comments to this:"])
        return f"{ask}\n\n```python\n{rng.choice(self.code)}\n```"


def prompts(count: int, seed: int, answers: Path | None = None) -> Iterator[dict[str, object]]:
    """Distinct prompts, a task after the other in turn. Raises ValueError if there are not so many, or none are asked for."""
    if count < 1:
        raise ValueError(f"--count is at least 1; got {count}")
    library, rng = Library(many=answers is not None), random.Random(seed)
    tasks: dict[str, Callable[[Random], str]] = {
        "chat": chat, "maths": maths, "code": library.about_code, "summary": library.summary, "translation": translation,
        "questions": questions, "questions on a text": library.on_a_text,
    }  # fmt: skip
    if answers is not None:
        texts = Answers(answers)
        tasks |= {"maths": worded, "summary": texts.summary, "translation": texts.translation, "questions on a text": texts.on_a_text}
    rows = (json.loads(line) for line in (HERE / "measure.jsonl").read_text().splitlines())
    known = {row["messages"][0]["content"] for row in rows}
    for number in range(count):
        task, write = list(tasks.items())[number % len(tasks)]
        for _ in range(100):
            content = write(rng)
            if content not in known:
                break
        else:
            raise ValueError(f"there are no {count:,} different prompts; {number:,} were found: ask for fewer (--count)")
        known.add(content)
        yield {"task": task, "messages": [{"role": "user", "content": content}]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=4000, metavar="N", help="prompts (4000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", type=Path, metavar="ROWS", help="conversations whose answers are the texts to ask about")
    args = parser.parse_args()
    try:
        rows = list(prompts(args.count, args.seed, args.answers))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(str(error) if args.answers is None else f"--answers {args.answers}: {error!r}")
    sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
