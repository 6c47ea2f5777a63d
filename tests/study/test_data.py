"""The study's data: masking, pairs of sentences, WordPiece and the loaders."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "study"
sys.path.insert(0, str(STUDY))

import data  # noqa: E402
from options import options_of, steps_of  # noqa: E402
from wordpiece import SPECIAL, hashed, load_vocabulary, wordpiece, words_of  # noqa: E402

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
FIRST_WORD = 5 + data.COUNTING  # of generated text, after special and counting words
WORDS = ("un", "##aff", "##able", "the", "aff", "a", ",", "!", "cafe", "##s", "$", "want", "##ed")


def taken(*words, batches=8):
    """The first batches of these options, put together."""
    found, line = data.batches(options_of("", [str(word) for word in words]))
    parts = list(itertools.islice(found, batches))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, line


def original(found):
    """Token ids before masking."""
    return np.where(found["labels"] == data.IGNORED, found["input_ids"], found["labels"])


def likely(count, of, chance):
    """Within four standard deviations of a binomial distribution."""
    return abs(count - of * chance) <= 4 * math.sqrt(of * chance * (1 - chance))


def vocabulary(folder, words=WORDS):
    path = folder / "vocab.txt"
    path.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
    return path


@pytest.mark.parametrize("model", ["bert", "albert"])
def test_pretraining_batches_are_full_pairs_of_sentences(model):
    found, line = taken("--model", model)
    ids = original(found)
    assert line.startswith("data: generated text")
    assert {name: values.shape for name, values in found.items()} == {
        **dict.fromkeys(("input_ids", "token_type_ids", "attention_mask", "labels"), (256, 128)),
        **dict.fromkeys(("masked_positions", "masked_ids", "masked_weights"), (256, 20)),
        "next_sentence_label": (256,),
    }
    assert (found["attention_mask"] == 1).all()
    assert (ids[:, 0] == CLS).all()
    assert (ids[:, -1] == SEP).all()
    assert ((ids == SEP).sum(axis=1) == 2).all()
    # The second part begins behind the first separator.
    before = np.cumsum(ids == SEP, axis=1) - (ids == SEP)
    assert (found["token_type_ids"] == before).all()
    assert ids.min() >= CLS
    assert ids.max() < {"bert": 30522, "albert": 30000}[model]
    assert MASK not in ids
    assert likely(found["next_sentence_label"].sum(), 256, 0.5)


def test_masking_is_that_of_bert():
    found, _ = taken("--seed", 5)
    ids, chosen = original(found), found["labels"] != data.IGNORED
    assert (chosen.sum(axis=1) == 19).all()  # 15 % of 128
    shown = found["input_ids"][chosen]
    hidden, kept = (shown == MASK).sum(), (shown == ids[chosen]).sum()
    count = chosen.sum()
    assert likely(hidden, count, 0.8)
    assert likely(kept, count, 0.1)
    assert likely(count - hidden - kept, count, 0.1)
    assert not np.isin(ids[chosen], (CLS, SEP, PAD)).any()
    # The reference's way says the same.
    weights = found["masked_weights"] == 1
    rows = np.nonzero(weights)[0]
    positions = found["masked_positions"][weights]
    assert (weights.sum(axis=1) == 19).all()
    assert chosen[rows, positions].all()
    assert (found["masked_ids"][weights] == ids[rows, positions]).all()
    assert not found["masked_ids"][~weights].any()


def test_few_tokens_have_one_that_is_predicted():
    ids = np.array([CLS, 77, SEP, SEP] + [PAD] * 12, np.int32)
    shown, positions = data.mask(
        ids, dict(zip(SPECIAL, range(5), strict=True)), 200, np.random.default_rng(0)
    )
    assert positions.tolist() == [1]
    assert shown[1] == MASK
    assert [data.most_predicted(length) for length in (16, 64, 128, 512)] == [3, 10, 20, 80]


def test_generated_text_tells_whether_the_second_part_follows():
    """BERT: of another text, and so mostly of another topic. ALBERT: of the same, but swapped."""
    bert, _ = taken("--seed", 1)
    albert, _ = taken("--seed", 1, "--model", "albert")
    other_topic = []
    for ids, kinds, label in zip(
        original(bert), bert["token_type_ids"], bert["next_sentence_label"], strict=True
    ):
        first, second = (
            set((ids[(kinds == kind) & (ids >= FIRST_WORD)] - FIRST_WORD) % data.TOPICS) for kind in (0, 1)
        )
        assert len(first) == len(second) == 1
        if label:
            other_topic.append(first != second)
        else:
            assert first == second
    assert likely(sum(other_topic), len(other_topic), 1 - 1 / data.TOPICS)
    compared = 0
    for ids, kinds, label in zip(
        original(albert), albert["token_type_ids"], albert["next_sentence_label"], strict=True
    ):
        first, second = (ids[(kinds == kind) & (ids >= 5) & (ids < FIRST_WORD)] for kind in (0, 1))
        if first.size and second.size:
            before, after = (second, first) if label else (first, second)
            assert before.max() <= after.min()
            compared += 1
    assert compared > 128


def test_generated_sentences_are_shaped_like_colas():
    found, line = taken("--stage", "finetune", batches=33)  # each sentence once
    assert "generated in the shape of CoLA" in line
    assert "approximate" in line
    lengths = found["attention_mask"].sum(axis=1) - 2
    assert abs(lengths.mean() - 9.5) < 0.5
    assert lengths.min() >= 2
    assert lengths.max() <= 45
    assert likely(found["labels"].sum(), 1056, data.ACCEPTABLE)
    assert not found["token_type_ids"].any()
    assert (found["input_ids"][found["attention_mask"] == 0] == PAD).all()
    words = (found["attention_mask"] == 1) & (found["input_ids"] >= 5)
    parity = (found["input_ids"] - 5) % 2 == found["labels"][:, None]
    assert parity[words].all()
    # The ten most common of 15,258 ranks, by Zipf's law.
    ranks = [1 / (rank + 1) for rank in range((30522 - 5) // 2)]
    common = (found["input_ids"][words] < 5 + 2 * 10).sum()
    assert likely(common, words.sum(), sum(ranks[:10]) / sum(ranks))


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "predict"])
def test_the_same_seed_gives_the_same_batches(stage):
    (first, _), (again, _), (other, _) = (taken("--stage", stage, "--seed", seed) for seed in (3, 3, 4))
    assert list(first) == list(again)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert (first["input_ids"] != other["input_ids"]).any()
    assert ("labels" in first) == (stage != "predict")


def test_short_sequences_and_small_vocabularies():
    found, _ = taken("--length", 8, "--vocabulary", 64, "--batch", 3)
    assert found["input_ids"].shape == (24, 8)
    assert found["masked_ids"].shape == (24, 2)
    assert original(found).max() < 64
    found, _ = taken("--length", 8, "--vocabulary", 64, "--stage", "finetune")
    assert (found["input_ids"][:, 0] == CLS).all()
    assert ((found["input_ids"] == SEP).sum(axis=1) == 1).all()


def test_wordpiece(tmp_path):
    known = load_vocabulary(vocabulary(tmp_path))
    encode = wordpiece(known)

    def pieces(text):
        return [list(known)[number] for number in encode(text)]

    assert pieces("unaffable") == ["un", "##aff", "##able"]
    assert pieces("The CAFÉS,unwanted!") == ["the", "cafe", "##s", ",", "[UNK]", "!"]
    assert pieces("wanted a$a") == ["want", "##ed", "a", "$", "a"]
    assert pieces("  \n\t") == []
    assert pieces("affx") == ["[UNK]"]
    assert pieces("a" * 101) == ["[UNK]"]
    assert pieces("[SEP]") == ["[UNK]"] * 3  # text cannot make a separator
    assert encode("un the") == [5, 8]


def test_a_vocabulary_with_capitals_is_cased(tmp_path):
    known = load_vocabulary(vocabulary(tmp_path, ("The", "the", "É")))
    assert wordpiece(known)("The the É THE") == [5, 6, 7, UNKNOWN]
    assert words_of("É", cased=False) == ["e"]


def test_hashed_words():
    encode = hashed(200)
    assert encode("the cat, the dog")[0] == encode("the cat, the dog")[3]
    assert encode("The") == encode("the")
    many = [encode(f"word{number}")[0] for number in range(2000)]
    assert min(many) == 5
    assert max(many) == 199


def test_a_vocabulary_must_have_the_special_words(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[CLS]\nthe\n")
    with pytest.raises(
        SystemExit, match=r"vocab.txt is no vocabulary of BERT: \[UNK\], \[SEP\], \[MASK\] missing"
    ):
        load_vocabulary(tmp_path / "vocab.txt")


def test_cola_as_published(tmp_path):
    words = [f"w{number}" for number in range(60)]
    vocabulary(tmp_path, ("the", *words))
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "in_domain_train.tsv").write_text('gj04\t1\t\tThe "w1\ngj04\t0\t*\tw2 w3 the.\n', encoding="utf-8")
    (raw / "in_domain_dev.tsv").write_text("gj04\t1\t\tw5\n", encoding="utf-8")
    sentences, labels = data.load_cola(raw / "in_domain_train.tsv")
    assert sentences == ['The "w1', "w2 w3 the."]
    assert labels == [1, 0]
    found, line = taken("--stage", "finetune", "--data", tmp_path, "--length", 8, "--batch", 2, batches=1)
    assert line == "data: CoLA, 2 sentences of in_domain_train.tsv, WordPiece by vocab.txt (66 words)"
    rows = {int(label): row.tolist() for row, label in zip(found["input_ids"], found["labels"], strict=True)}
    assert rows == {
        1: [CLS, 5, UNKNOWN, 7, SEP, PAD, PAD, PAD],
        0: [CLS, 8, 9, 5, UNKNOWN, SEP, PAD, PAD],
    }
    # Predictions need no labels: those of the development set are left out.
    found, line = taken("--stage", "predict", "--data", tmp_path, "--length", 8, "--batch", 2, batches=1)
    assert "1 sentences of in_domain_dev.tsv" in line
    assert "labels" not in found
    # There is no text for pre-training, and it says so.
    assert taken("--data", tmp_path, "--batch", 2, batches=1)[1].startswith("data: generated text")


def test_colas_test_of_glue(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("index\tsentence\n0\tBill whistled.\n1\tJohn\u2028sang.\n", encoding="utf-8")
    assert data.load_cola(path) == (["Bill whistled.", "John\u2028sang."], None)
    found, line = taken("--stage", "predict", "--data", tmp_path, "--batch", 4, batches=1)
    assert line == "data: CoLA, 2 sentences of test.tsv, words hashed into a vocabulary of 30522"
    assert found["attention_mask"].sum(axis=1).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gj04\t1\t\tfine\ngj04\t2\t\tno label\n", ":2 is no row of CoLA"),
        ("just words\n", ":1 is no row of CoLA"),
        ("", ":1 is no row of CoLA"),
        ("index\tsentence\n", "is not CoLA: 0 sentences"),
        ("gj04\t1\t\tfine\n1\tno label\n", "is not CoLA: 2 sentences, 1 labels"),
    ],
)
def test_what_is_not_cola(tmp_path, text, why):
    path = tmp_path / "train.tsv"
    path.write_text(text)
    with pytest.raises(SystemExit, match=why):
        data.load_cola(path)


def test_text_corpora(tmp_path):
    (tmp_path / "b.txt").write_text("five six\n")
    (tmp_path / "a.txt").write_text("one two\nthree\n\n\n  \nfour\n", encoding="utf-8")
    documents, count = data.load_documents(
        [tmp_path / "a.txt", tmp_path / "b.txt"], lambda line: [len(word) for word in line.split()]
    )
    assert [[sentence.tolist() for sentence in document] for document in documents] == [
        [[3, 3], [5]],
        [[4]],
        [[4, 3]],
    ]
    assert count == 4
    found, line = taken("--data", tmp_path, "--length", 16, "--batch", 4, "--vocabulary", 500, batches=8)
    assert line == "data: 4 sentences of text in 2 files, words hashed into a vocabulary of 500"
    encode = hashed(500)
    words = {*encode("one two three four five six"), CLS, SEP, PAD}
    assert set(original(found).ravel().tolist()) == words
    assert (found["masked_weights"].sum(axis=1) >= 1).all()


def test_a_single_sentence_is_text_enough(tmp_path):
    (tmp_path / "a.txt").write_text("word\n")
    for model in ("bert", "albert"):
        found, _ = taken("--data", tmp_path, "--length", 8, "--model", model, batches=1)
        assert (found["masked_weights"].sum(axis=1) == 1).all()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--vocabulary", "63"], "--vocabulary must be 64 at least"),
        (["--data", "nowhere"], "--data nowhere is no folder"),
        (["--hidden", "100", "--heads", "3"], "--hidden 100 is no multiple of --heads 3"),
        (["--length", "7"], "--length must be 8 at least"),
        (["--layers", "0"], "0 is not positive"),
    ],
)
def test_bad_options(words, why, capsys):
    with pytest.raises(SystemExit) as left:
        options_of("", words)
    assert left.value.code == 2
    assert why in capsys.readouterr().err


def test_defaults(tmp_path):
    options = options_of("", [])
    assert (options.vocabulary, options.heads, options.batch, options.length) == (30522, 12, 32, 128)
    assert options_of("", ["--model", "albert"]).vocabulary == 30000
    assert options_of("", ["--hidden", "32"]).heads == 1
    vocabulary(tmp_path, [f"w{number}" for number in range(95)])
    assert options_of("", ["--data", str(tmp_path)]).vocabulary == 100
    assert list(steps_of(options_of("", ["--seconds", "0", "--steps", "3"]))) == [0, 1, 2]
    assert list(steps_of(options_of("", ["--seconds", "0"]))) == [0]
