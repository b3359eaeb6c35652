"""What commands read, as the rooms below make it for their own tests."""

from tests.data.conftest import shard_folder, tokenizer_file
from tests.evaluation.conftest import checkpoint, small_tokenizer

__all__ = ["checkpoint", "shard_folder", "small_tokenizer", "tokenizer_file"]
