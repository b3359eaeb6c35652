"""A checkpoint's generation_config.json says which tokens end an answer, and nothing else."""

import json

import pytest

from tests.engines.serve.conftest import serving
from tests.tiers import few

NEW = 6
# What changes scores, ends early, or makes ``generate`` run another algorithm or refuse.
SETTINGS = {
    "scores": {"repetition_penalty": 5.0, "guidance_scale": 1.5, "temperature": 0.1, "top_k": 1},
    "ngrams": {"no_repeat_ngram_size": 1},
    "tokens": {"suppress_tokens": [5], "begin_suppress_tokens": [6], "forced_eos_token_id": 7},
    "lengths": {"min_new_tokens": 2, "max_length": 3, "max_time": 1e-6},
    "decay": {"exponential_decay_length_penalty": [1, 2.0]},
    "strings": {"stop_strings": ["a", "e", " "]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "use_cache": False},
}


def scores(folder, **options):
    """Tokens and log-probabilities of a greedy answer."""
    with serving(folder, **options) as client:
        answer = client.complete(max_tokens=NEW, logprobs=3, return_token_ids=True)
    assert answer.status == 200, answer
    (choice,) = answer.body["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]


@pytest.fixture(scope="module")
def plain(folder):
    """Of the checkpoint as it is."""
    return scores(folder)


@pytest.mark.parametrize("setting", few(SETTINGS, ("scores", "lengths", "beams"), "every field"))
@pytest.mark.parametrize("continuous_batching", [False, True], ids=["one_by_one", "batching"])
def test_answers_do_not_depend_on_the_file(folder, tmp_path, plain, setting, continuous_batching):
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    fields = json.loads((folder / "generation_config.json").read_text()) | SETTINGS[setting]
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    tokens, logprobs, finish = scores(tmp_path, continuous_batching=continuous_batching)
    assert (tokens, finish) == (plain[0], plain[2])
    assert logprobs == pytest.approx(plain[1], abs=1e-4)
