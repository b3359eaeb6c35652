"""Text that commands read: documents, tokenizer, rows, held-out text, the embedded corpus, losses.

Imports hf/ and below. Begin at corpus.py (what the package holds) or tokens.py (token files).
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.text.corpus import CorpusOptions as CorpusOptions
    from l2r.text.corpus import build_corpus as build_corpus
    from l2r.text.corpus import held_out_texts as held_out_texts
    from l2r.text.corpus import split_corpus as split_corpus
    from l2r.text.corpus import unseen_part as unseen_part
    from l2r.text.losses_on_text import Texts as Texts
    from l2r.text.losses_on_text import evaluate_text as evaluate_text
    from l2r.text.manifest import Manifest as Manifest
    from l2r.text.manifest import TokenFile as TokenFile
    from l2r.text.manifest import TokenizerIdentity as TokenizerIdentity
    from l2r.text.manifest import plain_name as plain_name
    from l2r.text.manifest import typed as typed
    from l2r.text.manifest import write_manifest as write_manifest
    from l2r.text.new_tokenizer import write_new_tokenizer as write_new_tokenizer
    from l2r.text.perplexity import token_losses as token_losses
    from l2r.text.perplexity import validation_loss as validation_loss
    from l2r.text.rows import balanced_rows as balanced_rows
    from l2r.text.rows import even_rows as even_rows
    from l2r.text.rows import name_domains_without_rows as name_domains_without_rows
    from l2r.text.rows import read_line as read_line
    from l2r.text.rows import sample_batches as sample_batches
    from l2r.text.rows import spread_evenly as spread_evenly
    from l2r.text.rows import spread_rows as spread_rows
    from l2r.text.rows import too_small_domain as too_small_domain
    from l2r.text.shards import SHARD_SUFFIXES as SHARD_SUFFIXES
    from l2r.text.shards import TEXT_FILES as TEXT_FILES
    from l2r.text.shards import BadShardError as BadShardError
    from l2r.text.shards import open_shard as open_shard
    from l2r.text.shards import read_texts as read_texts
    from l2r.text.shards import shard_bytes as shard_bytes
    from l2r.text.shuffling import batch_indices as batch_indices
    from l2r.text.shuffling import epoch_order as epoch_order
    from l2r.text.shuffling import uniform_draws as uniform_draws
    from l2r.text.sources import domain_files as domain_files
    from l2r.text.sources import embedded_sample as embedded_sample
    from l2r.text.sources import file_texts as file_texts
    from l2r.text.sources import folder_sources as folder_sources
    from l2r.text.sources import package_version as package_version
    from l2r.text.sources import text_documents as text_documents
    from l2r.text.split import EVERYTHING as EVERYTHING
    from l2r.text.split import TOKENIZER as TOKENIZER
    from l2r.text.split import TRAIN_PART as TRAIN_PART
    from l2r.text.split import Split as Split
    from l2r.text.streams import BinaryFile as BinaryFile
    from l2r.text.streams import UnreachableError as UnreachableError
    from l2r.text.streams import keep_trying as keep_trying
    from l2r.text.text_loss import ALL_FILES as ALL_FILES
    from l2r.text.text_loss import TextSettings as TextSettings
    from l2r.text.text_loss import model_length as model_length
    from l2r.text.text_loss import text_differences as text_differences
    from l2r.text.text_loss import text_losses as text_losses
    from l2r.text.token_writer import TokenWriter as TokenWriter
    from l2r.text.token_writer import write_token_files as write_token_files
    from l2r.text.tokenizer import load_tokenizer as load_tokenizer
    from l2r.text.tokenizer import save_tokenizer as save_tokenizer
    from l2r.text.tokens import TokenDataset as TokenDataset
    from l2r.text.tokens import check_file as check_file
else:
    __getattr__, __dir__ = lazy_names(__name__)
