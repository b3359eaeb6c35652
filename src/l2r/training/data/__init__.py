"""Data: the embedded corpus, token files, the OLMoE mixture, images.

Imports runs/ and below, no model. Begin at tokens.py (what training reads) or corpus.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.training.data.corpus import CorpusOptions as CorpusOptions
    from l2r.training.data.corpus import held_out_texts as held_out_texts
    from l2r.training.data.corpus import split_corpus as split_corpus
    from l2r.training.data.image_sources import open_images as open_images
    from l2r.training.data.images import sample_indices as sample_indices
    from l2r.training.data.listing import shard_source as shard_source
    from l2r.training.data.manifest import Manifest as Manifest
    from l2r.training.data.new_tokenizer import write_new_tokenizer as write_new_tokenizer
    from l2r.training.data.olmoe_mix import ShardPlan as ShardPlan
    from l2r.training.data.olmoe_mix import name_shards as name_shards
    from l2r.training.data.olmoe_mix import parse_tokens as parse_tokens
    from l2r.training.data.olmoe_mix import plan_subset as plan_subset
    from l2r.training.data.olmoe_mix import read_plan as read_plan
    from l2r.training.data.olmoe_mix import write_plan as write_plan
    from l2r.training.data.prepare import PrepareProgress as PrepareProgress
    from l2r.training.data.prepare import prepare_tokens as prepare_tokens
    from l2r.training.data.prepare import shard_tasks as shard_tasks
    from l2r.training.data.rows import balanced_rows as balanced_rows
    from l2r.training.data.rows import name_domains_without_rows as name_domains_without_rows
    from l2r.training.data.rows import spread_evenly as spread_evenly
    from l2r.training.data.rows import too_small_domain as too_small_domain
    from l2r.training.data.sample_text import read_line as read_line
    from l2r.training.data.sample_text import sample_batches as sample_batches
    from l2r.training.data.sample_text import spread_rows as spread_rows
    from l2r.training.data.sources import embedded_sample as embedded_sample
    from l2r.training.data.sources import file_texts as file_texts
    from l2r.training.data.sources import folder_sources as folder_sources
    from l2r.training.data.sources import text_documents as text_documents
    from l2r.training.data.split import TRAIN_PART as TRAIN_PART
    from l2r.training.data.split import Split as Split
    from l2r.training.data.token_writer import write_token_files as write_token_files
    from l2r.training.data.tokenizer import load_tokenizer as load_tokenizer
    from l2r.training.data.tokens import TokenDataset as TokenDataset
else:
    __getattr__, __dir__ = lazy_names(__name__)
