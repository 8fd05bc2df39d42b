"""The tokenizer of emoji-sd: a CLIP tokenizer with byte pairs learned from the captions of the training pictures.

    python -m training.emoji_sd.tokenizer --data emoji128.npz --out runs/emoji-sd/tokenizer

Writes the folder, and prints the tokens per caption for several sizes of vocabulary.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from fastdiff.text.tokenizer import WORDS, CLIPTokenizer
from fastdiff.text.tokenizer_files import END, START
from training.emoji_sd.captions import caption_table, plain_caption
from training.emoji_sd.data import load

VOCABULARY = 4096  # tokens; 8,192 would shorten captions by only 5 %
LENGTH = 32  # tokens of a prompt, including START and END
COMPARED_SIZES = (1024, 2048, 8192)
VARIANTS = 16  # captions per picture for learning the vocabulary
WORD_END = "</w>"


def learned_merges(captions: Iterable[str], size: int) -> list[tuple[str, str]]:
    """Learn the byte pair merges of a vocabulary of `size` tokens from the captions, in order of their priority.

    The text is split into words as in CLIP, so that the pairs are ones that CLIP's tokenizer looks for.
    """
    tokenizer = Tokenizer(BPE(end_of_word_suffix=WORD_END))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    # The trainer adds only the word-end letters that it meets to its alphabet; the vocabulary has all of them.
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        end_of_word_suffix=WORD_END,
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(pair) for pair in merges][: size - len(alphabet()) - 2]


def alphabet() -> list[str]:
    """Return the 512 single-byte tokens: inside a word, and at its end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters + [letter + WORD_END for letter in letters]


def save_tokenizer(merges: Sequence[tuple[str, str]], folder: Path) -> None:
    """Write vocab.json, merges.txt and the options; transformers 4 and 5 and fastdiff read them identically."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*alphabet(), *("".join(pair) for pair in merges), START, END]
    vocabulary = {token: i for i, token in enumerate(tokens)}  # END last: older text encoders look for the highest id
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    options = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": LENGTH,
        "do_lower_case": True,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(vocabulary[token]): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in (START, END)
        },
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def token_ids(tokenizer: CLIPTokenizer, captions: Sequence[Sequence[str]]) -> Tensor:
    """Return the ids of a table of captions: (N, V, LENGTH) int16."""
    rows = [[tokenizer(caption).ids for caption in row] for row in captions]
    return torch.tensor(rows, dtype=torch.int16)


def lengths(tokenizer: CLIPTokenizer, captions: Iterable[str]) -> Tensor:
    """Return the tokens of each caption, including START and END; a truncated caption counts as infinite."""
    found = []
    for caption in captions:
        tokens = tokenizer(caption)
        found.append(float("inf") if tokens.cut else tokens.ids.index(tokenizer.end) + 1)
    return torch.tensor(found, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer")
    args = parser.parse_args()
    splits = load(args.data, "cpu")
    captions = list(chain(*caption_table(splits.train.words, VARIANTS, seed=0)))
    judged = {name: [plain_caption(word) for word in getattr(splits, name).words] for name in ("train", "validation")}
    for size in (*COMPARED_SIZES, VOCABULARY):
        save_tokenizer(learned_merges(captions, size), args.out)
        tokenizer = CLIPTokenizer(args.out)
        for name, some in {"varied": captions[::VARIANTS], **judged}.items():
            taken = lengths(tokenizer, some)
            kept = taken[taken.isfinite()]
            print(
                f"{tokenizer.size:5d} tokens, {name:10s} captions: {kept.mean():.2f} a caption, "
                f"99 % within {int(kept.quantile(0.99))}, longest {int(kept.max())}, cut {len(taken) - len(kept)}"
            )


if __name__ == "__main__":
    main()
