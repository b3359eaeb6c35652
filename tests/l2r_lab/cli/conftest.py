"""A folder of shards and a tokenizer, as tests of text have them."""

from tests.text.conftest import shard_folder, tokenizer_file

__all__ = ["shard_folder", "tokenizer_file"]
