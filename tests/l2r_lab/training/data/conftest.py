"""Documents, shards and a tokenizer, as tests of text have them."""

from tests.text.conftest import documents, shard_folder, tokenizer_file, write_shard

__all__ = ["documents", "shard_folder", "tokenizer_file", "write_shard"]
