"""Turns words into token ids: by BERT's greedy WordPiece if its vocabulary is there, else by hashing."""

import unicodedata
import zlib

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST_WORD = 100  # characters; a longer one is unknown, as in BERT's reference


def load_vocabulary(path):
    """Word → token id: a word a line, numbered from 0."""
    # Not splitlines: it also splits at separators that are entries of published vocabularies.
    words = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    known = {word: number for number, word in enumerate(words)}
    missing = [word for word in SPECIAL if word not in known]
    if missing:
        raise SystemExit(f"{path} is no vocabulary of BERT: {', '.join(missing)} missing")
    return known


def wordpiece(known):
    """Text → token ids, by this vocabulary. Case counts if the vocabulary has capitals."""
    cased = any(word != word.lower() for word in known if word not in SPECIAL)

    def encode(text):
        return [piece for word in words_of(text, cased) for piece in pieces_of(word, known)]

    return encode


def hashed(vocabulary):
    """Text → token ids, without a vocabulary: the same word has the same id, and others may share it."""
    first = len(SPECIAL)

    def encode(text):
        return [
            first + zlib.crc32(word.encode()) % (vocabulary - first) for word in words_of(text, cased=False)
        ]

    return encode


def words_of(text, cased):
    """Split at blanks, and around each punctuation mark."""
    if not cased:
        text = unicodedata.normalize("NFD", text.lower())
        text = "".join(character for character in text if unicodedata.category(character) != "Mn")
    return "".join(f" {each} " if _punctuation(each) else each for each in text).split()


def pieces_of(word, known):
    """The longest known beginning, then the longest of the rest (`##ing`), and so on; all or unknown."""
    found, start = [], 0
    while start < len(word) and len(word) <= _LONGEST_WORD:
        prefix = "##" if start else ""
        end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in known), None)
        if end is None:
            return [known[UNKNOWN]]
        found.append(known[prefix + word[start:end]])
        start = end
    return found or [known[UNKNOWN]]


def _punctuation(character):
    # ASCII symbols such as $ and ^ count too, as in BERT's reference.
    ascii_symbol = (
        character.isascii() and character.isprintable() and not (character.isalnum() or character == " ")
    )
    return ascii_symbol or unicodedata.category(character).startswith("P")
