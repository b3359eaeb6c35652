"""What commands read, as the rooms below make it for their own tests."""

from tests.training.data.conftest import shard_folder, tokenizer_file
from tests.training.evaluation.conftest import checkpoint, small_tokenizer

__all__ = ["checkpoint", "shard_folder", "small_tokenizer", "tokenizer_file"]
