"""Measure near copies across the split of the embedded corpus, by 13-grams of words.

Prints the share of every domain's validation 13-grams that are found in training text of any
domain, and the files with the most of them.

    python scripts/proofs/corpus_overlap.py --version 1
"""

import argparse
from collections import Counter

from l2r.training.data.corpus import CorpusOptions
from l2r.training.data.held_out import NEWEST, split_files
from l2r.training.data.near_copies import word_grams


def measure(options: CorpusOptions, most: int) -> None:
    """Print a line per domain, then its files with the most 13-grams of training text."""
    cut = options.characters_per_domain
    splits = {
        domain: split_files(files(), cut, domain=domain, version=options.version)
        for domain, files in options.sources().items()
    }
    seen = {gram for train, _ in splits.values() for _, text in train for gram in word_grams(text)}
    for domain, (_, validation) in splits.items():
        copied: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for name, text in validation:
            for gram in word_grams(text):
                total[name] += 1
                copied[name] += gram in seen
        share = sum(copied.values()) / sum(total.values())
        print(f"{domain:10} {share:7.2%} of {sum(total.values()):,} in {len(validation)} files")
        for name, count in copied.most_common(most):
            print(f"           {count / total[name]:7.1%} {count:6,} {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", type=int, default=NEWEST, help="of the corpus")
    parser.add_argument("--most", type=int, default=12, help="files to print per domain")
    arguments = parser.parse_args()
    measure(CorpusOptions(version=arguments.version), arguments.most)
