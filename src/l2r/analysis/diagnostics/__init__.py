"""Diagnostics: metrics of routing, robustness, usage and geometry, checks before training.

Imports certificates/, images/ and below. Begin at model_diagnosis.py. A new number that
sums over all tokens goes into metrics.py and streaming_sums.py; one that needs places or neighbors
of tokens reads the noted choices, in specialization.py: layer_analyses calls it.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.analysis.diagnostics.collect import LayerRecord as LayerRecord
    from l2r.analysis.diagnostics.collect import collect_records as collect_records
    from l2r.analysis.diagnostics.landscape import FLAT_SCORES as FLAT_SCORES
    from l2r.analysis.diagnostics.landscape import SWEPT_SCORES as SWEPT_SCORES
    from l2r.analysis.diagnostics.landscape import anchors_of as anchors_of
    from l2r.analysis.diagnostics.landscape import drawn_anchors as drawn_anchors
    from l2r.analysis.diagnostics.landscape import logit_landscape as logit_landscape
    from l2r.analysis.diagnostics.model_diagnosis import diagnose_layers as diagnose_layers
    from l2r.analysis.diagnostics.robustness import bf16_copy as bf16_copy
    from l2r.analysis.diagnostics.robustness import count_flips as count_flips
    from l2r.analysis.diagnostics.robustness import perturbation_stability as perturbation_stability
    from l2r.analysis.diagnostics.routing_gain import GAIN_IMAGES as GAIN_IMAGES
    from l2r.analysis.diagnostics.routing_gain import measure_routing_gain as measure_routing_gain
    from l2r.analysis.diagnostics.settings import DiagnosisSettings as DiagnosisSettings
    from l2r.analysis.diagnostics.specialization import (
        saturation_of_diagnoses as saturation_of_diagnoses,
    )
    from l2r.analysis.diagnostics.step_statistics import RouterStatistics as RouterStatistics
    from l2r.analysis.diagnostics.step_statistics import RouterWatch as RouterWatch
    from l2r.analysis.diagnostics.step_statistics import router_statistics as router_statistics
    from l2r.analysis.diagnostics.text_routing import token_pieces as token_pieces
else:
    __getattr__, __dir__ = lazy_names(__name__)
