"""Stands in for a table of transformers' tests that its source distribution leaves out."""

# Fields that every configuration takes, each with a value that is not its default.
config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["BertModel"],
    "problem_type": "regression",
    "id2label": {0: "one", 1: "other"},
    "label2id": {"one": 0, "other": 1},
    "bos_token_id": 4,
    "pad_token_id": 5,
    "eos_token_id": 6,
}
