"""An engine whose cache is too small, which decodes speculatively and selects by span means in strides."""

from tests.vllm.engines import (
    assert_generated,
    engine,
    generate,
    load_model,
    metric,
    prompts,
    recorded_calls,
    recorded_steps,
    save_model,
    tokens_of,
)

#: Nodes of 16 and 256 tokens in pages of 16: a node of layer 2 reaches across 16 pages.
OPTIONS = {
    "compression_rate": 16,
    "top_k": 8,
    "max_top_nodes": 64,
    "selection_span": 2,
    "selection_stride": 4,
}


def test_preemption_and_drafts(models):
    path = save_model(models, "Qwen3", vocab_size=64, htree=OPTIONS)
    asked = prompts(600, 90, 450, 300, 520, 33, vocabulary=64)
    with engine(
        path,
        attention_backend="CUSTOM",
        block_size=16,
        num_gpu_blocks_override=130,
        max_model_len=1024,
        disable_log_stats=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    ) as llm:
        with recorded_calls() as calls, recorded_steps("drafts_and_preemption", 1024):
            found = [tokens_of(x) for x in generate(llm, asked, tokens=60)]
        assert metric(llm, "vllm:num_preemptions") > 0
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 100
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        assert 0 < accepted < metric(llm, "vllm:spec_decode_num_draft_tokens")
    counts = [call.step.cu_rows.diff().tolist() for call in calls]
    assert any(max(n) == 5 and min(n) < 5 for n in counts), "drafts beside others were to be verified"
    model = load_model(path, "htree")
    for prompt, tokens in zip(asked, found, strict=True):
        assert len(tokens) == 60
        assert_generated(model, prompt, tokens)
