"""Our OLMoE inside SGLang, as an external model package. Written from its source, never run here.

    l2r export RUN --out my-l2r-olmoe
    SGLANG_EXTERNAL_MODEL_PACKAGE=l2r.engines.sglang python -m sglang.launch_server \
        --model-path my-l2r-olmoe --trust-remote-code

SGLang imports every module of this package and registers its ``EntryClass``.
"""
