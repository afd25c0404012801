"""Compute the tokenizers' goldens: `python -m tests.golden.make_tokenizer_golden MODEL.gguf`, SmolLM2's file.

tokenizer_smollm2.json   ids of transformers' tokenizer for the same file. transformers does not know the file's
                         pre-tokenizer "smollm" and falls back to GPT-2's; the ids are those under the pre-tokenizer
                         that the model publishes (digits one by one, then GPT-2's), and "as_read" keeps those under
                         the fallback where they differ.
tokenizer_splits.json    words of each pre-tokenizer, cut by the `regex` package with the published patterns.
tokenizer_bpe.json       a small byte-level vocabulary whose merges cross words, and ids under each pre-tokenizer: of
                         transformers' classes where it has one, else merged word by word.
tokenizer_sentencepiece.json
                         two small vocabularies trained by sentencepiece, with and without bytes, and its own ids.

Needs the `oracle` extra (made with transformers 5.24, tokenizers 0.23, sentencepiece 0.2). Takes half a minute.
"""

from __future__ import annotations

import argparse
import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regex
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers, trainers

from tests.golden.tokenizer_cases import CODE, NUMBERS, PROSE, RUNS, TEXTS, save

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+CONTRACTION"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*CONTRACTION"
    r"|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [MODERN.replace("DIGITS", "3")],
    "qwen2": [MODERN.replace("DIGITS", "1")],
    "tekken": [CASED.replace("DIGITS", "1").replace("CONTRACTION", "")],
    "gpt-4o": [CASED.replace("DIGITS", "3").replace("CONTRACTION", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")],
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


def cut(text: str, patterns: list[str]) -> list[str]:
    """Words: each pattern cuts what the one before left into its matches and the text between them."""
    pieces = [text] if text else []
    for pattern in patterns:
        # The `regex` package's \s is Python's, which knows a few control characters that Unicode does not.
        compiled = regex.compile(pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}"))
        cuts = []
        for piece in pieces:
            end = 0
            for match in compiled.finditer(piece):
                cuts += [piece[end : match.start()], match[0]]
                end = match.end()
            cuts.append(piece[end:])
        pieces = [piece for piece in cuts if piece]
    return pieces


def smollm2(path: Path) -> dict[str, Any]:
    """Ids with and without special tokens; `as_read` where transformers' fallback differs."""
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    def ids(text: str, special: bool) -> list[int]:
        return oracle(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]

    as_read = [ids(text, False) for text in TEXTS]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    cases = []
    for text, read in zip(TEXTS, as_read, strict=True):
        ordinary, special = ids(text, False), ids(text, True)
        case = {"text": text, "ids": ordinary}
        if special != ordinary:
            case["special"] = special
        if read != ordinary:
            case["as_read"] = read
        cases.append(case)
    return {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__, "cases": cases}


def splits() -> dict[str, Any]:
    """The words of every text under each pre-tokenizer."""
    texts = [text for text in TEXTS if text]
    return {"cases": [{"text": text, **{pre: cut(text, PATTERNS[pre]) for pre in PATTERNS}} for text in texts[:200]]}


def byte_level() -> dict[str, Any]:
    """A vocabulary trained without cutting words, so that a wrong cut always shows in the ids."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(alphabet), show_progress=False)
    trained.train_from_iterator(CODE + PROSE + NUMBERS + ["12 123 1234 7\n\n  x  7\n\n"] * 5, trainer)
    vocab = trained.get_vocab()
    merges = [tuple(pair) for pair in _merges_of(trained)]
    tokens = sorted(vocab, key=vocab.__getitem__)

    whole = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def word_by_word(patterns: list[str]) -> Callable[[str], list[int]]:
        return lambda text: [i for word in cut(text, patterns) for i in whole.encode(word).ids]

    gpt2 = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    digits = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    qwen2 = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    olmo = transformers.GPTNeoXTokenizer(vocab=vocab, merges=merges)

    def ids_of(oracle: Any) -> Callable[[str], list[int]]:
        return lambda text: oracle(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    encoders = {
        "smollm": ids_of(digits),
        "gpt-2": ids_of(gpt2),
        "llama-bpe": word_by_word(PATTERNS["llama-bpe"]),
        "qwen2": ids_of(qwen2),
        "default": word_by_word(PATTERNS["default"]),
        "olmo": ids_of(olmo),
        "tekken": word_by_word(PATTERNS["tekken"]),
        "gpt-4o": word_by_word(PATTERNS["gpt-4o"]),
    }
    texts = TEXTS[::2]
    for text in texts:  # two independent readings of the same rule
        assert word_by_word(PATTERNS["gpt-2"])(text) == encoders["gpt-2"](text), text
        assert word_by_word(PATTERNS["smollm"])(text) == encoders["smollm"](text), text
        composed = unicodedata.normalize("NFC", text)
        assert word_by_word(PATTERNS["qwen2"])(composed) == encoders["qwen2"](text), text
        assert word_by_word(PATTERNS["gpt-2"])(composed) == encoders["olmo"](text), text
    return {
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in merges],
        "cases": [{"text": text, **{pre: encode(text) for pre, encode in encoders.items()}} for text in texts],
    }


def _merges_of(tokenizer: tokenizers.Tokenizer) -> list[list[str]]:
    import json

    return json.loads(tokenizer.to_str())["model"]["merges"]


def _trained(byte_fallback: bool, vocab_size: int) -> sentencepiece_model_pb2.ModelProto:
    written = io.BytesIO()
    corpus = [line for text in CODE + PROSE + NUMBERS for line in text.split("\n")]
    corpus += ["[INST] hi [/INST] yes", "[INST] what is it [/INST]", " " * 9 + "x", "aaaa aaaaaa aa abab ababab"] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=written,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(written.getvalue())
    return model


def _encoder(model: sentencepiece_model_pb2.ModelProto, prefix: bool, squeeze: bool) -> Callable[[str], list[int]]:
    changed = sentencepiece_model_pb2.ModelProto()
    changed.CopyFrom(model)
    changed.normalizer_spec.add_dummy_prefix = prefix
    changed.normalizer_spec.remove_extra_whitespaces = squeeze
    return sentencepiece.SentencePieceProcessor(model_proto=changed.SerializeToString()).encode


def _with_runs(model: sentencepiece_model_pb2.ModelProto) -> sentencepiece_model_pb2.ModelProto:
    """With user-defined runs of blanks and of line ends, as Gemma's vocabularies have."""
    changed = sentencepiece_model_pb2.ModelProto()
    changed.CopyFrom(model)
    pieces = {piece.piece: piece for piece in changed.pieces}
    for run in RUNS:
        text = run.replace(" ", "\u2581")
        piece = pieces.get(text) or changed.pieces.add(piece=text)
        piece.score, piece.type = 0.0, 4
    return changed


def sentencepiece_models() -> dict[str, Any]:
    """Pieces are [text, score, type]; sentencepiece and GGUF number the types alike."""
    model = _trained(byte_fallback=True, vocab_size=700)
    bare = _trained(byte_fallback=False, vocab_size=300)
    plain = _encoder(model, prefix=True, squeeze=False)
    bare_ids = _encoder(bare, prefix=True, squeeze=False)
    no_prefix, squeezed = _encoder(model, prefix=False, squeeze=False), _encoder(model, prefix=True, squeeze=True)
    runs = _encoder(_with_runs(model), prefix=False, squeeze=False)
    cases = []
    for n, text in enumerate(TEXTS):
        case: dict[str, Any] = {"text": text, "ids": plain(text)}
        if n % 3 == 0:
            case |= {"no_prefix": no_prefix(text), "squeezed": squeezed(text), "bare": bare_ids(text)}
            case |= {"runs": runs(text)}
        cases.append(case)
    return {
        "sentencepiece": sentencepiece.__version__,
        "pieces": [[piece.piece, piece.score, piece.type] for piece in model.pieces],
        "bare_pieces": [[piece.piece, piece.score, piece.type] for piece in bare.pieces],
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    path = parser.parse_args().model.resolve()
    save("smollm2", smollm2(path))
    save("splits", splits())
    save("bpe", byte_level())
    save("sentencepiece", sentencepiece_models())


if __name__ == "__main__":
    main()
