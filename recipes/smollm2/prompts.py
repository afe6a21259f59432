"""Writes further prompts of the seven tasks of train.jsonl, for longer training than ``make demo-smollm2`` needs:

    python recipes/smollm2/prompts.py --count 4000 > out/prompts.jsonl
    make demo-smollm2 PROMPTS=out/prompts.jsonl DEMO=out/long SETTINGS="regenerate.samples=1"

Prompts are sentences with slots; numbers, topics and tasks fill them. Texts to summarise and to ask about, and code to explain, are of
Python's standard library (PSF-2.0), as it is installed. The same count, seed and Python give the same prompts; none is in measure.jsonl.
There are some 4,300.
"""

from __future__ import annotations

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
LANGUAGES = "Spanish, French, German, Italian, Portuguese".split(", ")
SUBJECTS = "My sister, The teacher, Our neighbour, The old man, A tourist, The doctor, My best friend, The bus driver, Her son".split(", ")
ACTIONS = (
    "bought a used car, forgot the keys, is looking for a quiet hotel, wants to learn the piano, found a wallet on the street, missed the"
    " last train, has painted the door blue, will visit us, opened a small bakery, cannot find the station, is waiting for an answer,"
    " told me a strange story, lost a bet, cooked soup for everyone, has never seen the sea, is afraid of dogs, reads the newspaper"
).split(", ")
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


class Library:
    """Texts and code of Python's standard library."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []
        """Names and the paragraphs that describe them."""
        self.code: list[str] = []
        for name in MODULES:
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
        if rng.random() < 0.6:
            how = rng.choice(["", " Add a docstring.", " Explain how it works.", " Include two examples.", " Do not use imports."])
            language = rng.choice(["Python", "Python", "Python", "JavaScript"])
            return f"Write a {language} function that {rng.choice(TASKS)}.{how}"
        ask = rng.choice(
            ["Explain what this code does:", "Write a test for this function:", "Add type hints and comments to this function:"]
        )
        return f"{ask}\n\n```python\n{rng.choice(self.code)}\n```"


def prompts(count: int, seed: int) -> Iterator[dict[str, object]]:
    """Distinct prompts, a task after the other in turn. Raises ValueError if there are not so many, or none are asked for."""
    if count < 1:
        raise ValueError(f"--count is at least 1; got {count}")
    library, rng = Library(), random.Random(seed)
    tasks: dict[str, Callable[[Random], str]] = {
        "chat": chat, "maths": maths, "code": library.about_code, "summary": library.summary, "translation": translation,
        "questions": questions, "questions on a text": library.on_a_text,
    }  # fmt: skip
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
    args = parser.parse_args()
    try:
        rows = list(prompts(args.count, args.seed))
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
