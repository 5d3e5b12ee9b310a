"""With the plug-in installed and not asked for, an engine is what it was."""

from tests.vllm.engines import assert_generated, engine, generate, load_model, prompts, save_model, tokens_of


def test_dense_attention_is_left_alone(models):
    """Of a checkpoint with an index too, which dense attention leaves out."""
    options = {"compression_rate": 4, "top_k": 8, "max_top_nodes": 32, "index_dim": 16}
    path = save_model(models, "Llama", htree=options)
    asked = prompts(700, 33, 1300)
    with engine(path) as llm:
        found = [tokens_of(x) for x in generate(llm, asked)]
    dense, tree = load_model(path, "sdpa"), load_model(path, "htree")
    differ = 0
    for prompt, tokens in zip(asked, found, strict=True):
        assert_generated(dense, prompt, tokens)
        try:
            assert_generated(tree, prompt, tokens)
        except AssertionError:
            differ += 1
    assert differ > 0, "these prompts do not tell dense attention from tree attention"
