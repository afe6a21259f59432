"""The header of a GGUF file (llama.cpp's format): metadata, and name, type and size of each tensor. No weights are read.

The package ``gguf`` reads it too, but makes an array of every token and merge of the vocabulary first, which takes seconds.

It holds the tokenizer too, whose ids are those of the vocabulary that the file was made from, as in llama.cpp. A file names how its
vocabulary splits text. transformers knows few of the names and splits the others as GPT-2 does, without a word, so tokenizers of pairs of
bytes and of SentencePiece are built here. RULES, WHOLE_WORDS and BEGINS are facts of llama.cpp (src/llama-vocab.cpp in llama-cpp-python
0.3.36), in the words of the original tokenizers where it quotes them. tests/oracles/llama_ids.py asks llama.cpp.
"""

import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.support.errors import notice

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the type of a value."""
TEXT, ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    type: str
    """ggml's name of how it is stored, such as F32, Q4_1 or Q6_K."""
    elements: int
    place: int
    """First byte in the file."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    """Values by key; of arrays of text, which hold the vocabulary, the length, unless asked for."""
    tensors: dict[str, StoredTensor]
    end: int
    """Bytes that the file has by what its header says."""


def read_header(path: Path, texts: Container[str] = ()) -> GgufHeader:
    """Read a file's header, with the arrays of text of these keys. Raises ValueError for a file that is none, OSError if not readable."""
    if path.stat().st_size < 24:
        raise ValueError(f"{path.stat().st_size} bytes are no GGUF file")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return _Reader(data, texts).header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"its header is cut short or damaged: {error}") from None


