"""The data that the models are trained on: endless batches of numpy arrays, the same for the same seed.

    batches(options)  →  (iterator of {name: array}, the line `data: …` that says what they are)

Pre-training   input_ids, token_type_ids, attention_mask (batch × length)
               labels (batch × length): −100 where nothing is predicted
               masked_positions, masked_ids, masked_weights (batch × most predicted): the same, as BERT's
               reference has it
               next_sentence_label (batch): 0 where the second part follows the first, 1 where it does not
               (BERT: it is of another text; ALBERT: the parts are swapped)
Fine-tuning    input_ids, token_type_ids, attention_mask; labels (batch): 1 is acceptable
Prediction     the same without labels

All are int32 except masked_weights. If --data has real text, it is used: for pre-training, .txt files with a
sentence a line and a blank line between documents; otherwise CoLA's .tsv files, as published or as in GLUE.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from wordpiece import CLS, MASK, PAD, SEP, SPECIAL, hashed, load_vocabulary, wordpiece

MASKED = 0.15
IGNORED = -100  # no label here
MOST_SENTENCES = 50_000  # of a corpus: far more than a run sees
TRAIN_FILES = ("in_domain_train.tsv", "train.tsv")
TEST_FILES = ("test.tsv", "cola_in_domain_test.tsv", "in_domain_test.tsv", "in_domain_dev.tsv", "dev.tsv")
TOPICS, COUNTING = 4, 8  # of generated text
TEST_SENTENCES = 1063  # of CoLA in GLUE
ACCEPTABLE = 0.704  # of CoLA's sentences, about
# Token counts are taken as log-normal with mean 9.5 and standard deviation 4.3: only roughly CoLA's.
LENGTH_MU, LENGTH_SIGMA = 2.158, 0.432


class Tokens(NamedTuple):
    encode: object  # text → token ids
    special: dict  # [CLS] … → token id
    vocabulary: int
    said: str


def batches(options):
    rng = np.random.default_rng(options.seed)
    if options.stage == "pretrain":
        documents, tokens, line = _documents(options, rng)
        return _stacked(_pretraining(documents, options, tokens, rng), options.batch), line
    sentences, labels, tokens, line = _sentences(options, rng)
    if options.stage == "predict":
        labels = None
    return _stacked(_classified(sentences, labels, options, tokens, rng), options.batch), line


def tokens_of(vocabulary, folder=None):
    """How text becomes tokens: by WordPiece if the folder has a vocabulary, else by hashing."""
    path = folder / "vocab.txt" if folder else None
    if path is None or not path.is_file():
        special = {word: number for number, word in enumerate(SPECIAL)}
        said = f"words hashed into a vocabulary of {vocabulary}"
        return Tokens(hashed(vocabulary), special, vocabulary, said)
    known = load_vocabulary(path)
    special = {word: known[word] for word in SPECIAL}
    return Tokens(wordpiece(known), special, vocabulary, f"WordPiece by vocab.txt ({len(known)} words)")


def most_predicted(length):
    """20 of 128, as in BERT's reference."""
    return -(-length * 20 // 128)


def mask(ids, special, vocabulary, rng):
    """What the model sees instead of `ids`, and the positions to predict, in order.

    80 % of these positions show [MASK], 10 % a random word and 10 % what was there.
    """
    candidates = np.flatnonzero(~np.isin(ids, [special[CLS], special[SEP], special[PAD]]))
    count = min(most_predicted(len(ids)), max(1, round(MASKED * np.count_nonzero(ids != special[PAD]))))
    positions = np.sort(rng.choice(candidates, min(count, len(candidates)), replace=False))
    chance = rng.random(len(positions))
    shown = ids.copy()
    shown[positions[chance < 0.8]] = special[MASK]
    random = positions[chance >= 0.9]
    shown[random] = rng.integers(len(SPECIAL), vocabulary, len(random))
    return shown, positions


def load_documents(paths, encode):
    """Documents as lists of sentences as arrays of token ids, and how many sentences there are."""
    documents, count = [[]], 0
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                sentence = np.array(encode(line), np.int32)
                if not line.strip():
                    documents.append([])
                elif len(sentence):
                    documents[-1].append(sentence)
                    count += 1
                if count == MOST_SENTENCES:
                    return [document for document in documents if document], count
        documents.append([])
    return [document for document in documents if document], count


def load_cola(path):
    """Sentences and labels (None: the file has none).

    Rows are source, label, star, sentence; a test's have a number and the sentence, below a headline.
    """
    sentences, labels = [], []
    for number, line in enumerate(_lines(path), 1):
        row = line.split("\t")
        if len(row) == 4 and row[1] in ("0", "1"):
            labels.append(int(row[1]))
        elif len(row) == 2 and number == 1 and not row[0].isdigit():
            continue
        elif len(row) != 2 or not row[0].isdigit():
            raise SystemExit(f"{path}:{number} is no row of CoLA: expected source, label, star, sentence")
        sentences.append(row[-1])
    if not sentences or len(labels) not in (0, len(sentences)):
        raise SystemExit(f"{path} is not CoLA: {len(sentences)} sentences, {len(labels)} labels")
    return sentences, labels or None


def _documents(options, rng):
    files = sorted(options.data.rglob("*.txt")) if options.data else []
    files = [path for path in files if path.name != "vocab.txt"]
    if not files:
        line = f"data: generated text, words by Zipf's law in a vocabulary of {options.vocabulary}"
        documents = [_document(options.length, options.vocabulary, rng) for _ in range(256)]
        return documents, tokens_of(options.vocabulary), line
    tokens = tokens_of(options.vocabulary, options.data)
    documents, count = load_documents(files, tokens.encode)
    if not documents:
        raise SystemExit(f"{options.data} has no text: its .txt files are empty")
    where = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return documents, tokens, f"data: {count} sentences of text in {where}, {tokens.said}"


def _sentences(options, rng):
    names = TEST_FILES if options.stage == "predict" else TRAIN_FILES
    path = _first(options.data, names) if options.data else None
    if path is None:
        line = (
            "data: generated in the shape of CoLA (token counts approximate, mean about 9.5, padded to "
            f"{options.length}), words by Zipf's law in a vocabulary of {options.vocabulary}"
        )
        return (
            *_generated_sentences(TEST_SENTENCES, options.vocabulary, rng),
            tokens_of(options.vocabulary),
            line,
        )
    texts, labels = load_cola(path)
    if labels is None and options.stage == "finetune":
        raise SystemExit(f"{path} has no labels to train on")
    tokens = tokens_of(options.vocabulary, options.data)
    sentences = [np.array(tokens.encode(text), np.int32) for text in texts]
    line = f"data: CoLA, {len(texts)} sentences of {path.name}, {tokens.said}"
    return sentences, labels, tokens, line


def _lines(path):
    # Not splitlines: it also splits at separators inside sentences.
    return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")


def _first(folder: Path, names):
    return next((path for name in names for path in sorted(folder.rglob(name))), None)


def _pretraining(documents, options, tokens, rng):
    special, room = tokens.special, options.length - 3
    most = most_predicted(options.length)
    while True:
        chosen = int(rng.integers(len(documents)))
        first, second = _parts(_passage(documents[chosen], room, rng), rng)
        other = bool(rng.random() < 0.5)
        if other and options.model == "albert":
            first, second = second, first
        elif other:
            another = (chosen + int(rng.integers(1, max(2, len(documents))))) % len(documents)
            second = np.concatenate(_passage(documents[another], room - len(first), rng))
        first, second = _shortened(first, second, room, rng)
        example = _sequence([first, second], options.length, special)
        original = example["input_ids"]
        example["input_ids"], positions = mask(original, special, tokens.vocabulary, rng)
        count = len(positions)
        example["labels"] = np.full(options.length, IGNORED, np.int32)
        example["labels"][positions] = original[positions]
        example["masked_positions"] = _padded(positions, most, 0)
        example["masked_ids"] = _padded(original[positions], most, 0)
        example["masked_weights"] = (np.arange(most) < count).astype(np.float32)
        example["next_sentence_label"] = np.int32(other)
        yield example


def _classified(sentences, labels, options, tokens, rng):
    while True:
        for number in rng.permutation(len(sentences)):
            example = _sequence([sentences[number][: options.length - 2]], options.length, tokens.special)
            if labels is not None:
                example["labels"] = np.int32(labels[number])
            yield example


def _stacked(examples, count):
    while True:
        rows = [next(examples) for _ in range(count)]
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _passage(document, tokens, rng):
    """Sentences in a row with at least so many tokens, if the document has them."""
    lengths = np.array([len(sentence) for sentence in document])
    left = lengths[::-1].cumsum()[::-1]
    start = rng.integers(max(1, np.count_nonzero(left >= tokens)))
    end = start + 1 + int(np.searchsorted(lengths[start:].cumsum(), tokens))
    return document[start:end]


def _parts(sentences, rng):
    """Cut in two between sentences; a single sentence is cut in its middle."""
    if len(sentences) == 1:
        middle = len(sentences[0]) // 2
        return sentences[0][:middle], sentences[0][middle:]
    cut = rng.integers(1, len(sentences))
    return np.concatenate(sentences[:cut]), np.concatenate(sentences[cut:])


def _shortened(first, second, room, rng):
    """Take tokens off the longer part, at either end."""
    while (over := len(first) + len(second) - room) > 0:
        longer = first if len(first) > len(second) else second
        off = min(over, max(1, abs(len(first) - len(second))))
        front = int(rng.integers(off + 1))
        kept = longer[front : len(longer) - (off - front)]
        first, second = (kept, second) if longer is first else (first, kept)
    return first, second


def _sequence(parts, length, special):
    """[CLS] first [SEP] second [SEP] and padding."""
    ids, kinds = [special[CLS]], [0]
    for number, part in enumerate(parts):
        ids += [*part, special[SEP]]
        kinds += [number] * (len(part) + 1)
    return {
        "input_ids": _padded(ids, length, special[PAD]),
        "token_type_ids": _padded(kinds, length, 0),
        "attention_mask": _padded([1] * len(ids), length, 0),
    }


def _padded(values, length, padding):
    found = np.full(length, padding, np.int32)
    found[: len(values)] = values
    return found


def _document(length, vocabulary, rng):
    """A text of one topic.

    A model can learn from it: common words, the topic's words, pairs of words that follow each other, and a
    word at the beginning of each sentence that says how far the text has got.
    """
    topic, first = int(rng.integers(TOPICS)), len(SPECIAL) + COUNTING
    sentences, total = [], 0
    while total < 4 * length:
        ranks = _zipf((vocabulary - first) // TOPICS, int(rng.integers(8, 33)), rng)
        pairs = np.flatnonzero(rng.random(len(ranks) // 2) < 0.5) * 2
        ranks[pairs + 1] = (ranks[pairs] + 1) % ((vocabulary - first) // TOPICS)
        sentences.append((first + ranks * TOPICS + topic).astype(np.int32))
        total += len(ranks)
    for number, sentence in enumerate(sentences):
        sentence[0] = len(SPECIAL) + number * COUNTING // len(sentences)
    return sentences


def _generated_sentences(count, vocabulary, rng):
    """The label can be learned from the words: those of acceptable sentences have odd ranks."""
    first = len(SPECIAL)
    labels = (rng.random(count) < ACCEPTABLE).astype(np.int32)
    lengths = np.clip(rng.lognormal(LENGTH_MU, LENGTH_SIGMA, count).round().astype(int), 2, 45)
    sentences = [
        (first + _zipf((vocabulary - first) // 2, tokens, rng) * 2 + label).astype(np.int32)
        for tokens, label in zip(lengths, labels, strict=True)
    ]
    return sentences, labels


def _zipf(words, count, rng):
    """Ranks from 0, by Zipf's law: as likely as 1 / (rank + 1)."""
    summed = _zipf_sums(words)
    return np.searchsorted(summed, rng.random(count) * summed[-1], side="right").clip(max=words - 1)


@functools.cache
def _zipf_sums(words):
    return np.cumsum(1 / (np.arange(words) + 1))
