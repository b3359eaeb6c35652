"""What commands read, as the rooms below make it for their own tests."""

from tests.checkpoints import checkpoint, small_tokenizer
from tests.text.conftest import shard_folder, tokenizer_file

__all__ = ["checkpoint", "shard_folder", "small_tokenizer", "tokenizer_file"]