class _Reader:
    """Reads from the place that it has reached."""

    def __init__(self, data: mmap, texts: Container[str]) -> None:
        self.data, self.place, self.texts = data, 0, texts

    def header(self) -> GgufHeader:
        if self.data[:4] != MAGIC:
            raise ValueError(f"it begins with {self.data[:4]!r}, not with {MAGIC!r}")
        self.place = 4
        if (version := self.number("I")) not in VERSIONS:
            raise ValueError(f"it is of version {version}, or big-endian; little-endian files of version 2 and 3 are read")
        tensors, values = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(values):
            key = self.text()
            metadata[key] = self.value(self.number("I"), key in self.texts)
        infos = [self.info() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment") or 32)
        start = -(-self.place // alignment) * alignment
        found = {name: StoredTensor(kind, elements, start + offset, size) for name, kind, elements, offset, size in infos}
        return GgufHeader(metadata, found, max([start, *(tensor.place + tensor.size for tensor in found.values())]))

    def number(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self.data, self.place)
        self.place += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        return self.skip(self.number("Q")).decode()

    def skip(self, length: int) -> bytes:
        self.place += length
        if self.place > len(self.data):
            raise struct.error(f"it ends before byte {self.place:,}")
        return self.data[self.place - length : self.place]

    def value(self, kind: int, whole: bool) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"its header holds a value of type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in SCALARS:
            form = f"<{count}{SCALARS[element]}"
            return list(struct.unpack(form, self.skip(struct.calcsize(form))))
        if element != TEXT:
            raise ValueError(f"its header holds an array of type {element}")
        if whole:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.skip(self.number("Q"))
        return count

    def info(self) -> tuple[str, str, int, int, int]:
        """Return name, type, elements, offset and bytes of a tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # checked before: see `gguf_file`

        name = self.text()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = GGMLQuantizationType(self.number("I")), self.number("Q")
        elements, (block, size) = prod(shape), GGML_QUANT_SIZES[kind]
        return name, kind.name, elements, offset, elements // block * size


# The tokenizer.

ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
UPPER, LOWER = (rf"[{cases}\p{{Lm}}\p{{Lo}}\p{{M}}]" for cases in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{UPPER}*{LOWER}+|{UPPER}+{LOWER}*)%s|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
MARKS = rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDS}"
MARKED = rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{ENDS}"
CLAUSES = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"
LATER = r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}"
LETTERS = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{LATER}\x{{10D50}}-\x{{10D8F}}\x{{16E40}}-\x{{1DFFF}}]]"
"""Letters with cases of the alphabets that DeepSeek lists."""
SIGNS = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]"
ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"

RULES: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": (GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", GPT2),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (r"[\r\n]", rf"\s?{LETTERS}+", rf"\s?{SIGNS}+", r"\s+$", ASIAN, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", MARKS),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (WORDS % r"\p{N}{1,3}",),
    "dbrx smaug-bpe chatglm-bpe glm4 glm5": (WORDS % r"\p{N}{1,3}",),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (WORDS % r"\p{N}",),
    "qwen35": (MARKED,),
    "minicpm5": (r"\p{N}{1,3}", WORDS % r"\p{N}+"),
    "seed-coder": ((WORDS % r"\p{N}").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),),
    "tekken": (CASED % ("", r"\p{N}"),),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (CASED % (f"{SHORT}?", r"\p{N}{1,3}"),),
    "poro-chat bloom gpt3-finnish": (CLAUSES,),
    "viking": (CLAUSES, r"\p{N}"),
}
"""Names of `tokenizer.ggml.pre`, and what splits text one after the other: the matches of each, and what lies between them."""
BEGINS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
"""Those that begin a text with its first token where the file does not say."""
WHOLE_WORDS = BEGINS | {"glm4", "glm5", "minicpm5"}
"""Those that take a word of the vocabulary whole, whatever its pairs."""
KEPT = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
TEMPLATE = "tokenizer.chat_template"
"""The chat template; behind a dot the names of others, such as tool_use."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
WORD = "\u2581"
DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of SentencePiece where the file names none."""
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
"""llama.cpp names apart what ends a text (eos), an answer (eot) and a message (eom)."""


def special_tokens(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens that there are; as in llama.cpp, one beyond the vocabulary counts as not named."""
    tokens, usual = metadata.get("tokenizer.ggml.tokens") or 0, DEFAULTS if metadata.get("tokenizer.ggml.model") == "llama" else {}
    count = tokens if isinstance(tokens, int) else len(tokens)
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id", count) for name in SPECIAL}
    found = {name: number if number in range(count) else usual.get(name, count) for name, number in named.items()}
    return {name: number for name, number in found.items() if number < count}


def gguf_tokenizer(path: Path, architecture: str) -> PreTrainedTokenizerBase | None:
    """Build the tokenizer; None for vocabularies of other kinds. Says which rule is not known. Raises KeyError for an incomplete header."""
    metadata = read_header(path, KEPT).metadata
    stated = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    pieces = stated.get("model") == "llama"
    if not pieces and stated.get("model") != "gpt2":
        return None
    tokens, pre = stated["tokens"], stated.get("pre")
    special = {name: tokens[number] for name, number in special_tokens(metadata).items()}
    backend = _of_pieces(stated, special.get("unknown")) if pieces else _of_bytes(stated, path)
    templates = {key.removeprefix(f"{TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{TEMPLATE}.")}
    template = {"default": metadata.get(TEMPLATE), **templates} if templates else metadata.get(TEMPLATE)
    backend.add_tokens([*_added(stated, stripped=architecture == "phi3" and pieces)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, name_or_path=str(path.parent), chat_template=template,
        add_bos_token=stated.get("add_bos_token", pieces or pre in BEGINS), add_eos_token=stated.get("add_eos_token", False),
        bos_token=special.get("bos"), eos_token=special.get("eos"), unk_token=special.get("unknown"), pad_token=special.get("padding"),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _added(stated: dict[str, Any], stripped: bool) -> Iterator[AddedToken]:
    """The tokens that are found in a text before it is split. ``stripped``: white space behind one is left out, as in Phi-3."""
    for token, kind in zip(stated["tokens"], stated.get("token_type", ()), strict=False):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            strip = stripped and token not in ("<unk>", "<s>", "<|endoftext|>")
            yield AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=strip)


def _of_bytes(stated: dict[str, Any], path: Path) -> Tokenizer:
    pre = stated.get("pre")
    rule = next((rule for names, rule in RULES.items() if pre in names.split()), None)
    if rule is None:
        named = f"names an unknown rule of splitting text (tokenizer.ggml.pre = {pre})" if pre else "names no rule of splitting text"
        notice(f"{path.name} {named}: it is split as for GPT-2; tokens of digits and spaces may be others than those the model knows")
    merges = [tuple(merge.split(" ", 1)) for merge in stated["merges"]]
    vocabulary = {token: number for number, token in enumerate(stated["tokens"])}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule or (GPT2,)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_pieces(stated: dict[str, Any], unknown: str | None) -> Tokenizer:
    """SentencePiece joins the neighbours whose token has the best score. A space stands before a text, also behind a special token."""
    vocabulary = {token: number for number, token in enumerate(stated["tokens"])}
    best = sorted(vocabulary.items(), key=lambda item: -stated["scores"][item[1]])
    cuts = ((token[:place], token[place:]) for token, _ in best for place in range(1, len(token)))
    merges = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    spaced, replaced = stated.get("add_space_prefix", True), normalizers.Replace(" ", WORD)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(WORD), replaced]) if spaced else replaced
    ends = [decoders.Strip(content=" ", left=1)] if spaced else []
    backend.decoder = decoders.Sequence([decoders.Replace(WORD, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend
