"""Checkpoints in and out: stock models, ours, and models with swapped routers.

Imports swap/, models/ and below. Begin at pretrained.py; placement.py has dtype and device.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.hf.checkpoints.copying import CheckpointCopy as CheckpointCopy
    from l2r.hf.checkpoints.export import export_remote_code as export_remote_code
    from l2r.hf.checkpoints.folders import averaged_folder as averaged_folder
    from l2r.hf.checkpoints.folders import check_is_language_model as check_is_language_model
    from l2r.hf.checkpoints.folders import check_reads as check_reads
    from l2r.hf.checkpoints.folders import check_reads_text as check_reads_text
    from l2r.hf.checkpoints.folders import checkpoint_digest as checkpoint_digest
    from l2r.hf.checkpoints.folders import checkpoint_folder as checkpoint_folder
    from l2r.hf.checkpoints.folders import files_left_out as files_left_out
    from l2r.hf.checkpoints.folders import is_image_classifier as is_image_classifier
    from l2r.hf.checkpoints.folders import kept_files as kept_files
    from l2r.hf.checkpoints.folders import local_checkpoint as local_checkpoint
    from l2r.hf.checkpoints.foreign_tokenizer import open_tokenizer as open_tokenizer
    from l2r.hf.checkpoints.foreign_tokenizer import token_ids as token_ids
    from l2r.hf.checkpoints.foreign_tokenizer import tokenizer_errors as tokenizer_errors
    from l2r.hf.checkpoints.placement import Placement as Placement
    from l2r.hf.checkpoints.placement import weight_files as weight_files
    from l2r.hf.checkpoints.placement import weight_sizes as weight_sizes
    from l2r.hf.checkpoints.pretrained import FLOAT32 as FLOAT32
    from l2r.hf.checkpoints.pretrained import hugging_face_tokenizer as hugging_face_tokenizer
    from l2r.hf.checkpoints.pretrained import load_causal_lm as load_causal_lm
    from l2r.hf.checkpoints.pretrained import load_config as load_config
    from l2r.hf.checkpoints.pretrained import load_image_classifier as load_image_classifier
    from l2r.hf.checkpoints.pretrained import load_model as load_model
    from l2r.hf.checkpoints.pretrained import load_pretrained as load_pretrained
    from l2r.hf.checkpoints.pretrained import load_tokenizer as load_tokenizer
    from l2r.hf.checkpoints.pretrained import meta_model as meta_model
    from l2r.hf.checkpoints.pretrained import model_like as model_like
    from l2r.hf.checkpoints.pretrained import save_model as save_model
    from l2r.hf.checkpoints.programs import PROGRAM_FORMS as PROGRAM_FORMS
    from l2r.hf.checkpoints.programs import PROGRAM_TOLERANCE as PROGRAM_TOLERANCE
    from l2r.hf.checkpoints.programs import export_program as export_program
    from l2r.hf.checkpoints.run_card import run_of_checkpoint as run_of_checkpoint
    from l2r.hf.checkpoints.run_card import run_sections as run_sections
    from l2r.hf.checkpoints.run_card import update_card as update_card
    from l2r.hf.checkpoints.run_card import write_run_card as write_run_card
else:
    __getattr__, __dir__ = lazy_names(__name__, "lm")
